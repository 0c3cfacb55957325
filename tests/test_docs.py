"""The docs say all there is: generated pages are up to date, every name and option is there, every message has help."""

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import memo_hf
from memo_hf import cli, errors
from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.forecast import Forecast
from memo_hf.serving import ServingStats
from memo_hf.session import SessionStats

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "memo_hf"
DOCS = ROOT / "docs"
TEXT = "\n".join(page.read_text() for page in [ROOT / "README.md", *DOCS.glob("*.md")])


def test_generated_pages_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import generate

    for page, make in generate.PAGES.items():
        assert (DOCS / page).read_text() == make(), f"docs/{page} is stale: run python docs/generate.py"


def test_every_public_name_and_setting_is_there():
    names = [*memo_hf.__all__, "session.stats", "session.report"]
    names += [spec.name for cls in (memo_hf.MemoConfig, SessionStats) for spec in dataclasses.fields(cls)]
    names += [name for name, item in vars(errors).items() if isinstance(item, type)]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", TEXT)] == []


def section(heading: str) -> str:
    """Of docs/python.md, below its code block, as far as the next heading."""
    found = re.split(rf"^##+ {re.escape(heading)}$", (DOCS / "python.md").read_text(), flags=re.MULTILINE)[1]
    return re.sub(r"```.*?```", "", found.split("\n##")[0], flags=re.DOTALL)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("The options of forecast", list(inspect.signature(make_setup).parameters)[2:]),
        ("Forecast", [spec.name for spec in dataclasses.fields(Forecast)]),
        ("SessionStats", [spec.name for spec in dataclasses.fields(SessionStats)]),
        ("ServingStats", [spec.name for spec in dataclasses.fields(ServingStats)]),
        ("session.report", ["device_peak_bytes", "format"]),
        ("enable", ["model", "config"]),
        ("MemoTrainerMixin", ["memo", "memo_session", "memo_stats", "memo_report", "save_memo_report"]),
        ("MemoAccelerator", ["memo_plugin", "memo_sessions", "memo_report"]),
    ],
)
def test_every_argument_and_attribute_is_described(heading, names):
    assert [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", section(heading))] == []


def test_every_metric_is_there():
    source = (PACKAGE / "integrations" / "progress.py").read_text()
    metrics = re.findall(r'"(memo/\w+)"', source)
    metrics += [f"memo/{where}_peak_gib" for where in re.findall(r'return "(\w+)", ', source)]
    assert len(metrics) == 7 and [name for name in metrics if f"`{name}`" not in TEXT] == []


def test_every_row_of_settings_and_options_has_a_default_and_what_it_does():
    for page in ("configuration.md", "command_line.md", "recipe_options.md"):
        text = (DOCS / page).read_text()
        for table in re.findall(r"^\| \w+ \| default \| what it does \|\n\| --- .*\n((?:\|.*\n)+)", text, re.MULTILINE):
            for row in table.splitlines():
                assert re.fullmatch(r"\| `[^`]+` \| (required|not set|off|`[^`]+`) \| \S.{8,} \|", row), (page, row)


def test_every_option_of_the_scripts_that_make_things_is_there():
    text = TEXT + (ROOT / "recipes" / "README.md").read_text()
    for script in ("get_checkpoint.py", "perplexity_by_position.py"):
        options = re.findall(r'add(?:_argument)?\("(--\w+)"', (ROOT / "recipes" / script).read_text())
        assert options and [name for name in options if f"`{name}`" not in text] == [], script


def test_every_option_of_the_command_line_is_there_and_has_help():
    (subparsers,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in subparsers.choices.items():
        section = TEXT.split(f"\n## memo-hf {name}\n")[1].split("\n## ")[0]
        for action in parser._actions:
            assert action.help, (name, action.dest)
            for option in action.option_strings:
                assert f"`{option}`" in section or option in ("-h", "--help"), (name, option)


# Messages: every error that the package makes, every warning, and every reason for layer mode.

HEADINGS = {"NotTokenwise": "Why a layer runs in layer mode", "_refuse": "NativeLibraryError"}
NOT_FOR_USERS = {"AssertionError"}


def template(node, module) -> str:
    """The text that an expression makes, with `...` for what is not known before it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, module) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, module) if isinstance(node.value, ast.Name) else "..."
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, module) + template(node.right, module)
    if isinstance(node, ast.Name):
        for item in module.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == node.id:
                return template(item.value, module)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).removeprefix("self.")
        for item in ast.walk(module):
            if isinstance(item, ast.FunctionDef) and item.name == called and isinstance(item.body[-1], ast.Return):
                return template(item.body[-1].value, module)
    return "..."


def messages(source: str, where: str):
    """(where, heading, template) of each error and warning that a module's source makes."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        if called in ("logger.warning", "warnings.warn"):
            heading = "Warnings"
        elif re.fullmatch(r"\w+Error", called) and called not in NOT_FOR_USERS:
            heading = called
        elif called in HEADINGS:
            heading = HEADINGS[called]
        elif called in ("SystemExit", "self.error", "parser.error"):
            heading = "Recipes"
        else:
            continue
        text = template(node.args[0], module)
        if re.search(r"\w{3}", text):  # else it passes on the text of another error
            yield f"{where}:{node.lineno}", heading, text


MESSAGES = [
    found
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
    for found in messages(path.read_text(), str(path.relative_to(ROOT)))
    if not found[2].startswith(".... Build it")  # the end of what `_refuse` is given, found there
]


def entries() -> dict[str, list[str]]:
    """Phrases by heading: what stands as code in the first column of each table of the page."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)[1:]:
        heading = section.split("\n")[0]
        for row in re.findall(r"^\| (`.*?) \| (.+) \|$", section, re.MULTILINE):
            found.setdefault(heading, []).extend(re.findall(r"`([^`]+)`", row[0]))
    return found


@pytest.mark.parametrize("where, heading, text", MESSAGES, ids=[message[0] for message in MESSAGES])
def test_every_message_is_in_troubleshooting(where, heading, text):
    assert any(text.startswith(phrase) for phrase in entries().get(heading, ())), (
        f"{where}: docs/troubleshooting.md has no entry under {heading!r} for: {text}"
    )


def test_every_entry_says_what_to_do():
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `.*$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if not re.fullmatch(r"\| (`[^`]+` ?)+\| \S.{6,} \|", row)] == []


def test_every_entry_is_of_a_message():
    for heading, phrases in entries().items():
        for phrase in phrases:
            assert any(h == heading and text.startswith(phrase) for _, h, text in MESSAGES), (heading, phrase)


def test_the_messages_are_found():
    source = (
        "TWO = 'second part'\n"
        "def _why(self):\n    return f'short of {self.n}'\n"
        "def f(x):\n"
        "    raise PlanError(f'{x} is wrong: {TWO}')\n"
        "    raise HostMemoryError(self._why(1)) from None\n"
        "    logger.warning('careful')\n"
        "    raise MemoError(str(x))\n"
        "    parser.error(f'--{x}: none')\n"
    )
    assert [found[1:] for found in messages(source, "m.py")] == [
        ("PlanError", "... is wrong: second part"),
        ("HostMemoryError", "short of ..."),
        ("Warnings", "careful"),
        ("Recipes", "--...: none"),
    ]
