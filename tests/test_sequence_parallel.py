"""Ulysses sequence parallelism in two real processes over gloo: gradients, all-to-alls, memory, engines, refusals.

The two processes are started once, run everything, and leave what they found in a file; the tests compare it with one
process that has the whole sequence.
"""

import contextlib
import functools
import importlib.util
import math
import re
from unittest import mock

import adapters
import pytest
import torch
import torch.distributed as dist
from exactness import assert_close, assert_nothing_on_host, enabled, gradients_of, relative_errors
from harness.deepspeed_ranks import run_with_deepspeed
from harness.ranks import RANKS, result
from sequence_engines import MEMO, TOKENS, by_accelerate, by_trainer, llama, loss_of, peaks, ulysses, whole_batch
from tiny_models import tiny
from torch import nn

from memo_hf import MemoConfig
from memo_hf.errors import MemoError
from memo_hf.layers.attention import attend_as_asked
from memo_hf.layers.sequence_parallel import SequenceGroup
from memo_hf.planning import Planner

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PROMPT = 30
PACKED = torch.cat([torch.arange(20), torch.arange(17), torch.arange(11)])[None]


def lora():
    return adapters.lora(llama(), target_modules="all-linear")


def as_bf16():
    return llama().bfloat16()


def padded():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -7:] = mask[1, :9] = 0
    batch = whole_batch(2)
    return {**batch, "attention_mask": mask, "shift_labels": batch["shift_labels"].where(mask == 1, -100)}


