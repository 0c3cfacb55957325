"""What README and docs show runs as it stands: Python blocks on a tiny model, `memo-hf` commands in a folder of inputs.

A block is left out only where its fence says why: "```python not-run: needs a GPU". Its Python is compiled all the
same, and its commands must name files, make targets and options that exist.
"""

import dataclasses
import json
import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny_models import random_ids, tiny
from transformers import TrainingArguments

from memo_hf import MemoConfig, cli
from memo_hf.forecasting.models import SHIPPED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: not-run: ([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("memo-hf", "make", "python", "accelerate", "pip")


def blocks(language):
    """(page, text, why it is not run or None) of every fenced block in a language."""
    for page in PAGES:
        for name, reason, text in FENCE.findall(page.read_text()):
            if name == language:
                yield page.name, text, reason or None


def commands():
    """(page, command, why it is not run or None), from shell and text blocks and from indented lines."""
    for page in PAGES:
        text = page.read_text()
        for name, reason, block in FENCE.findall(text):
            if name in ("sh", "text"):
                yield from ((page.name, line, reason or None) for line in command_lines(block, r"^ *"))
        yield from ((page.name, line, None) for line in command_lines(FENCE.sub("", text), r"^    "))


def command_lines(text, indent):
    return [
        line[1] for line in re.finditer(rf"{indent}((?:{'|'.join(PROGRAMS)}) .*?) *(?:  #.*)?$", text, re.MULTILINE)
    ]


def first_line(item):
    return f"{item[0]}: {item[1].splitlines()[0]}"


PYTHON = list(blocks("python"))
RUN = [block for block in PYTHON if not block[2]]
COMMANDS = list(dict.fromkeys(commands()))
PLANNED = [command for command in COMMANDS if command[1].startswith("memo-hf ") and not command[2]]


def names(tmp_path) -> dict:
    """What the blocks take for granted."""
    model = tiny("llama")
    ids = random_ids(1, 2048)
    rows = [{"input_ids": ids[0], "labels": ids[0]}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    return dict(
        model=model,
        args=arguments,
        data=rows,
        ids=ids,
        optimizer=optimizer,
        loader=torch.utils.data.DataLoader(rows, batch_size=1),
    )


@pytest.mark.parametrize("block", RUN, ids=map(first_line, RUN))
def test_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where plans are kept
    page, text, _ = block
    given = names(tmp_path)
    before = [parameter.detach().clone() for parameter in given["model"].parameters()]
    exec(compile(text, page, "exec"), given)  # noqa: S102 - our own text
    if re.search(r"\.backward\(|\.train\(\)", text):
        model = given["model"]
        stepped = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert stepped or all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A folder with what the commands read: a model's configuration, buffers, and a memory snapshot."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(SHIPPED["llama-3.1-8b"]))
    (tmp_path / "step.csv").write_text("id,lower,upper,size\na,0,4,4096\nb,2,6,2048\nc,4,8,4096\n")
    event = {"addr": 4096, "size": 512, "stream": 0, "frames": []}
    trace = [{"action": "alloc", **event}, {"action": "free_completed", **event}]
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", PLANNED, ids=map(first_line, PLANNED))
def test_command(command, inputs, capsys):
    assert cli.main(shlex.split(command[1])[1:]) == 0
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("block", [block for block in PYTHON if block[2]], ids=first_line)
def test_what_is_not_run_compiles(block):
    assert len(block[2]) > 10, "say why"
    compile(block[1], block[0], "exec")


def test_other_commands_name_what_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = {spec.name for cls in (MemoConfig, TrainingArguments) for spec in dataclasses.fields(cls)}
    for page, command, reason in COMMANDS:
        program, *words = shlex.split(command)
        if program == "make":
            assert set(words) <= set(targets), command
        if program not in ("python", "accelerate"):
            continue
        (script,) = (ROOT / word for word in words if word.endswith(".py"))
        assert script.is_file(), command
        if script.parent.name == "recipes":
            continue  # their own parsers read them in test_recipe_docs.py
        assert reason or page == "README.md", f"{page}: no test runs {command!r}; say why in its fence"
        source = script.read_text()
        for option in (word for word in words if word.startswith("--")):
            name = option.lstrip("-")
            assert f'"{option}"' in source or name in settings or f"    {name}: " in source, (command, option)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "recipes" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"]({page.name})" not in index and page.name != "README.md"] == []


def test_files_that_are_named_exist():
    for page in PAGES:
        for name in re.findall(
            r"`((?:memo_hf|tests|benchmarks|csrc|recipes|notebooks|docs)/[\w/.*]+)`", page.read_text()
        ):
            assert list(ROOT.glob(name)), f"{page.name} names {name}"
