"""The swap fraction: the paper's closed form, brute force, every limit, every error."""

import dataclasses
import itertools
import math
import random

import pytest

from memo_hf.errors import DeviceMemoryError, HostMemoryError, PlanError
from memo_hf.planner.layer_costs import Budgets, DevicePeak, KindPlan, LayerCosts, predict
from memo_hf.planner.swap_fraction import least_plan, solve_swap_plan

GIB = 2**30


def layer(**changes) -> LayerCosts:
    """The paper's 7B layer at 1M tokens, one of eight GPUs: u = 1 GiB; 14 of 16 units follow the fraction."""
    values = {
        "num_layers": 32,
        "num_kept": 2,
        "project_forward_seconds": 0.06,
        "attend_forward_seconds": 5.5,
        "finish_forward_seconds": 0.18,
        "project_backward_seconds": 0.12,
        "attend_backward_seconds": 14.0,
        "finish_backward_seconds": 0.36,
        "input_bytes": 1 * GIB,
        "output_bytes": 1 * GIB,
        "qkv_bytes": 3 * GIB,
        "others_bytes": 11 * GIB,
    }
    return LayerCosts(**{**values, **changes})


def budgets(**changes) -> Budgets:
    values = {"host_bytes": 256 * GIB, "to_host_bytes_per_second": 12e9, "to_device_bytes_per_second": 12e9}
    return Budgets(**{**values, **changes})


def closed_form(costs: LayerCosts, limits: Budgets) -> float:
    """Paper section 4.1: alpha = clip(min((B T - 2u) / 14u, (M / (n - 2) - 2u) / 14u), 0, 1)."""
    whole, rest = costs.whole_bytes("rebuild"), costs.fraction_bytes("rebuild")
    by_link = (limits.to_host_bytes_per_second * costs.forward_seconds - whole) / rest
    by_host = (limits.host_bytes / costs.num_movable - whole) / rest
    return min(1.0, max(0.0, min(by_link, by_host)))


def test_paper_headline_is_capped_by_host_memory():
    plan = solve_swap_plan([layer()], budgets(), qkv="rebuild")
    assert plan.swap_fraction == pytest.approx(0.467, abs=5e-4)
    assert plan.binding_limit == "host memory: 256.0 of 256.0 GiB"
    assert plan.exposed_seconds == 0
    assert (plan.num_swapped, plan.num_input_only, plan.num_kept) == (30, 0, 2)


@pytest.mark.parametrize("rate", [0.9e9, 1.5e9, 2e9, 2.9e9, 3.1e9, 12e9])
@pytest.mark.parametrize("host_gib", [100, 200, 256, 400, 1000])
def test_closed_form_of_the_paper(rate, host_gib):
    costs, limits = layer(), budgets(host_bytes=host_gib * GIB, to_host_bytes_per_second=rate)
    plan = solve_swap_plan([costs], dataclasses.replace(limits, to_device_bytes_per_second=math.inf), qkv="rebuild")
    assert plan.swap_fraction == pytest.approx(closed_form(costs, limits), abs=1e-6)


def random_instance(rng):
    kinds = []
    for index in range(rng.choice([1, 1, 2])):
        size = rng.uniform(1, 5)
        kinds.append(
            LayerCosts(
                name=f"kind{index}",
                num_layers=(number := rng.randint(1, 4)),
                num_kept=rng.randint(0, min(2, number)),
                token_wise=rng.random() < 0.85,
                **{
                    f"{part}_{way}_seconds": rng.uniform(0.1, 3)
                    for part in ("project", "attend", "finish")
                    for way in ("forward", "backward")
                },
                input_bytes=size,
                output_bytes=size * rng.uniform(0.5, 1.5),
                qkv_bytes=size * rng.uniform(0.5, 3),
                others_bytes=size * rng.uniform(2, 20),
                device_peaks=(
                    DevicePeak(when="b", treatment="swap", fixed_bytes=10 * size, bytes_per_fraction=rng.uniform(0, 9)),
                    DevicePeak(
                        when="b", treatment="rebuild", fixed_bytes=7 * size, bytes_per_fraction=rng.uniform(0, 9)
                    ),
                    DevicePeak(when="i", treatment="input", fixed_bytes=rng.choice([1, 12]) * size),
                ),
            )
        )
    total = sum(c.num_movable * (c.whole_bytes("swap") + c.others_bytes) for c in kinds)
    limits = Budgets(
        host_bytes=rng.uniform(0.05, 1.1) * max(total, 1),
        device_bytes=rng.choice([math.inf, rng.uniform(20, 70)]),
        to_host_bytes_per_second=rng.uniform(1, 40),
        to_device_bytes_per_second=rng.uniform(1, 40),
    )
    return kinds, limits


