"""Writes the pages of docs/ whose text lives in the code: settings, command line, recipes' arguments, Python names.

    python docs/generate.py

Run after a change to `MemoConfig`, to a subcommand of `memo-hf`, a recipe's arguments or a public docstring; a test
fails until then. The text itself belongs into the code, where `--help` and `help()` show it too.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from pathlib import Path

import memo_hf
from memo_hf import cli, errors
from memo_hf.allocator.cuda import install
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.config import MemoConfig
from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.forecast import Forecast
from memo_hf.serving import ServingStats
from memo_hf.session import LayerStats, Session, SessionStats

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "recipes"))
import finetune_checkpoint  # noqa: E402
import launching  # noqa: E402
import llama7b_1m  # noqa: E402

_NOTE = "<!-- Written by docs/generate.py; change the code's own text and run it again. -->\n"


def configuration() -> str:
    """Every setting of `MemoConfig`."""
    lines = [
        "# Settings",
        _NOTE,
        "Every setting of `memo_hf.MemoConfig`. None of them has to be set. The same names work in",
        '`MemoConfig(...)`, in the dictionary `memo={"swap_fraction": 0.5}` of a Trainer or `MemoPlugin`, in JSON or',
        "YAML through `MemoConfig.from_dict`, and as command-line options where a script parses them with",
        "`transformers.HfArgumentParser`. Bytes are written as people write them: `64GiB`, `64GB`, `512MiB`. A wrong",
        "name or value raises `ConfigError` when the configuration is made, not in the middle of a run.",
        "",
        "| setting | default | what it does |",
        "| --- | --- | --- |",
    ]
    lines += [_setting(spec) for spec in dataclasses.fields(MemoConfig)]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Every subcommand of `memo-hf` and every option of each."""
    lines = [
        "# The command line",
        _NOTE,
        "`memo-hf SUBCOMMAND --help` prints the same. Options may be written with underscores: `--seq_len`.",
        "`memo-hf --version` prints the version. `python -m memo_hf` is the same command.",
        "",
        "The exit code is an answer as well: 0 for yes, 1 for no (it does not fit, the capacity is not met, memo_hf",
        "cannot train here), 2 for a mistake in the arguments, with one line that says what to change.",
    ]
    for name, parser in _subcommands().items():
        lines += ["", f"## memo-hf {name}", "", _sentence(parser.description), ""]
        lines += ["| option | default | what it does |", "| --- | --- | --- |"]
        lines += [_option(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        if parser.epilog:
            lines += ["", "```text", parser.epilog.strip(), "```"]
    return "\n".join(lines) + "\n"


def recipe_options() -> str:
    """The recipes' own arguments, and where their defaults are not transformers'."""
    lines = [
        "# The recipes' arguments",
        _NOTE,
        "What the two recipes that train take beside every field of `transformers.TrainingArguments` and every",
        "[setting](configuration.md) of `MemoConfig`. `--help` lists the most used; `-` and `_` are the same in names.",
        "Which recipe for whom: [recipes/README.md](../recipes/README.md).",
    ]
    for script, cls in (
        ("finetune_checkpoint.py", finetune_checkpoint.Arguments),
        ("llama7b_1m.py", llama7b_1m.Arguments),
    ):
        lines += ["", f"## recipes/{script}", "", "| argument | default | what it does |", "| --- | --- | --- |"]
        lines += [_setting(spec, "--") for spec in dataclasses.fields(cls)]
    lines += ["", "## Defaults that are not transformers' own", "", "| argument | default |", "| --- | --- |"]
    lines += [f"| `--{name}` | `{value!r}` |" for name, value in launching.DEFAULTS.items()]
    for name, values in llama7b_1m.PRESETS.items():
        told = ", ".join(f"`--{key} {value}`" for key, value in values.items())
        lines += ["", f"`llama7b_1m.py --preset {name}`: {told}."]
    lines += ["", "With `--full` the learning rate is 1e-5."]
    return "\n".join(lines) + "\n"


def python_names() -> str:
    """Every public name with its signature and docstring."""
    lines = ["# The Python names", _NOTE, "Everything that `import memo_hf` offers: arguments, results and errors."]
    for name in memo_hf.__all__:
        lines += _entry(name, getattr(memo_hf, name), "##")
        if name == "forecast":
            lines += _entry("The options of forecast", make_setup, "###")
            lines += _entry("Forecast", Forecast, "###")
    lines += ["", "## Session", "", "What `enable` returns, and `MemoTrainer.memo_session` while it trains."]
    for name, member in vars(Session).items():
        if not name.startswith("_") and inspect.getdoc(member) and name in _FOR_USERS:
            lines += _entry(f"session.{name}", member, "###")
    for cls in (SessionStats, LayerStats, ServingStats):
        lines += _entry(cls.__name__, cls, "###")
    lines += ["", "## Beside these"]
    lines += _entry("memo_hf.allocator.meter.AllocatorMeter", AllocatorMeter, "###")
    lines += _entry("memo_hf.allocator.cuda.install", install, "###")
    lines += ["", "## Errors", "", "| class | derives from | meaning |", "| --- | --- | --- |"]
    for cls in vars(errors).values():
        if inspect.isclass(cls):
            bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            lines.append(f"| `{cls.__name__}` | {bases} | {_cell(inspect.getdoc(cls))} |")
    lines += ["", "[Troubleshooting](troubleshooting.md) has every message and what to do."]
    return "\n".join(lines) + "\n"


# Of `Session`; the rest of its methods are for the engine.
_FOR_USERS = ("stats", "swap_fraction", "describe", "report", "train_with", "close")
PAGES = {
    "configuration.md": configuration,
    "command_line.md": command_line,
    "recipe_options.md": recipe_options,
    "python.md": python_names,
}


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return subparsers.choices


def _setting(spec: dataclasses.Field, prefix: str = "") -> str:
    default = {dataclasses.MISSING: "required", None: "not set"}.get(spec.default, f"`{spec.default!r}`")
    text = _cell(spec.metadata["help"])
    if prefix and spec.metadata.get("choices"):
        text += " " + ", ".join(f"`{choice}`" for choice in spec.metadata["choices"]) + "."
    return f"| `{prefix}{spec.name}` | {default} | {text} |"


def _option(action: argparse.Action) -> str:
    name = f"`{action.option_strings[0]}`" if action.option_strings else f"`{action.metavar or action.dest}`"
    text = action.help or ""
    if action.choices:
        text += (": " if text else "") + ", ".join(f"`{choice}`" for choice in action.choices)
    default = {None: "not set", False: "off"}.get(action.default, f"`{action.default}`")
    return f"| {name} | {'required' if action.required else default} | {_cell(text)} |"


def _entry(name: str, item, level: str) -> list[str]:
    lines = ["", f"{level} {name}", ""]
    if callable(item) and not dataclasses.is_dataclass(item) and not _is_error(item):
        lines += ["```text", f"{item.__name__}{_signature(item)}", "```", ""]
    return lines + _markdown(inspect.getdoc(item))


def _signature(function) -> str:
    """`(model, config=None)`: names and defaults; the docstring says the types."""
    shown, is_keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            if not any(text.startswith("*") for text in shown):
                shown.append("*")
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "..." if parameter.default is ... else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f"={default}"
        shown.append(prefix + parameter.name + default)
    return f"({', '.join(shown)})"


def _markdown(docstring: str) -> list[str]:
    """A docstring's `Args:` and the like as lists."""
    lines, in_list = [], False
    for line in docstring.split("\n"):
        head = re.fullmatch(r"(Args|Attributes|Returns|Raises):", line)
        if head:
            lines.append(f"**{head[1]}**\n")
            in_list = True
        elif in_list and line.startswith("    ") and not line.startswith("     "):
            # "name, other: what it is", where the names are written as code.
            lines.append("- " + re.sub(r"^[*\w, ]+(?=: )", lambda names: f"`{names[0]}`", line.strip()))
        elif in_list and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            in_list = in_list and not line
            lines.append(line)
    return lines


def _is_error(item) -> bool:
    return inspect.isclass(item) and issubclass(item, Exception)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
