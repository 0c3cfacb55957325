"""Gradients under DDP and FSDP2 in two real processes over gloo equal those of one process on the joint batch.

The two processes are started once, run every case, and leave their gradients in a file; the tests compare them. Each
case also runs without memo_hf, which may issue no fewer collectives.
"""

import contextlib
import functools
from collections import Counter

import adapters
import pytest
import torch
from exactness import assert_close, assert_nothing_on_host, enabled, gradients_of, language_loss
from harness.ranks import RANKS, counted_collectives, result, run_on_ranks
from tiny_models import random_ids, tiny
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAYERS = 3
IDS = random_ids(2 * RANKS, 37)  # two rows for each rank
SETTINGS = dict(swap_fraction=0.5, qkv="rebuild", unswapped_layers=1, chunk_size=32)
LAYER_MODE = dict(swap_fraction=0.0, mode="layer", unswapped_layers=1)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def full(**changes):
    return tiny("llama", num_hidden_layers=LAYERS, **changes)


def lora():
    return adapters.lora(full(), target_modules="all-linear")


def with_unused_head(make=full):
    model = make()
    model.unused = nn.Linear(3, 3)
    return model


def ddp(model, **settings):
    return DistributedDataParallel(model, **settings)


def fsdp(model, **settings):
    for layer in model.get_base_model().model.layers if hasattr(model, "peft_config") else model.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def one_backward(model, ids):
    language_loss(model, ids)().backward()


def accumulated(model, ids):
    """A row at a time, reduced with the last one."""
    for row in range(len(ids)):
        last = row == len(ids) - 1
        if isinstance(model, DistributedDataParallel):
            reduced = contextlib.nullcontext() if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
            reduced = contextlib.nullcontext()
        with reduced:
            (language_loss(model, ids[row : row + 1])() / len(ids)).backward()


def accumulated_after_one(model, ids):
    """As DDP wants it of a static graph: the first backward is reduced, later ones may wait."""
    one_backward(model, ids)
    model.zero_grad()
    accumulated(model, ids)


def two_forwards(model, ids):
    """Both rows forward, then both backward at once, as DPO does."""
    sum(language_loss(model, ids[row : row + 1])() / len(ids) for row in range(len(ids))).backward()


sharded = functools.partial(fsdp, reshard_after_forward=True)
on_host = functools.partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False))
unused_allowed = functools.partial(ddp, find_unused_parameters=True)
static = functools.partial(ddp, static_graph=True)
tied = functools.partial(full, tie_word_embeddings=True)
RUNS = {
    "DDP": (full, ddp, one_backward),
    "DDP, find_unused_parameters": (full, unused_allowed, one_backward),
    "DDP, a part unused": (with_unused_head, unused_allowed, one_backward),
    "DDP, tied weights": (tied, ddp, one_backward),
    "DDP, small buckets": (full, functools.partial(ddp, bucket_cap_mb=1e-3), one_backward),  # cases 71 and 72
    "DDP, static graph": (full, static, one_backward),
    "DDP, static graph, accumulated": (full, static, accumulated_after_one),
    "DDP, LoRA": (lora, ddp, one_backward),  # case 88
    "DDP, LoRA, find_unused_parameters": (lora, unused_allowed, one_backward),
    "DDP, LoRA, static graph": (lora, static, one_backward),
    "DDP, accumulated": (full, ddp, accumulated),
    "DDP, LoRA, accumulated": (lora, ddp, accumulated),
    "DDP, enabled once wrapped": (full, ddp, one_backward),  # case 82
    "FSDP2, enabled once wrapped": (full, sharded, one_backward),
    "DDP, layer mode": (full, ddp, one_backward),
    "FSDP2": (full, sharded, one_backward),
    "FSDP2, kept whole after forward": (full, functools.partial(fsdp, reshard_after_forward=False), one_backward),
    "FSDP2, tied weights": (tied, sharded, one_backward),
    "FSDP2, parameters on the host": (full, on_host, one_backward),
    "FSDP2, LoRA": (lora, sharded, one_backward),
    "FSDP2, LoRA, parameters on the host": (lora, on_host, accumulated),
    "FSDP2, accumulated": (full, sharded, accumulated),
    "FSDP2, two forwards": (full, sharded, two_forwards),
    "FSDP2, bf16": (full, functools.partial(sharded, mp_policy=BF16), one_backward),  # case 52
    "FSDP2, layer mode": (full, sharded, one_backward),
}


