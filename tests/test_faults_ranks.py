"""Ranks that differ: in what passes the check, in memory, speed, lengths, settings; and one that is not there.

Two processes over gloo, started once. What can go on goes on, with the gradients of one process; what cannot ends in an
error on every rank that names the rank and what differs.
"""

import contextlib
import functools
import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from exactness import assert_close, enabled, gradients_of
from harness.forked import run_ranks
from harness.ranks import RANKS, counted_collectives, failing_check, result, run_on_ranks
from tiny_models import random_ids, tiny
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from memo_hf.agreement import Agreement
from memo_hf.errors import HostMemoryError, RankError

LENGTHS = (37, 97)
IDS = [random_ids(2, length, seed=rank) for rank, length in enumerate(LENGTHS)]
SETTINGS = dict(swap_fraction=0.5, unswapped_layers=1, chunk_size=32)
SOLVED = dict(min_tokens=0, device_memory="1TiB", chunk_size=32)


def full():
    return tiny("llama", num_hidden_layers=4)


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


ENGINES = {"DDP": DistributedDataParallel, "FSDP2": sharded}


def mean_over_ranks(model, rank):
    return model(input_ids=IDS[rank], labels=IDS[rank]).loss


def outside_of_the_model(model, rank):
    """The loss of a user's own, after FSDP2 has sharded the head again."""
    logits = model(input_ids=IDS[rank]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[rank][:, 1:].flatten())


def nothing_on_rank_one(model, rank):
    labels = IDS[rank] if rank == 0 else torch.full_like(IDS[rank], -100)
    return model(input_ids=IDS[rank], labels=labels, num_items_in_batch=torch.tensor(50)).loss


def steps(engine, rank, loss, settings, *, memo=True, number=2):
    """What a few steps leave: the gradients of the last, its collectives, and the session's figures."""
    model = full()
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(enabled(model, **settings)) if memo else None
        wrapped = ENGINES[engine](model)
        for _ in range(number):
            wrapped.zero_grad()
            with counted_collectives() as collectives:
                loss(wrapped, rank).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        grads = {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()}
        return dict(grads=grads, collectives=collectives, stats=memo and session.stats)


def uneven(engine, loss, settings, rank):
    """With memo_hf, beside a run without it."""
    return steps(engine, rank, loss, settings), steps(engine, rank, loss, settings, memo=False)


def check_fails(engine, which, rank):
    with failing_check(which if rank == 1 else ()):
        return steps(engine, rank, mean_over_ranks, SETTINGS)


def ready_made_mask(model, rank):
    """Rank 1 brings a mask that token mode has no kernel for."""
    mask = torch.full((1, 1, LENGTHS[1], LENGTHS[1]), float("-inf")).triu(1) if rank == 1 else None
    return model(input_ids=IDS[rank], labels=IDS[rank], attention_mask=mask).loss


def settings_differ(rank):
    with pytest.raises(RankError) as error:
        steps("DDP", rank, mean_over_ranks, {**SETTINGS, "swap_fraction": 0.5 + 0.25 * rank})
    return str(error.value)


def short_of_host_memory(rank):
    """Of some, and of all, which an offloaded optimizer is said to take."""
    told = []
    for settings in (dict(host_memory="8KiB"), dict(host_memory="1GiB", host_memory_for_others="2GiB")):
        with pytest.raises(HostMemoryError) as error:
            steps("FSDP2", rank, mean_over_ranks, {**SETTINGS, **(settings if rank else dict(host_memory="1GiB"))})
        told.append(str(error.value))
    return told