def every_choice(kinds, steps):
    """All (qkv, kinds): every number of swapped layers, and mean fractions over all layers in `steps` equal steps."""
    for mean in (step / steps for step in range(steps + 1)):
        per_kind = []
        for costs in kinds:
            options = []
            for number in range(costs.num_movable + 1) if costs.token_wise else [0]:
                fraction = mean * costs.num_movable / number if number else (0 if costs.num_movable else mean)
                fraction = fraction if costs.token_wise else 0
                if fraction > 1 or (costs.token_wise and costs.num_movable and not number and mean):
                    continue
                options.append(
                    KindPlan(
                        name=costs.name,
                        num_swapped=number,
                        num_input_only=costs.num_movable - number,
                        num_kept=costs.num_kept,
                        swap_fraction=fraction,
                    )
                )
            per_kind.append(options)
        for qkv in ("swap", "rebuild"):
            yield from ((qkv, choice) for choice in itertools.product(*per_kind))


@pytest.mark.parametrize("seed", range(40))
def test_brute_force_never_beats_the_plan(seed):
    kinds, limits = random_instance(random.Random(seed))
    best = math.inf
    for qkv, choice in every_choice(kinds, steps=24):
        priced = predict(kinds, limits, qkv, choice)
        if priced.host_bytes <= limits.host_bytes and priced.device_bytes <= limits.device_bytes:
            best = min(best, priced.step_seconds)
    try:
        plan = solve_swap_plan(kinds, limits)
    except (HostMemoryError, DeviceMemoryError):
        assert best == math.inf
        return
    assert plan.step_seconds <= best * (1 + 1e-6)
    assert plan.host_bytes <= limits.host_bytes * (1 + 1e-6)
    assert plan.device_bytes <= limits.device_bytes * (1 + 1e-6)


# Every limit is reachable and named.


def test_limit_link():
    plan = solve_swap_plan([layer()], budgets(host_bytes=math.inf, to_host_bytes_per_second=2e9))
    assert plan.binding_limit == "link: 2.0 GB/s"
    assert 0 < plan.swap_fraction < 1


def test_a_link_that_is_three_times_slower_lowers_the_fraction():
    # cases 14, 15
    fast, slow = (
        solve_swap_plan([layer()], budgets(host_bytes=math.inf, to_host_bytes_per_second=r)) for r in (2.4e9, 0.8e9)
    )
    assert slow.swap_fraction < fast.swap_fraction < 1


def test_limit_link_where_even_h_and_o_are_exposed():
    """Short sequence, slow link: exposed copies are weighed against recomputing attention."""
    costs = layer(attend_forward_seconds=0.2, attend_backward_seconds=0.5)
    plan = solve_swap_plan([costs], budgets(host_bytes=math.inf, to_host_bytes_per_second=2e9))
    assert plan.binding_limit == "link: 2.0 GB/s"
    all_whole = KindPlan(name="layer", num_swapped=30, num_input_only=0, num_kept=2, swap_fraction=0.0)
    assert (
        plan.step_seconds < predict([costs], budgets(to_host_bytes_per_second=2e9), "rebuild", [all_whole]).step_seconds
    )
    assert plan.num_input_only > 0


