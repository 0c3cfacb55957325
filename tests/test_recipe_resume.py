"""A run of two ranks that is killed in the middle of a step goes on from its checkpoint as if nothing had been."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import disable_progress_bars
from harness.deepspeed_ranks import deepspeed_over_gloo
from harness.forked import run_ranks
from harness.ranks import fsdp_on_cpu
from launch_environment import environment_of
from safetensors.torch import load_file
from tiny_checkpoint import write_checkpoint
from torch.multiprocessing import ProcessExitedException
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
RANKS, STEPS = 2, 4
MEMO = ("--swap_fraction", "0.5", "--chunk_size", "16")
cannot_load = pytest.mark.skipif(
    transformers.__version__.startswith("5.17."),
    reason="transformers 5.17 cannot load an optimizer on one of several ranks on a CPU, with memo_hf or without",
)
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


def rank_of(rank, recipe, argv, environment, notes, killed_in):
    """One rank of a launch of `recipe`, which notes the loss of each micro-batch in the folder `notes`.

    In the step `killed_in` it is killed between the forward and the backward pass of the last micro-batch.
    """
    disable_progress_bars()
    os.environ |= environment
    engine = DistributedType.MULTI_CPU
    if "ACCELERATE_USE_DEEPSPEED" in environment:
        engine = DistributedType.DEEPSPEED
        deepspeed_over_gloo()
        PartialState(backend="gloo")  # else accelerate takes CPU processes under DeepSpeed for single ones
    elif "ACCELERATE_USE_FSDP" in environment:
        engine = DistributedType.FSDP
        fsdp_on_cpu()
    compute_loss = Trainer.compute_loss

    def noted(self, *args, **kwargs):
        loss = compute_loss(self, *args, **kwargs)
        assert torch.distributed.get_world_size() == self.accelerator.num_processes == RANKS
        assert self.accelerator.distributed_type == engine
        assert bool(self.accelerator.is_fsdp2) is (engine == DistributedType.FSDP)
        with open(notes / f"{rank}.txt", "a") as file:
            print(self.state.global_step, loss.item(), file=file)
        if self.state.global_step == killed_in and self.accelerator.sync_gradients:
            (notes / f"{rank}.noted").touch()
            while len(list(notes.glob("*.noted"))) < RANKS:  # the end of the first to die is the end of all
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    Trainer.compute_loss = noted
    importlib.import_module(recipe).main(argv)


def as_launched(config, **changes):
    """The environment of a recipe's configuration, in fp32, for `launch`."""
    environment = {**environment_of(config), "ACCELERATE_MIXED_PRECISION": "no", **changes}
    del environment["RANK"]
    return environment


def launch(folder, checkpoint, *how, recipe="llama7b_1m", environment=None, killed_in=None):
    """Losses of each step, for each rank, of processes that run a recipe into `folder` until they end or are killed."""
    notes = Path(tempfile.mkdtemp(dir=folder.parent))
    killed = (
        pytest.raises(ProcessExitedException, match="signal SIGKILL")
        if killed_in is not None
        else contextlib.nullcontext()
    )
    with killed:
        argv = arguments(checkpoint, folder, *how)
        run_ranks(rank_of, recipe, argv, environment or {}, notes, killed_in, num_ranks=RANKS)
    curves = []
    for rank in range(RANKS):
        curves.append({})
        for line in (notes / f"{rank}.txt").read_text().splitlines():
            step, loss = line.split()
            curves[rank].setdefault(int(step), []).append(float(loss))
    return curves


def assert_same_losses(curves, others, steps, bound):
    for ours, theirs in zip(curves, others, strict=True):
        assert list(ours) == list(steps)
        for step in steps:
            assert ours[step] == pytest.approx(theirs[step], rel=bound, abs=0), step