def prompt_on_one_rank():
    """The second rank has no token that counts."""
    batch = whole_batch()
    batch["shift_labels"][:, TOKENS // RANKS :] = -100
    return batch


CASES = {
    "llama": (llama, whole_batch),
    "all heads have keys": (functools.partial(llama, num_key_value_heads=4), whole_batch),
    "fewer key heads than ranks": (functools.partial(llama, num_key_value_heads=1), whole_batch),
    "two rows": (llama, functools.partial(whole_batch, 2)),
    "packed documents": (llama, functools.partial(whole_batch, position_ids=PACKED)),  # case 85
    "padding": (llama, padded),
    "sliding windows": (functools.partial(tiny, "gemma3_text"), whole_batch),
    "wide keys, narrow values": (functools.partial(tiny, "deepseek_v3"), whole_batch),
    "mixture of experts": (functools.partial(tiny, "mixtral", head_dim=8), whole_batch),
    "LoRA": (lora, whole_batch),  # case 82
    "bf16": (as_bf16, whole_batch),
    "a rank without labels": (llama, prompt_on_one_rank),
}


def part_of(rank, batch):
    own = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
    return {name: tensor[:, own].contiguous() for name, tensor in batch.items()}


def count_of(batch):
    return int((batch["shift_labels"] != -100).sum())


def summed(gradients):
    """Over the ranks, in fp32."""
    found = {name: gradients[name].float() for name in sorted(gradients) if name != "random state"}
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found


@contextlib.contextmanager
def counted():
    """Counts collectives by name, and the bytes that all-to-alls send."""
    found = {"all_to_all_single": 0, "all_gather": 0, "all_to_all bytes": 0}

    def counting(name, own):
        def call(*args, **kwargs):
            found[name] += 1
            if name == "all_to_all_single":
                found["all_to_all bytes"] += (args[0] if args else kwargs["output"]).nbytes
            return own(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_to_all_single", "all_gather"):
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield found


def by_hand(rank, name):
    make, batch = CASES[name]
    model, batch = make(), batch()
    part, given, total = part_of(rank, batch), part_of(rank, batch), torch.tensor(count_of(batch))
    with ulysses(model), enabled(model, **vars(MEMO)) as session:
        for _ in range(2):  # the second step shows that the first left nothing
            found = summed(gradients_of(model, loss_of(model, part, total)))
            assert total == count_of(batch) and all(torch.equal(part[name], given[name]) for name in given)  # case 81
            assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
            assert {layer.mode for layer in session.stats.layers} == {"token"}, session.stats.layers
            assert_nothing_on_host(session)
        return found


def enabled_once_it_is_registered(rank):
    model, batch = llama(), whole_batch()
    with ulysses(model):  # enabled now, while the engine's function is in place: the check must not run it
        with enabled(model, mode="layer") as session:
            found = summed(gradients_of(model, loss_of(model, part_of(rank, batch), count_of(batch))))
            assert session.stats.swapped_bytes > 0
            return found


def backward_twice(rank):
    """Half the gradients of two backward passes through one graph."""
    model, batch = llama(), whole_batch()
    with ulysses(model), enabled(model, **vars(MEMO)):
        loss = loss_of(model, part_of(rank, batch), count_of(batch))() / 2
        loss.backward(retain_graph=True)
        loss.backward()
        return summed({name: parameter.grad for name, parameter in model.named_parameters()})


def calls(rank, memo):
    model, batch = llama(), whole_batch()
    loss = loss_of(model, part_of(rank, batch), count_of(batch))
    with ulysses(model), enabled(model, **vars(MEMO)) if memo else contextlib.nullcontext(), counted() as found:
        loss().backward()
    return found


def planned_bytes(rank):
    """By number of key heads: bytes that a step is forecast to swap, and those that it swaps."""
    found = {}
    for kv_heads in (4, 1):
        model, batch = llama(num_key_value_heads=kv_heads), whole_batch()
        settings = {**vars(MEMO), "unswapped_layers": 0, "swap_fraction": 0.0}
        with ulysses(model), enabled(model, **settings) as session:
            loss_of(model, part_of(rank, batch), count_of(batch))().backward()
            (compared,) = [c for c in session.planners[0].compare(session.stats.swapped_bytes) if "host" in c[0]]
            found[kv_heads] = compared[2:]
    return found


def solved(rank):
    """What the planner measures in the first step and solves for afterwards."""
    model, batch = llama(), whole_batch()
    # On a busy machine the times of such small layers may say that activation checkpointing is as fast.
    never_checkpoints = mock.patch("memo_hf.planner.swap_fraction._TIE", -math.inf)
    with never_checkpoints, ulysses(model), enabled(model, device_memory="1GiB", chunk_size=8) as session:
        for _ in range(5):
            loss_of(model, part_of(rank, batch), count_of(batch))().backward()
        (planner,) = session.planners
        costs = planner.measurement.layers[0]
        bytes_of = dict(input=costs.input_bytes, output=costs.output_bytes, qkv=costs.qkv_bytes)
        assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
        return {**bytes_of, "treatment": planner.plan.qkv, "fraction": planner.plan.swap_fraction}


def refusals(rank):
    def of(model, batch, **settings):
        with ulysses(model), enabled(model, **{**vars(MEMO), **settings}):
            try:
                loss_of(model, batch, 1)().backward()
            except MemoError as error:
                return f"{type(error).__name__}: {error}"
            return "nothing"

    batch = part_of(rank, whole_batch())
    without = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
    shorter = {name: tensor[:, : TOKENS // 2 - rank] for name, tensor in batch.items()}
    quadratic = torch.ones(1, 1, TOKENS // 2, TOKENS // 2, dtype=torch.bool)
    return {
        "rebuild": of(llama(), batch, qkv="rebuild"),
        "no position_ids": of(llama(), without),
        "cu_seq_lens": of(llama(), {**batch, "cu_seq_lens_q": torch.tensor([0, 24])}),
        "uneven": of(llama(), shorter),
        "whole mask": of(llama(), {**batch, "attention_mask": quadratic}),
        "recurrent": of(tiny("qwen3_next"), batch),
    }


def sinks(rank):
    """Gradients of attention with a score per head that has no token, which no kernel of the CPU's takes otherwise."""
    ranks, generator = SequenceGroup(dist.group.WORLD), torch.Generator().manual_seed(1)
    query, key, value, per_head = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in [(1, 8, 4, 8)] * 3 + [(4,)]
    )

    def attend(parts, sinks):
        parts = [part.transpose(1, 2) for part in parts]
        return attend_as_asked(nn.Module(), *parts, implementation="sdpa", documents=None, s_aux=sinks)

    weights = torch.randn(1, 8, 4, 8, generator=generator)
    (attend([query, key, value], per_head) * weights).sum().backward()
    expected = per_head.grad
    own = slice(rank * 4, rank * 4 + 4)
    local = ranks.gather([tensor.detach()[:, own] for tensor in (query, key, value)])
    per_head.grad = None
    output = ranks.scatter(attend(local, ranks.own_heads(per_head)))
    (output * weights[:, own]).sum().backward()
    dist.all_reduce(per_head.grad)
    return per_head.grad, expected


def rows():
    """All alike, since ranks take turns. The prompt is longer than the first rank's part."""
    row = {name: whole_batch()[name][0] for name in ("input_ids", "position_ids")}
    return [{**row, "labels": row["input_ids"].where(torch.arange(TOKENS) >= PROMPT, -100)}] * (2 * RANKS)


def everything(rank, folder):
    """(name, function) of all that runs in the process of `rank`."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    for name in CASES:
        yield name, functools.partial(by_hand, rank, name)
    yield "layer mode", functools.partial(enabled_once_it_is_registered, rank)
    yield "backward twice", functools.partial(backward_twice, rank)
    for memo in (True, False):
        yield ("calls", memo), functools.partial(calls, rank, memo)
    yield "solved", functools.partial(solved, rank)
    yield "bytes", functools.partial(planned_bytes, rank)
    for num_ranks in (1, RANKS):
        if num_ranks > 1 or rank == 0:
            yield ("peak", num_ranks), functools.partial(peaks, rank, num_ranks)
    yield "sinks", functools.partial(sinks, rank)
    yield "refusals", functools.partial(refusals, rank)
    for stage in (0, 1, 2, 3):
        for memo in (True, False):
            yield ("Accelerate", stage, memo), functools.partial(by_accelerate, rows(), stage, memo)
    for stage in (2, 3):
        for memo in (True, False):
            yield ("Trainer", stage, memo), functools.partial(by_trainer, rows(), stage, memo, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_with_deepspeed(everything, tmp_path_factory.mktemp("ranks"))


def alone(name="llama"):
    """Gradients of one process, by the model's own code."""
    make, batch = CASES[name]
    model, batch = make(), batch()
    # With a cache transformers lets packed documents see each other.
    return gradients_of(model, loss_of(model, {**batch, "use_cache": False}, count_of(batch)))


def assert_equal(ours, theirs, tolerance=1e-5):
    named = [{n: t for n, t in given.items() if n not in ("random state", "loss")} for given in (ours, theirs)]
    assert_close(*({**gradients, "random state": None} for gradients in named), tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(ranks, name):
    ours, others = result(ranks, name)
    assert all(torch.equal(ours[n], others[n]) for n in ours)
    assert_equal(ours, alone(name), 5e-2 if name == "bf16" else 1e-5)


@pytest.mark.parametrize("name", ["layer mode", "backward twice"])
def test_other_ways_of_one_step(ranks, name):
    assert_equal(result(ranks, name)[0], alone())


def test_bf16_is_as_close_to_fp32_as_without(ranks):
    """The attention's backward reads a stand-in for its output, which is rounded too."""
    model, batch = as_bf16().float(), whole_batch()
    expected = gradients_of(model, loss_of(model, {**batch, "use_cache": False}, count_of(batch)))
    errors = [
        sum(relative_errors({**g, "random state": None}, expected).values())
        for g in (result(ranks, "bf16")[0], alone("bf16"))
    ]
    assert errors[0] <= 1.2 * errors[1], errors


def test_no_collective_beyond_plain_ulysses(ranks):  # case 81
    for ours, plain in zip(result(ranks, ("calls", True)), result(ranks, ("calls", False)), strict=True):
        assert ours["all_to_all_single"] == plain["all_to_all_single"] == 3 * 8
        assert ours["all_gather"] == 2 <= plain["all_gather"]  # once for all layers: shapes, then position_ids
        # One number for each token and head rides along.
        assert ours["all_to_all bytes"] - plain["all_to_all bytes"] == 3 * (TOKENS // RANKS) * 4 * 4


def test_forecast_of_swapped_bytes(ranks):
    for found in result(ranks, "bytes"):
        assert all(forecast == swapped > 0 for forecast, swapped in found.values()), found


def test_plan_of_a_rank(ranks):
    """Input, output with logsumexp, and q, k, v: of its tokens, or of all tokens and its heads, which is as much."""
    tokens, heads, kv_heads, width = TOKENS // RANKS, 4, 2, 8
    one, other = result(ranks, "solved")
    assert one == other and one["treatment"] == "swap"
    assert one["input"] == 4 * tokens * heads * width
    assert one["output"] == 4 * tokens * heads * (width + 1)
    assert one["qkv"] == 4 * tokens * (heads + 2 * kv_heads) * width


def test_memory_of_two_ranks(ranks):
    (one,), two = result(ranks[:1], ("peak", 1)), result(ranks, ("peak", RANKS))
    assert max(two) <= 0.55 * one, (one, two)


def test_sinks_are_dealt_out_with_the_heads(ranks):
    for ours, theirs in result(ranks, "sinks"):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memo", [True, False], ids=["memo_hf", "control"])
@pytest.mark.parametrize(
    "through, stage", [("Accelerate", stage) for stage in range(4)] + [("Trainer", 2), ("Trainer", 3)]
)
def test_engines(ranks, through, stage, memo):  # case 83
    """DeepSpeed sums the gradients of a sequence's ranks below stage 3, so they are too large by their number."""
    ours, _ = result(ranks, (through, stage, memo))
    model, row = llama(), {name: tensor[None] for name, tensor in rows()[0].items()}
    expected = gradients_of(model, lambda: model(**row).loss)
    factor = RANKS if stage < 3 else 1
    assert_equal({name: gradient / factor for name, gradient in ours.items()}, expected, 1e-5)
    assert ours["loss"].item() == pytest.approx(model(**row).loss.item(), rel=1e-4)


@pytest.mark.parametrize(
    "name, message",
    [
        ("rebuild", "ConfigError.*qkv='rebuild'"),
        ("no position_ids", "UnsupportedModelError.*Pass position_ids"),
        ("cu_seq_lens", "UnsupportedModelError.*no cu_seq_lens_q"),
        ("uneven", "rank 1 of a sequence has 1 x 23 tokens and rank 0 has 1 x 24"),
        ("whole mask", "does not fall back to layer mode"),
        ("recurrent", "mixes tokens without transformers' attention interface"),
    ],
)
def test_refusals(ranks, name, message):
    for found in result(ranks, "refusals"):
        assert re.search(message, found[name]), found[name]


def test_windows_are_of_a_ranks_own_tokens():
    planner = Planner(MemoConfig(), llama(), [nn.Linear(1, 1)], None, attends=True)
    planner.sequence_parallel = 4
    layer = nn.Linear(1, 1)
    layer.sliding_window = 1024
    assert planner._solver.own_window(layer) == 256


def test_heads_that_cannot_be_dealt_out():
    ranks = SequenceGroup.__new__(SequenceGroup)
    ranks.size = 2
    with pytest.raises(
        MemoError, match="3 attention heads with 3 key and value heads cannot be dealt out to the 2 ranks"
    ):
        ranks.gather([torch.zeros(1, 4, 3, 8)] * 3)
