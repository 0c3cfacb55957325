"""Ranks that agree: threads on one store stand in for processes, which test_gradients_distributed.py starts."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import memo_hf
from memo_hf.agreement import Agreement, ranks_training, require_same
from memo_hf.errors import RankError
from memo_hf.planner.layer_costs import LayerCosts
from memo_hf.planner.plan import Measurement, Shape, joint_measurement
from tests.tiny_models import random_ids, tiny


def on_ranks(run, ranks=(0, 1, 2), absent=(), timeout=20.0):
    """What `run(agreement)` returns on each rank, or the error that it raises."""
    store = dist.HashStore()

    def one(rank):
        try:
            return run(Agreement(store, rank, ranks, timedelta(seconds=timeout)))
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, [rank for rank in ranks if rank not in absent]))


def test_each_rank_hears_all_in_order():
    def run(agreement):
        return [agreement.exchange(f"pass {number}", (agreement.rank, number)) for number in range(3)]

    expected = [{rank: (rank, number) for rank in (1, 4, 6)} for number in range(3)]
    assert on_ranks(run, ranks=(1, 4, 6)) == [expected] * 3


def test_what_was_told_is_forgotten():
    store = dist.HashStore()
    alone = Agreement(store, 3, (3,), timedelta(seconds=5))
    for number in range(4):
        alone.exchange("pass", number)
    assert store.num_keys() == 1


def test_a_rank_that_does_not_come_is_named():
    found = on_ranks(
        lambda agreement: agreement.exchange("pass 1", None), ranks=(0, 1, 2, 3), absent=(1, 3), timeout=0.2
    )
    assert len(found) == 2
    for rank, error in zip((0, 2), found, strict=True):
        assert f"ranks 1, 3 did not come to pass 1 within 0.2 s, where rank {rank} waits" in str(error)
        assert "ddp_timeout" in str(error)


def test_ranks_at_different_places_are_named():
    found = on_ranks(lambda agreement: agreement.exchange(f"pass {agreement.rank // 2}", None))
    assert len(found) == 3
    for error in found:
        assert "at is 'pass 0' on ranks 0, 1, 'pass 1' on rank 2" in str(error)


def test_what_differs_is_named():
    require_same({0: {"a": 1}, 1: {"a": 1}}, "")
    with pytest.raises(RankError, match="a is 1 on ranks 0, 2, None on rank 1; say it alike"):
        require_same({0: {"a": 1}, 1: {}, 2: {"a": 1}}, "say it alike")


def test_a_model_that_is_not_wrapped_is_trained_alone(tmp_path):
    model = tiny("llama")
    assert ranks_training(model) is None
    with pytest.raises(RankError, match="not initialised"):
        Agreement.of([0, 1])


def test_when_ranks_agree(monkeypatch):
    """At passes 1, 2, 4, 8, ... and at the first one after an optimizer's first step; evaluation is no pass."""
    came = []

    class Alone(Agreement):
        def exchange(self, what, facts):
            came.append(int(what.rsplit(" ", 1)[1]))
            return super().exchange(what, facts)

    store = dist.HashStore()
    monkeypatch.setattr("memo_hf.joint.ranks_training", lambda model: [0])
    monkeypatch.setattr("memo_hf.joint.Agreement.of", lambda ranks: Alone(store, 0, ranks, timedelta(seconds=5)))
    model, ids = tiny("llama"), random_ids(1, 9)
    session = memo_hf.enable(model, memo_hf.MemoConfig(min_tokens=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anothers = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for number in range(1, 18):
        few = number == 3  # as short as this memo_hf steps aside, and it counts
        model(input_ids=ids[:, :5] if few else ids, labels=ids[:, :5] if few else ids).loss.backward()
        model.eval()(input_ids=ids)
        model.train()
        anothers.step()
        if number in (5, 11):
            optimizer.step()
    assert came == [1, 2, 4, 6, 8, 16]
    session.close()
    assert store.num_keys() == 1


COSTS = LayerCosts(
    num_layers=4, num_kept=2, project_forward_seconds=1.0, attend_forward_seconds=2.0, finish_forward_seconds=3.0,
    project_backward_seconds=1.0, attend_backward_seconds=2.0, finish_backward_seconds=3.0, input_bytes=10.0,
    output_bytes=10.0, qkv_bytes=15.0, others_bytes=100.0,
)  # fmt: skip
PROFILE = Measurement(
    shape=Shape(1, 1000), layers=(COSTS,), windows=(None,), static_bytes=50.0, rest_seconds=1.0,
    to_host_bytes_per_second=8.0, to_device_bytes_per_second=9.0, indices=((0, 1, 2, 3),),
)  # fmt: skip


def test_the_slowest_of_the_profiles_counts():
    slow = dataclasses.replace(COSTS, finish_forward_seconds=5.0, attend_forward_seconds=1.0)
    other = dataclasses.replace(
        PROFILE, layers=(slow,), static_bytes=60.0, to_host_bytes_per_second=4.0, to_device_bytes_per_second=20.0
    )
    joint = joint_measurement([PROFILE, other])
    assert joint == joint_measurement([other, PROFILE])
    assert joint.layers == (dataclasses.replace(COSTS, finish_forward_seconds=5.0),)
    assert (joint.to_host_bytes_per_second, joint.to_device_bytes_per_second) == (4.0, 9.0)
    assert joint.static_bytes == 60.0


def test_profiles_of_other_lengths_are_brought_to_the_longest():
    half = dataclasses.replace(PROFILE, shape=Shape(1, 500))
    joint = joint_measurement([PROFILE, half])
    assert joint.shape == PROFILE.shape
    assert joint.layers[0].input_bytes == 20.0  # those of the other, twice as long
    assert joint.layers[0].attend_forward_seconds == 8.0
    assert joint.rest_seconds == 2.0


def test_a_rank_that_ran_layers_whole_decides():  # it was short of host memory
    whole = dataclasses.replace(COSTS, token_wise=False, output_bytes=0.0, qkv_bytes=0.0, others_bytes=0.0)
    short = dataclasses.replace(PROFILE, layers=(whole,), to_host_bytes_per_second=5.0)
    for found in ([PROFILE, short, PROFILE], [short, PROFILE]):
        assert joint_measurement(found) == short