def planned(rank):
    """Rank 1 has less memory of both kinds and comes late; then the plan file of rank 0 is all a second run has."""
    budgets = [dict(host_memory="1GiB"), dict(host_memory="600KiB", device_memory="1GiB")]
    ids, found, folder = random_ids(2, 256), [], f"plans of {rank}"
    for _ in range(2):
        model = full()
        with enabled(model, **{**SOLVED, **budgets[rank]}, plan_file=f"{folder}/plan.json") as session:
            wrapped, planner = DistributedDataParallel(model), session.planners[0]
            if rank == 1:
                time.sleep(0.5)
            came = time.perf_counter()  # the same clock in all processes
            loss = wrapped(input_ids=ids, labels=ids).loss
            told = dict(came=came, began=planner._steps.times._began, measured_at_once=planner.measurement)
            loss.backward()
            for _ in range(2):
                wrapped(input_ids=ids, labels=ids).loss.backward()
            stats = session.stats
            told["plan"] = (planner.measurement, planner.choice, stats.strategy)
            told["budgets"] = (stats.host_budget_bytes, planner.device_budget_bytes)
            found.append(told)
    return found


def joined(rank):
    """Rank 1 has a batch more, which DDP's `join` allows."""
    model = full()
    with enabled(model, **SETTINGS) as session:
        wrapped = DistributedDataParallel(model)
        with wrapped.join():
            for _ in range(3 + rank):
                mean_over_ranks(wrapped, rank).backward()
        return session.stats.forwards, session.joint.ranks


def absent(rank):
    """Both build the model, and one of them never trains it. DDP's own broadcast of buffers would wait before us."""
    wrapped = DistributedDataParallel(model := full(), broadcast_buffers=False)
    if rank == 1:
        Agreement.of(range(RANKS))  # Later agreements have the same number on both.
        return None
    store = _get_default_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        with enabled(model, **SETTINGS), pytest.raises(RankError) as error:
            mean_over_ranks(wrapped, rank)
    finally:
        store.set_timeout(before)
    return str(error.value)


UNEVEN = {
    "uneven lengths": (mean_over_ranks, SETTINGS),  # case 73
    "one rank too short": (mean_over_ranks, {**SETTINGS, "min_tokens": 128}),
    "one rank too short, loss outside": (outside_of_the_model, {**SETTINGS, "min_tokens": 128}),
    "one rank with all labels ignored": (nothing_on_rank_one, SETTINGS),
    "uneven lengths, solved for": (mean_over_ranks, SOLVED),
}
CASES = {
    **{
        (engine, name): functools.partial(uneven, engine, *UNEVEN[name])
        for engine in ENGINES
        for name in UNEVEN
    },
    **{(engine, "check"): functools.partial(check_fails, engine, {1}) for engine in ENGINES},
    "no layer passes": functools.partial(check_fails, "FSDP2", {0, 1, 2, 3}),
    "falls back": lambda rank: steps("FSDP2", rank, ready_made_mask, SETTINGS),
    "settings differ": settings_differ,
    "short of host memory": short_of_host_memory,
    "planned": planned,
    "joined": joined,
    "absent": absent,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("faults"))


def relevant(gradients):
    return {**gradients, "random state": None}


