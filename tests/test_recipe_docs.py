"""What the recipes' pages show: commands that the scripts take, code that runs, tables that are today's."""

import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from datasets import disable_progress_bars
from tiny_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from memo_hf import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", ROOT / "docs/scaling.md", ROOT / "docs/long_text.md"]
LINE = re.compile(r"^    ((?:memo-hf|python|accelerate|pip) \S.*)$", re.MULTILINE)
COMMANDS = sorted({line for page in PAGES for line in LINE.findall(page.read_text())})

sys.path.insert(0, str(ROOT / "recipes"))
import finetune_checkpoint  # noqa: E402
import llama7b_1m  # noqa: E402
import perplexity_by_position  # noqa: E402

disable_progress_bars()
PARSERS = {
    "llama7b_1m.py": lambda argv: llama7b_1m.parser_for(argv).parse_args(argv),
    "finetune_checkpoint.py": lambda argv: finetune_checkpoint.parser_for(argv).parse_args(argv),
    "perplexity_by_position.py": perplexity_by_position.parse_arguments,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, capsys):
    program, *words = shlex.split(command)
    if program == "memo-hf":
        assert not cli.main(words)
        return
    assert program in ("python", "accelerate", "pip")
    for word in words:
        if word.startswith("recipes/"):
            assert (ROOT / word).is_file()
    if program == "pip":
        return
    script = next(index for index, word in enumerate(words) if word.startswith("recipes/") and word.count(".") == 1)
    if words[script] == "recipes/configs" or words[script].endswith(".yaml"):
        script += 1
    parse = PARSERS.get(Path(words[script]).name)
    if parse:
        parse(words[script + 1 :])


def test_long_text_block_runs(checkpoint):
    (block,) = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs/long_text.md").read_text(), re.DOTALL)
    found = {}
    exec(block.replace("outputs/smollm2-135m", str(checkpoint)), found)  # noqa: S102 - our own text
    assert {name: len(values) for name, values in found["row"].items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), 32_768
    )


def test_the_scaling_tables_are_todays():
    made = runpy.run_path(str(ROOT / "benchmarks/scaling_table.py"))
    for path in ("docs/scaling.md", "README.md"):
        assert made["filled"](path) == (ROOT / path).read_text(), "run: python benchmarks/scaling_table.py --write"


def test_perplexity_by_position(checkpoint, tmp_path, capsys):
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        (tmp_path / f"{name}.txt").write_text(f"{letter} and more of it. " * (150 if name == "a" else 120))
    perplexity_by_position.main(
        ["--model", str(checkpoint), "--dataset", str(tmp_path), "--layers", "3", "--fit_steps", "2", "--fit_len", "64",
         "--seq_len", "2100", "--steps", "2", "--learning_rate", "0.01", "--output_dir", str(tmp_path / "out")]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "trained at 128, and now at 2,100" in out
    rows = {
        words[0]: [float(word) for word in words[1:]] for words in map(str.split, out.splitlines()) if len(words) == 4
    }
    assert [name for name in rows if name[0].isdigit()] == ["0-127", "128-511", "512-1023", "1024-2047", "2048-2099"]
    for before, with_memo, without in rows.values():
        assert with_memo == pytest.approx(without, rel=1e-3) and with_memo < before


def test_a_length_that_is_none_is_told_in_one_line(capsys):
    with pytest.raises(SystemExit):
        perplexity_by_position.parse_arguments(["--seq_len", "4k8"])
    assert "argument --seq_len: tokens: cannot read '4k8'; write it as 4096, 100,000" in capsys.readouterr().err


def test_losses_by_position_are_the_models(checkpoint):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    rows = [{"text": "abcdefghij" * 20}, {"text": "klm" * 60}]
    losses = perplexity_by_position.losses_by_position(model, tokenizer, rows, 100)
    whole = []
    for row in rows:
        ids = torch.tensor(tokenizer(row["text"])["input_ids"][:100])[None]
        whole.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses.shape == (99,) and losses.mean().item() == pytest.approx(sum(whole) / 2, rel=1e-5)
    assert f"{math.exp(losses[4:].mean()):.1f}" in perplexity_by_position.table({"loss": losses}, trained=5)
