"""Ulysses in four real processes over gloo: two sequences on two ranks each (data parallelism), and one on all four.

The processes are started once and run every engine with memo_hf and, as the control, without it. What an engine finds
for gradients must be those of one process on the joint batch, by no more collectives than without memo_hf.
"""

import functools
import importlib.util

import pytest
import torch
from exactness import assert_close, gradients_of
from harness.deepspeed_ranks import run_with_deepspeed
from harness.ranks import counted_collectives, result
from sequence_engines import SHARE, TOKENS, by_accelerate, llama, peaks
from tiny_models import random_ids

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
NUM_RANKS = 4
STAGES = (2, 3)


def rows():
    """One for each rank. Those of a pair of ranks are trained one after the other, so a step trains the even ones."""
    ids, counts = random_ids(NUM_RANKS, TOKENS), torch.arange(TOKENS)
    return [
        # Prompts of several lengths: one covers the first rank's part, so that this rank has no label.
        {"input_ids": row, "position_ids": counts, "labels": row.where(counts >= 30 - 7 * number, -100)}
        for number, row in enumerate(ids)
    ]


def counted(*run):
    """What `by_accelerate` gives of a run from its start to its end, and the collectives of it all."""
    with counted_collectives() as collectives:
        found = by_accelerate(*run)
    return found, collectives


def everything(rank, folder):
    """(name, function) of all that runs in the process of `rank`."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    yield "peak", functools.partial(peaks, rank, NUM_RANKS)
    if rank == 0:
        yield "peak of one", functools.partial(peaks, rank, 1)
    for stage in STAGES:  # last: ZeRO-3 splits what is made from then on
        for memo in (True, False):
            yield (stage, memo), functools.partial(counted, rows(), stage, memo)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_with_deepspeed(everything, tmp_path_factory.mktemp("ranks"), NUM_RANKS)


@functools.cache
def of_one_process():
    """Gradients and losses of the two sequences of a step, whose means count alike."""
    model = llama()
    batches = [{name: tensor[None] for name, tensor in row.items()} for row in rows()[::SHARE]]
    losses = [model(**batch).loss.item() for batch in batches]
    return gradients_of(model, lambda: sum(model(**batch).loss for batch in batches) / len(batches)), losses


@pytest.mark.parametrize("memo", [True, False], ids=["memo_hf", "control"])
@pytest.mark.parametrize("stage", STAGES)
def test_four_ranks_equal_one(ranks, stage, memo):
    """Below stage 3 DeepSpeed's gradients are too large by the ranks of a sequence, with memo_hf and without."""
    found = [of_rank for of_rank, _ in result(ranks, (stage, memo))]
    gradients, losses = of_one_process()
    for ours in found[1:]:
        assert all(torch.equal(ours[name], found[0][name]) for name in ours if name != "loss")  # reduced
    ours = {name: tensor / (SHARE if stage < 3 else 1) for name, tensor in found[0].items() if name != "loss"}
    assert_close({**ours, "random state": None}, gradients)
    assert [of_rank["loss"].item() for of_rank in found] == pytest.approx([losses[0]] * 2 + [losses[1]] * 2)


@pytest.mark.parametrize("stage", STAGES)
def test_no_collective_beyond_the_engines_own(ranks, stage):  # cases 67 and 81
    for (_, ours), (_, control) in zip(result(ranks, (stage, True)), result(ranks, (stage, False)), strict=True):
        assert not ours - control
        assert ours["alltoall_base"] == control["alltoall_base"] == 8 * llama().config.num_hidden_layers
        assert min(ours["allgather_base"], ours["allreduce"]) > 0  # of the engine's


def test_memory_of_four_ranks(ranks):
    (one,), four = result(ranks[:1], "peak of one"), result(ranks, "peak")
    assert max(four) <= 0.30 * one, (one, four)