def averaged(loss):
    """Of the ranks' gradients, each from one process."""
    found = [gradients_of(model := full(), lambda rank=rank, model=model: loss(model, rank)) for rank in range(RANKS)]
    return relevant({n: sum(some[n] for some in found) / RANKS for n in found[0] if n != "random state"})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_ranks_train_on(ranks, engine, name):
    loss, settings = UNEVEN[name]
    expected = averaged(loss)
    for rank, (ours, stock) in enumerate(result(ranks, (engine, name))):
        assert_close(relevant(ours["grads"]), expected)
        assert_close(relevant(stock["grads"]), expected)
        extra = ours["collectives"] - stock["collectives"]
        # A loss outside of the model needs the head's weight, which was sharded again: gathered once more.
        outside = engine == "FSDP2" and "outside" in name
        assert sum(extra.values()) == (1 if outside else 0), extra
        assert ours["stats"].stock_forwards == (
            2 if rank == 0 and "min_tokens" in settings and settings["min_tokens"] else 0
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_that_fails_the_check_on_one_rank_runs_whole_on_all(ranks, engine):
    expected = averaged(mean_over_ranks)
    for found, reason in zip(result(ranks, (engine, "check")), ("rank 1: made to fail", "made to fail"), strict=True):
        modes = [(layer.mode, layer.reason) for layer in found["stats"].layers]
        assert modes == [("token", "passed the check"), ("layer", reason), *[("token", "passed the check")] * 2]
        assert_close(relevant(found["grads"]), expected)
        assert found["stats"].swapped_bytes == found["stats"].planned_bytes > 0


def test_no_layer_passes_the_check_on_one_rank(ranks):
    for found in result(ranks, "no layer passes"):
        assert {layer.mode for layer in found["stats"].layers} == {"layer"}
        assert_close(relevant(found["grads"]), averaged(mean_over_ranks))
        assert found["stats"].swapped_bytes == found["stats"].planned_bytes > 0


def test_a_rank_that_falls_back_is_followed_by_the_others(ranks):
    for found, by in zip(result(ranks, "falls back"), ("rank 1: ", ""), strict=True):
        reason = f"{by}its attention mask comes ready made, for every pair of tokens"
        assert {(layer.mode, layer.reason) for layer in found["stats"].layers} == {("layer", reason)}
        assert_close(relevant(found["grads"]), averaged(ready_made_mask))


def test_settings_that_differ_are_named_on_every_rank(ranks):
    for message in result(ranks, "settings differ"):
        assert "MemoConfig.swap_fraction is 0.5 on rank 0, 0.75 on rank 1; give every rank the same" in message


def test_a_rank_short_of_host_memory_is_named_on_every_rank(ranks):
    for some, all_of_it in result(ranks, "short of host memory"):
        assert "the budget of rank 1, the least of all, is 4.00 KiB" in some
        assert "rank 1 has no host memory left: no host memory is left for activations: 1.00 GiB may be" in all_of_it


def test_all_plan_from_the_slowest_and_the_least(ranks):
    (first, first_again), (second, second_again) = result(ranks, "planned")
    assert first["began"] > second["came"]  # The profile began when the late rank had come, so that all copy at once.
    assert first["measured_at_once"] is None
    assert first["plan"] == second["plan"]
    measured, *_ = first["plan"]
    assert measured is not None
    assert first["budgets"] == second["budgets"] == (300 * 1024, 2**30)  # half of the least node, and the least device
    # Rank 0 reads its plan file for all; rank 1 has none.
    assert first_again["measured_at_once"] == second_again["measured_at_once"] == measured
    assert first_again["plan"] == second_again["plan"] == first["plan"]


def test_ranks_with_more_batches_than_others_do_not_wait(ranks):
    assert result(ranks, "joined") == [(3, None), (4, None)]


def test_a_rank_that_does_not_come_is_named(ranks):
    message, _ = result(ranks, "absent")
    assert "rank 1 did not come to training forward pass 1 within 1 s, where rank 0 waits" in message


def end_of_rank_zero(rank, folder):
    """Rank 0 ends between steps, and with it the store by which the ranks agree, as they do in their fourth pass."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    wrapped, ready = DistributedDataParallel(model := full(), broadcast_buffers=False), folder / "ready"
    with enabled(model, **SETTINGS):
        for _ in range(3):
            mean_over_ranks(wrapped, rank).backward()
        if rank == 0:
            while not ready.exists():
                time.sleep(0.01)
            os._exit(0)  # without a word to the others
        ready.touch()
        with pytest.raises(RankError) as error:
            mean_over_ranks(wrapped, rank)
    (folder / "told.txt").write_text(str(error.value))


def test_a_rank_that_is_gone_is_named(tmp_path):
    run_ranks(end_of_rank_zero, tmp_path, num_ranks=RANKS)
    told = (tmp_path / "told.txt").read_text()
    assert "rank 1 cannot reach the others at training forward pass 4" in told
    assert "usually rank 0, has ended" in told