def run(name, rank, *, memo):
    """Gradients of one rank, whole; and how many collectives of each kind the second step issued."""
    make, wrap, backward = RUNS[name]
    model, ids = make(), IDS[2 * rank : 2 * rank + 2]
    settings = LAYER_MODE if "layer mode" in name else SETTINGS
    with contextlib.ExitStack() as stack:
        is_late = "once wrapped" in name
        wrapped = wrap(model) if is_late else None
        session = stack.enter_context(enabled(wrapped or model, **settings)) if memo else None
        wrapped = wrapped or wrap(model)
        ready = Counter()
        for key, parameter in model.named_parameters():
            if memo and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, key=key: ready.update([key]))
        for _ in range(2):  # the second step shows that the first left nothing
            wrapped.zero_grad()
            ready.clear()
            with counted_collectives() as collectives:
                backward(wrapped, ids)
            if memo:
                assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
                assert_nothing_on_host(session)
                if backward is one_backward:
                    assert set(ready.values()) == {1}  # cases 71 and 72
                if settings is LAYER_MODE:  # each layer that is not kept sends its input, and nothing else
                    assert session.stats.swapped_bytes == (LAYERS - 1) * ids.numel() * 32 * 4  # case 64
                assert tuple(session.joint.ranks) == tuple(range(RANKS))
        if "tied" in name:
            assert model.lm_head.weight is model.model.embed_tokens.weight  # case 65
        assert not any("memo" in key for key in model.state_dict())  # case 87
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
        return {n: g.clone() for n, g in whole.items()}, collectives


def both(name, rank):
    return {memo: run(name, rank, memo=memo) for memo in (True, False)}


def held(rank):
    """What the planner takes this rank to hold, in the first step and once the optimizer has its states."""
    model, found = full(), []
    with enabled(model, **SETTINGS) as session:
        wrapped = sharded(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), foreach=False)
        for _ in range(2):
            one_backward(wrapped, IDS[2 * rank : 2 * rank + 2])
            found.append(session.planners[0]._memory.held)
            optimizer.step()
            optimizer.zero_grad()
    return found


CASES = {**{name: functools.partial(both, name) for name in RUNS}, "held": held}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("ranks"))


def relevant(gradients):
    return {**gradients, "random state": None}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(ranks, name):
    found = result(ranks, name)
    ours, stock = found[0][True][0], found[0][False][0]
    assert all(torch.equal(ours[n], found[1][True][0][n]) for n in ours)  # reduced
    model = RUNS[name][0]()
    joint = gradients_of(model, language_loss(model, IDS))
    # DDP gives what is unused a gradient of zeros.
    joint |= {n: torch.zeros_like(p) for n, p in model.named_parameters() if n in ours and n not in joint}
    assert_close(relevant(ours), relevant(stock), 2e-2 if "bf16" in name else 1e-5)
    assert_close(relevant(ours), joint, 5e-2 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_no_collective_beyond_the_engines_own(ranks, name):  # case 67
    for found in result(ranks, name):
        assert found[True][1] == found[False][1]
        assert sum(found[True][1].values()) > 0


def test_plans_count_what_a_rank_of_fsdp2_holds(ranks):
    model = full()
    parameters, in_layers = list(model.parameters()), sum(p.nbytes for p in model.model.layers.parameters())
    num_bytes = sum(p.nbytes for p in parameters)
    weights = in_layers / RANKS + num_bytes - in_layers  # in a forward pass the root has been gathered
    states = 2 * num_bytes / RANKS + 4 * len(parameters)  # Adam counts its steps
    for first, second in result(ranks, "held"):
        assert (first.static_bytes, first.gradient_bytes) == (weights, weights)
        assert (second.static_bytes, second.gradient_bytes) == (weights + states, weights)


def test_one_all_gather_per_layer_and_pass(ranks):
    units = LAYERS + 1  # the root has the rest
    for name, passes in (("FSDP2", 2), ("FSDP2, kept whole after forward", 1), ("FSDP2, parameters on the host", 2)):
        for found in result(ranks, name):
            assert found[True][1]["allgather_base"] == passes * units
            assert found[True][1]["reduce_scatter_base"] == units