def test_limit_device_memory():
    peaks = tuple(
        DevicePeak(when="attention backward", treatment=t, fixed_bytes=20 * GIB, bytes_per_fraction=28 * GIB)
        for t in ("swap", "rebuild")
    )
    plan = solve_swap_plan([layer(device_peaks=peaks)], budgets(host_bytes=math.inf, device_bytes=27 * GIB))
    assert plan.swap_fraction == pytest.approx(0.25)
    assert plan.binding_limit == "device memory: 27.0 of 27.0 GiB"
    assert plan.device_peak == "attention backward"


def test_no_limit():
    plan = solve_swap_plan([layer()], budgets(host_bytes=math.inf))
    assert plan.swap_fraction == 1
    assert plan.binding_limit == "no limit: every token is swapped and the copies are hidden"


def test_host_too_small_for_h_and_o_recomputes_attention_in_some_layers():
    # case 93
    plan = solve_swap_plan([layer()], budgets(host_bytes=45 * GIB))
    assert plan.num_input_only == 15 and plan.num_swapped == 15
    assert plan.swap_fraction == pytest.approx(0, abs=1e-9)
    assert plan.binding_limit == "host memory: 45.0 of 45.0 GiB"


def test_small_keys_are_swapped_large_queries_rebuilt():
    grouped = layer(qkv_bytes=0.3 * GIB)
    assert solve_swap_plan([grouped], budgets()).qkv == "swap"
    assert solve_swap_plan([layer(qkv_bytes=6 * GIB)], budgets()).qkv == "rebuild"


def test_activation_checkpointing_is_kept_where_it_is_as_fast():
    # case 95
    costs = layer(attend_forward_seconds=0.0, attend_backward_seconds=0.0)
    slow = budgets(to_host_bytes_per_second=0.5e9, to_device_bytes_per_second=0.5e9)
    plan = solve_swap_plan([costs], slow, checkpoint_device_bytes=30 * GIB)
    assert plan.strategy == "checkpoint" and plan.num_kept == 32 and plan.host_bytes == 0
    assert plan.binding_limit.startswith("step time: activation checkpointing fits")
    assert solve_swap_plan([costs], slow).strategy == "memo"
    small_device = dataclasses.replace(slow, device_bytes=20 * GIB)
    assert solve_swap_plan([costs], small_device, checkpoint_device_bytes=30 * GIB).strategy == "memo"


@pytest.mark.parametrize("rest", [0.0, 1e3])
@pytest.mark.parametrize(("gain", "strategy"), [(-0.01, "checkpoint"), (0.019, "checkpoint"), (0.021, "memo")])
def test_a_tie_goes_to_activation_checkpointing(gain, strategy, rest):
    stock = {"checkpoint_device_bytes": 1.0, "rest_seconds": rest}
    swapping = solve_swap_plan([layer()], budgets()).step_seconds
    plan = solve_swap_plan([layer()], budgets(), checkpoint_step_seconds=rest + swapping / (1 - gain), **stock)
    assert plan.strategy == strategy
    assert plan.binding_limit.endswith("as fast: 2% of the layers' time or less apart") is (gain == 0.019)


@pytest.mark.parametrize("seed", range(10))
def test_never_worse_than_activation_checkpointing(seed):
    kinds, limits = random_instance(random.Random(100 + seed))
    limits = dataclasses.replace(limits, host_bytes=math.inf, device_bytes=math.inf)
    plan = solve_swap_plan(kinds, limits, checkpoint_device_bytes=0.0)
    assert plan.step_seconds <= plan.checkpoint_seconds


def test_fraction_by_hand():
    plan = solve_swap_plan([layer()], budgets(), swap_fraction=0.25, qkv="rebuild", checkpoint_device_bytes=0.0)
    assert plan.swap_fraction == pytest.approx(0.25)
    assert plan.binding_limit == "swap_fraction: set to 0.25 by hand"
    whole = solve_swap_plan([layer()], budgets(), swap_fraction=1.0)
    assert whole.num_swapped == 15 and whole.num_input_only == 15
    assert whole.binding_limit == "swap_fraction: set to 1 by hand; host memory: 255.0 of 256.0 GiB"