@pytest.fixture(scope="module")
def uninterrupted(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted") / "output"
    first, second = curves = launch(output, checkpoint, *MEMO)
    assert {step: len(found) for step, found in first.items()} == dict.fromkeys(range(STEPS), 2)
    assert sum(first[3]) < sum(first[0])
    assert first != second  # each rank has sequences of its own
    return output, curves


@pytest.fixture(scope="module")
def killed(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("killed") / "output"
    curves = launch(output, checkpoint, *MEMO, killed_in=STEPS - 1)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (output / "model.safetensors").exists()
    return output, curves


@cannot_load
@pytest.mark.parametrize("how, bound", [(MEMO, 0), (STOCK, 1e-5)], ids=["memo_hf", "stock"])
def test_a_killed_run_goes_on(checkpoint, uninterrupted, killed, tmp_path, how, bound):
    """Its third step is run twice, before it was killed and after it went on."""
    output = tmp_path / "resumed"
    shutil.copytree(killed[0], output)
    resumed = launch(output, checkpoint, *how, "--resume_from_checkpoint", "last")
    whole_output, whole = uninterrupted
    assert_same_losses(killed[1], whole, range(STEPS), 0)
    assert_same_losses(resumed, whole, range(2, STEPS), bound)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, whole_output))
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= bound * 100 * value.abs().max()  # Adam amplifies rounding


@cannot_load
def test_a_stock_run_goes_on_with_memo_hf(checkpoint, uninterrupted, tmp_path):
    """By the other recipe, which shares data and order."""
    output, whole, other = tmp_path / "output", uninterrupted[1], {"recipe": "finetune_checkpoint"}
    assert_same_losses(launch(output, checkpoint, *STOCK, **other), whole, range(STEPS), 1e-5)
    shutil.rmtree(output / "checkpoint-4")
    resumed = launch(output, checkpoint, *MEMO, "--resume_from_checkpoint", "last", **other)
    assert_same_losses(resumed, whole, range(2, STEPS), 1e-5)


@pytest.mark.parametrize(
    "kind, saved", [("FULL_STATE_DICT", "pytorch_model_fsdp.bin"), ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0")]
)
def test_a_killed_run_goes_on_under_fsdp2(checkpoint, uninterrupted, tmp_path, kind, saved):
    """It has the losses of all steps before it is killed in the last."""
    output, environment = tmp_path / "output", as_launched("fsdp2_2gpu", FSDP_STATE_DICT_TYPE=kind)
    killed = launch(output, checkpoint, *MEMO, environment=environment, killed_in=STEPS - 1)
    assert [path.name for path in output.glob("*")] == ["checkpoint-2"]
    assert (output / "checkpoint-2" / saved).exists()
    resumed = launch(output, checkpoint, *MEMO, "--resume_from_checkpoint", "last", environment=environment)
    assert_same_losses(killed, uninterrupted[1], range(STEPS), 1e-5)
    assert_same_losses(resumed, killed, range(2, STEPS), 0)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_an_adapter_goes_on_under_zero3_and_ulysses(checkpoint, tmp_path):
    """The flagship's own configuration: both ranks work on one sequence."""
    environment = as_launched("zero3_ulysses_2gpu")
    state = json.dumps({"dispatch_batches": False, "use_configured_state": True})
    how = [*MEMO, "--full", "false", "--lora_rank", "2", "--use_cpu", "false", "--gradient_accumulation_steps", "1"]
    how += ["--accelerator_config", state]
    whole = launch(tmp_path / "whole", checkpoint, *how, environment=environment)
    output = tmp_path / "output"
    killed = launch(output, checkpoint, *how, environment=environment, killed_in=STEPS - 1)
    assert_same_losses(killed, whole, range(STEPS), 0)
    resumed = launch(output, checkpoint, *how, "--resume_from_checkpoint", "last", environment=environment)
    assert_same_losses(resumed, whole, range(2, STEPS), 0)
    assert len({tuple(losses) for losses in whole[0].values()}) == STEPS


def test_what_is_saved_knows_nothing_of_memo_hf(checkpoint, killed, uninterrupted):
    before = load_file(checkpoint / "model.safetensors").keys()
    for folder in (killed[0] / "checkpoint-2", uninterrupted[0]):
        assert load_file(folder / "model.safetensors").keys() == before
        for path in folder.glob("*config.json"):
            assert "memo" not in path.read_text()
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
