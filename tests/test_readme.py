"""The README's Python blocks and its planning command run as they stand, on a tiny model."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny_models import random_ids, tiny
from transformers import TrainingArguments

from memo_hf import cli

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    memo-hf (.*)$", README, re.MULTILINE)


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


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0] for block in BLOCKS])
def test_block(block, tmp_path):
    given = names(tmp_path)
    before = [parameter.detach().clone() for parameter in given["model"].parameters()]
    exec(compile(block, "README.md", "exec"), given)  # noqa: S102 - our own text
    model = given["model"]
    stepped = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert stepped or all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, capsys):
    assert not cli.main(shlex.split(command))
    assert "host" in capsys.readouterr().out