def test_model_of_two_kept_layers_needs_no_host():
    plan = solve_swap_plan([layer(num_layers=2)], budgets(host_bytes=0.0))
    assert plan.host_bytes == 0 and plan.swap_fraction == 1 and plan.num_kept == 2


def test_host_error_says_what_to_do():
    said = r"no plan fits\. host memory: needs 30.00 GiB a rank, has 20.00 GiB; share the sequence"
    with pytest.raises(HostMemoryError, match=said):
        solve_swap_plan([layer()], budgets(host_bytes=20 * GIB))


def test_device_error_says_what_to_do():
    peaks = tuple(DevicePeak(when="w", treatment=t, fixed_bytes=20 * GIB) for t in ("swap", "rebuild", "input"))
    said = r"out of memory\. No plan fits\. device memory: needs at least 20.00 GiB, has 10.00 GiB; share"
    with pytest.raises(DeviceMemoryError, match=said):
        solve_swap_plan([layer(device_peaks=peaks)], budgets(device_bytes=10 * GIB))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_needed_at_least_is_the_least_of_every_choice(seed):
    kinds, limits = random_instance(random.Random(200 + seed))
    moved = [dataclasses.replace(costs, num_kept=0) for costs in kinds]
    needs = [predict(way, limits, *c).device_bytes for way in (kinds, moved) for c in every_choice(way, 2)]
    least = least_plan(kinds, moved, budgets=dataclasses.replace(limits, device_bytes=1e-3))
    assert least.device_bytes == pytest.approx(min(needs))
    assert least.binding_limit.startswith("device memory: needs at least")


def test_layers_that_cannot_stay_leave_a_shortage_of_the_host():
    """With two layers on the device it does not fit, without them the host is short: that is what is said."""
    stays = DevicePeak(when="loss", treatment="rebuild", fixed_bytes=30 * GIB)
    kept, moved = layer(device_peaks=(stays, dataclasses.replace(stays, treatment="swap"))), layer(num_kept=0)
    limits = budgets(device_bytes=20 * GIB, host_bytes=31 * GIB)
    with pytest.raises(HostMemoryError, match="needs 32.00 GiB a rank, has 31.00 GiB"):
        solve_swap_plan([kept], limits, without_kept=[moved])
    more = dataclasses.replace(limits, host_bytes=64 * GIB)
    assert solve_swap_plan([kept], more, without_kept=[moved]).num_kept == 0


def test_a_host_too_small_for_any_swapping_leaves_activation_checkpointing():
    plan = solve_swap_plan([layer()], budgets(host_bytes=1 * GIB), checkpoint_device_bytes=30 * GIB)
    assert plan.strategy == "checkpoint" and plan.host_bytes == 0
    said = "needs 30.00 GiB a rank, has 1.00 GiB; activation checkpointing, which swaps nothing, fits"
    assert plan.binding_limit == f"host memory: {said}"
    # The device is short of what any swapping takes, not of checkpointing: the limit is of swapping.
    peaks = tuple(DevicePeak(when="w", treatment=t, fixed_bytes=20 * GIB) for t in ("swap", "rebuild", "input"))
    plan = solve_swap_plan(
        [layer(device_peaks=peaks)], budgets(device_bytes=16 * GIB), checkpoint_device_bytes=15 * GIB
    )
    assert plan.binding_limit.startswith("device memory: needs at least 20.00 GiB, has 16.00 GiB; activation")


def test_costs_are_checked():
    with pytest.raises(PlanError, match="input_bytes is nan"):
        layer(input_bytes=math.nan)
    with pytest.raises(PlanError, match="3 kept layers of only 2"):
        layer(num_layers=2, num_kept=3)
