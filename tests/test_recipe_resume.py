"""A run that is killed in the middle of a step goes on from its checkpoint as if nothing had been."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import disable_progress_bars
from safetensors.torch import load_file
from tiny_checkpoint import write_checkpoint

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))
import finetune_checkpoint  # noqa: E402
import llama7b_1m  # noqa: E402

disable_progress_bars()
# Between forward and backward of the third step; the last checkpoint is that of the second.
DIES_IN_THE_THIRD_STEP = """
import os, signal, sys, transformers, llama7b_1m
compute_loss = transformers.Trainer.compute_loss
def dying(self, *args, **kwargs):
    loss = compute_loss(self, *args, **kwargs)
    if self.state.global_step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
transformers.Trainer.compute_loss = dying
llama7b_1m.main(sys.argv[1:])
"""
MEMO = ("--swap_fraction", "0.5", "--chunk_size", "16")
STOCK = ("--memo", "false")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def arguments(checkpoint, output, *more):
    return [
        "--model", str(checkpoint), "--dataset", "manual", "--full", "--dtype", "float32", "--seq_len", "64",
        "--documents", "keep", "--learning_rate", "0.01", "--max_steps", "4", "--save_steps", "2", "--use_cpu", "true",
        "--gradient_accumulation_steps", "2", "--disable_tqdm", "true", "--output_dir", str(output), *more,
    ]  # fmt: skip


def losses(output):
    """Loss of each step, as the checkpoint after the last one remembers them."""
    history = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def uninterrupted(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
    llama7b_1m.main(arguments(checkpoint, output, *MEMO))
    found = losses(output)
    assert len(found) == 4 and found[-1] < found[0]
    return output, found


@pytest.fixture(scope="module")
def killed(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": f"{RECIPES.parent}:{RECIPES}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DIES_IN_THE_THIRD_STEP, *arguments(checkpoint, output, *MEMO)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    return output


@pytest.mark.parametrize("how, bound", [(MEMO, 0), (STOCK, 1e-5)], ids=["memo_hf", "stock"])
def test_a_killed_run_goes_on(checkpoint, uninterrupted, killed, tmp_path, how, bound):
    output = tmp_path / "resumed"
    shutil.copytree(killed, output)
    llama7b_1m.main(arguments(checkpoint, output, *how, "--resume_from_checkpoint", "last"))
    whole_output, whole = uninterrupted
    assert losses(output) == pytest.approx(whole, rel=bound, abs=0)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, whole_output))
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= bound * 100 * value.abs().max()  # Adam amplifies rounding


def test_a_stock_run_goes_on_with_memo_hf(checkpoint, uninterrupted, tmp_path):
    """By the other recipe, which shares data and order."""
    finetune_checkpoint.main(arguments(checkpoint, tmp_path, *STOCK))
    assert losses(tmp_path) == pytest.approx(uninterrupted[1], rel=1e-5)
    shutil.rmtree(tmp_path / "checkpoint-4")
    finetune_checkpoint.main(arguments(checkpoint, tmp_path, *MEMO, "--resume_from_checkpoint", "last"))
    assert losses(tmp_path) == pytest.approx(uninterrupted[1], rel=1e-5)


def test_what_is_saved_knows_nothing_of_memo_hf(checkpoint, killed, uninterrupted):
    before = load_file(checkpoint / "model.safetensors").keys()
    for folder in (killed / "checkpoint-2", uninterrupted[0]):
        assert load_file(folder / "model.safetensors").keys() == before
        for path in folder.glob("*config.json"):
            assert "memo" not in path.read_text()
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
