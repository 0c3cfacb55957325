"""`memo-hf doctor`: what it says is so, its exit code is right, and whatever is missing comes with a line to type."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from memo_hf import cli, diagnosis
from memo_hf.allocator import native
from memo_hf.errors import MemoError
from memo_hf.planner.budgets import host_budget_bytes

ROOT = Path(__file__).parents[1]


def doctor(capsys) -> tuple[int, dict]:
    code = cli.main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def by_name(rows) -> dict:
    return {row["name"]: row for row in rows}


def test_this_machine(capsys):
    code, found = doctor(capsys)
    assert code == 0 and found["can_train"]
    versions = by_name(found["versions"])
    assert versions["torch"]["version"] == importlib.metadata.version("torch")
    assert {"transformers", "accelerate", "peft", "trl", "deepspeed", "flash-attn", "bitsandbytes"} <= versions.keys()
    budget = by_name(found["host"])["budget"]["bytes"]
    assert budget == pytest.approx(host_budget_bytes(), rel=0.2)
    step = by_name(found["step"])["cpu"]
    assert step["swapped_bytes"] > 0 and step["error"] < 1e-5
    assert by_name(found["allocator"])["CPU library"]["found"].startswith(("built", "does not load"))
    if not torch.cuda.is_available():
        assert found["link"] == [
            {"name": "bandwidth", "found": "not measurable: there is no GPU, and host and device are one memory"}
        ]


def test_as_text(capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch             {torch.__version__}" in text
    assert "FlashAttention 2  " in text
    assert "\n  cpu               2 cores, 1 thread in torch\n" in text
    assert "one training step\n  cpu" in text
    assert text.rstrip().endswith("memo_hf can train here")


@pytest.mark.parametrize("version, problem", [("5.10.0", "<6,>=5.17 is needed"), (None, "not installed")])
def test_what_is_needed_and_missing(capsys, monkeypatch, version, problem):
    own = diagnosis._version
    monkeypatch.setattr(diagnosis, "_version", lambda name: version if name == "transformers" else own(name))
    code, found = doctor(capsys)
    assert code == 1 and not found["can_train"]
    assert by_name(found["versions"])["transformers"]["problem"] == problem
    (item,) = [item for item in found["missing"] if item["needed"]]
    assert item == {
        "what": f"transformers: {problem}", "mend": "pip install 'transformers<6,>=5.17'", "needed": True
    }  # fmt: skip
    assert found["step"] == [{"name": "-", "found": "not looked at: something needed is missing"}]


@pytest.mark.parametrize("outcome", [MemoError("broken"), (1e-7, 0), (0.5, 4096)], ids=["raises", "nothing", "wrong"])
def test_a_step_that_fails(capsys, monkeypatch, outcome):
    def step(device):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(diagnosis, "try_one_step", step)
    code = cli.main(["doctor"])
    text = capsys.readouterr().out
    assert code == 1
    assert "NEEDED: a training step on cpu" in text
    assert text.rstrip().endswith("memo_hf can NOT train here")


def test_a_library_that_is_not_built_is_optional(capsys, monkeypatch):
    def load():
        return native._load(ROOT / "nowhere.so", {})

    monkeypatch.setattr(native, "load_cpu_library", load)
    monkeypatch.setattr(diagnosis, "try_one_step", lambda device: (0.0, 1))
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: None)
    code, found = doctor(capsys)
    assert code == 0
    (item,) = [item for item in found["missing"] if "CPU library" in item["what"]]
    assert item["mend"].startswith("pip install --no-build-isolation")
    assert "a C++ compiler" in item["what"]


def test_requirements_of_a_checkout(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", missing)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert diagnosis.requirements() == [Requirement(line) for line in declared]


def test_help_needs_no_torch():
    code = "import sys; from memo_hf import cli; cli.build_parser().format_help(); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "memo_hf.diagnosis"} & set(done.stdout.split())
    assert "memo_hf.commands.doctor" in done.stdout
