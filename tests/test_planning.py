"""The running session profiles a step, solves for the swap fraction, and reports forecast beside measured."""

import dataclasses
import functools
import gc
import json
import logging
import math
import random
import runpy
from pathlib import Path

import pytest
import torch
from test_budgets import cgroup2, machine
from tiny_models import gradients, random_ids, tiny, worst_relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memo_hf
from memo_hf.errors import HostMemoryError
from memo_hf.forecasting.running import describe_run
from memo_hf.planner.budgets import host_budget_bytes
from memo_hf.planner.chunks import default_chunk_tokens
from memo_hf.planner.plan import Shape
from memo_hf.planner.step_times import StepTimes
from memo_hf.planner.swap_fraction import least_plan
from memo_hf.profiler import Profile
from memo_hf.report.summary import compared
from memo_hf.solving import _budgets

BENCH = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks/bench_forecast_cpu.py"))


def train(model, num_tokens, *, seed=1, batch=1):
    ids = random_ids(batch, num_tokens, seed=seed)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


def enabled(model=None, **settings):
    memory = {} if "swap_fraction" in settings else {"device_memory": "1TiB"}  # has it solved for on a CPU
    return memo_hf.enable(
        model or tiny("llama", num_hidden_layers=5), memo_hf.MemoConfig(**{"min_tokens": 0, **memory, **settings})
    )


@pytest.fixture
def never_checkpoints(monkeypatch):
    """On a busy machine the times of such small layers may say that activation checkpointing is as fast."""
    monkeypatch.setattr("memo_hf.planner.swap_fraction._TIE", -math.inf)


def test_the_first_step_is_measured_and_the_second_is_planned():
    session = enabled(chunk_size=64)
    train(session.model, 256)
    assert session.stats.swap_fraction == 0 and "nothing yet" in session.stats.binding_limit
    train(session.model, 256)
    measured = session.planners[0].measurement
    (costs,) = measured.layers
    assert (costs.num_layers, costs.num_kept, measured.indices) == (5, 2, ((0, 1, 2, 3, 4),))
    assert costs.input_bytes == 256 * 32 * 4
    assert costs.output_bytes == 256 * (32 + 4) * 4  # o and its logsumexp
    assert costs.qkv_bytes == 256 * (32 + 2 * 16) * 4
    assert all(value > 0 for name, value in vars(costs).items() if name.endswith("forward_seconds"))
    assert costs.attend_backward_seconds > 0  # of the others' the recompute is taken off, which may be all on a bad day
    assert measured.to_host_bytes_per_second > 1e6 and measured.to_device_bytes_per_second > 1e6
    assert session.stats.binding_limit in session.describe()
    session.close()


def test_measuring_adds_hardly_any_work(monkeypatch):
    """Counted: operators of the measured step beside one at the same settings by hand, and moments noted."""
    marks, mark = [], Profile.mark
    monkeypatch.setattr(Profile, "mark", lambda profile, *moment: marks.append(moment) or mark(profile, *moment))
    model, counts = tiny("llama", num_hidden_layers=5), []
    for by_hand in ({}, {"swap_fraction": 0.0}):
        session = enabled(model, chunk_size=64, qkv="swap", **by_hand)
        with FlopCounterMode(display=False) as products, Operators() as operators:
            train(model, 512)
        counts.append((products.get_total_flops(), operators.number))
        assert len(marks) == 11 * 5 * (not by_hand)
        marks.clear()
        session.close()
    (measured_flops, measured), (flops, plain) = counts
    assert flops <= measured_flops < 1.02 * flops and measured < 1.02 * plain


class Operators(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_what_is_predicted_is_what_is_swapped():
    """The bytes of a chunk are counted without swapping it; then all chunks are swapped."""
    for family in ("llama", "qwen3", "phi3"):
        session = enabled(tiny(family), chunk_size=64, host_memory="1GiB")
        for _ in range(2):
            train(session.model, 256)
        (costs,) = session.planners[0].measurement.layers
        stats = session.stats
        sent = costs.whole_bytes(stats.qkv) + stats.swap_fraction * costs.fraction_bytes(stats.qkv)
        if stats.strategy == "memo":
            assert stats.swapped_bytes == pytest.approx(2 * sent, abs=2 * 4096 * stats.swap_fraction), family
        session.close()


def test_gradients_do_not_change_when_the_plan_comes():
    model, ids = tiny("llama"), random_ids(2, 96)
    stock = gradients(model, ids)
    session = enabled(model, chunk_size=32)
    for _ in range(3):
        assert worst_relative_error(gradients(model, ids), stock) < 1e-4
    session.close()


@pytest.mark.parametrize("spoil", ["evaluation", "no grad", "exception", "never backward"])
def test_only_a_whole_training_step_is_measured(spoil):
    session = enabled(chunk_size=64)
    model, ids = session.model, random_ids(1, 128)
    if spoil == "evaluation":
        model.eval()
        model(input_ids=ids)
        model.train()
    elif spoil == "no grad":
        with torch.no_grad():
            model(input_ids=ids)
    elif spoil == "never backward":
        model(input_ids=ids, labels=ids)
    else:
        handle = model.model.layers[0].mlp.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids, labels=ids).loss.backward()
        handle.remove()
    gc.collect()
    train(model, 192)
    assert session.planners[0].measurement is None
    train(model, 192)
    assert session.planners[0].measurement.shape.seq_len == 192
    session.close()


def test_two_forward_passes_before_their_backward():
    session = enabled(chunk_size=64)
    ids = random_ids(1, 128)
    losses = [session.model(input_ids=ids, labels=ids).loss for _ in range(2)]
    sum(losses).backward()
    train(session.model, 128)
    assert session.planners[0].measurement is not None
    session.close()


def test_twenty_lengths_neither_leak_nor_fail_nor_are_measured_again():
    session = enabled(chunk_size=64)
    train(session.model, 128)
    train(session.model, 128)
    measured, draw = session.planners[0].measurement, random.Random(0)
    for _ in range(20):
        train(session.model, draw.randint(2, 250))
    assert session.planners[0].measurement is measured
    gc.collect()
    assert session.stats.host_bytes == 0
    session.close()


def test_a_small_host_lowers_the_fraction_and_is_named():
    # Three layers of 512 tokens: h, o and q, k, v take 0.79 MiB, everything some 3 MiB.
    session = enabled(chunk_size=64, host_memory="1.5MiB")
    for _ in range(3):
        train(session.model, 512)
    stats = session.stats
    assert stats.host_reserved_bytes <= 1.5 * 2**20
    assert stats.swap_fraction < 1
    assert stats.peak_host_bytes <= 0.95 * 1.5 * 2**20
    session.close()


def test_a_cgroup_of_its_own_lowers_the_fraction(monkeypatch, tmp_path):
    """Nothing is set: what the machine's cgroup leaves is the budget, here as tight as the model is small."""
    free = int(1.5 * 2**20 / 0.9)
    root = machine(tmp_path, 64, cgroup2(free + 2**30, 2**30))
    monkeypatch.setattr("memo_hf.session.host_budget_bytes", functools.partial(host_budget_bytes, root=root))
    session = enabled(chunk_size=64)
    train(session.model, 512)
    stats = session.stats
    assert 0.99 * 1.5 * 2**20 < stats.host_budget_bytes <= 1.5 * 2**20
    train(session.model, 512)
    assert session.stats.swap_fraction < 1 and session.stats.host_reserved_bytes <= 1.5 * 2**20
    session.close()


def test_device_memory_bounds_models_that_no_forecast_describes(never_checkpoints):
    session = enabled(tiny("deepseek_v3", num_hidden_layers=5), chunk_size=64, qkv="swap", host_memory="1GiB")
    for _ in range(2):
        train(session.model, 512)
    planner, shape = session.planners[0], Shape(1, 512)
    assert describe_run(session.model, session.config, shape) is None
    free = dict(to_host_bytes_per_second=1e15, to_device_bytes_per_second=1e15)  # copies cost nothing
    measured, memory = dataclasses.replace(planner.measurement, **free), planner._memory
    unbounded = planner._solver.solve(measured, shape, memory)
    assert unbounded.swap_fraction == 1
    memory = dataclasses.replace(memory, device_bytes=0.9 * unbounded.device_bytes)
    bounded = planner._solver.solve(measured, shape, memory)
    assert bounded.device_bytes <= memory.device_bytes and bounded.swap_fraction < 1
    assert bounded.binding_limit.startswith("device memory")
    session.close()


def test_layers_that_stay_are_given_up_with_what_they_hold(never_checkpoints, caplog):
    session = enabled(chunk_size=64, unswapped_layers=4, host_memory="1GiB")
    for _ in range(2):
        train(session.model, 512)
    planner, shape = session.planners[0], Shape(1, 512)
    solver, measured, memory = planner._solver, planner.measurement, planner._memory

    def least(num_kept):
        layers, _ = solver._costs(measured, shape, memory, num_kept)
        return least_plan(
            layers, budgets=_budgets(measured, dataclasses.replace(memory, device_bytes=1.0))
        ).device_bytes

    assert least(0) < 0.9 * least(4)
    between = dataclasses.replace(memory, device_bytes=(least(0) + least(4)) / 2)
    with caplog.at_level(logging.WARNING, "memo_hf"):
        assert solver.solve(measured, shape, between).num_kept == 0
        assert not caplog.records
        plan = solver.solve(measured, shape, dataclasses.replace(between, host_bytes=1e5))
    assert plan.binding_limit.startswith("no plan fits. host memory: needs ") and plan.binding_limit in caplog.text
    session.close()


def test_a_host_too_small_for_h_and_o_has_layers_that_send_h_alone(never_checkpoints):
    # h of three layers of 512 tokens: 192 KiB; h and o: 408 KiB.
    session = enabled(chunk_size=64, host_memory="300KiB")
    for _ in range(3):
        train(session.model, 512)
    assert 0 < session.stats.peak_host_bytes <= 300 * 2**10
    session.close()


def test_what_does_not_fit_the_device_is_tried_with_the_least(caplog):
    session = enabled(chunk_size=64, device_memory="300KiB")
    for _ in range(3):
        train(session.model, 512)
    assert [r.levelname for r in caplog.records if "no plan is predicted to fit" in r.message] == ["WARNING"]
    (planner,) = session.planners
    needed = memo_hf.units.format_bytes(planner.plan.device_bytes)
    assert f"device memory: needs at least {needed}, has 300.0 KiB" in session.stats.binding_limit
    assert planner.plan.num_kept == 0 and planner.choice.first_kept == 5  # no layer stays on the device
    session.close()


def test_a_host_too_small_for_anything_says_so():
    session = enabled(chunk_size=64, host_memory="64KiB")
    with pytest.raises(HostMemoryError, match="host memory does not suffice"):
        train(session.model, 512)
    session.close()


def test_plans_are_reused_and_stale_ones_refused(tmp_path, caplog):
    path = tmp_path / "plans" / "plan.json"
    first = enabled(chunk_size=64, plan_file=str(path))
    for _ in range(2):
        train(first.model, 256)
    fraction = first.stats.swap_fraction
    first.close()
    again = enabled(chunk_size=64, plan_file=str(path))
    train(again.model, 256)  # no step is measured
    assert again.stats.swap_fraction == fraction and again.planners[0].measurement == first.planners[0].measurement
    again.close()
    saved = json.loads(path.read_text())
    saved["fingerprint"]["torch"] = "1.0"
    path.write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING, "memo_hf"):
        stale = enabled(chunk_size=64, plan_file=str(path))
        train(stale.model, 256)
    assert (
        f"is refused: torch was '1.0' when it was made and is '{torch.__version__}' now" in caplog.text
        and stale.planners[0].measurement is None
    )
    train(stale.model, 256)
    assert json.loads(path.read_text())["fingerprint"]["torch"] == torch.__version__
    stale.close()


def test_by_hand_nothing_is_measured_or_planned():
    session = enabled(chunk_size=64, swap_fraction=0.5, device_memory=None)
    for _ in range(2):
        train(session.model, 128)
    assert session.planners[0].measurement is None and session.stats.swap_fraction == 0.5
    assert session.stats.binding_limit == "swap_fraction: set to 0.5 by hand"
    session.close()


def test_rebuilt_beside_swapped_tokens():
    model, ids = tiny("llama"), random_ids(2, 96)
    stock = gradients(model, ids)
    for fraction in (0.25, 0.75, 1.0):
        session = enabled(model, chunk_size=32, qkv="rebuild", swap_fraction=fraction, device_memory=None)
        assert worst_relative_error(gradients(model, ids), stock) < 1e-4
        session.close()


def test_report_has_forecast_beside_measured(never_checkpoints):
    session = enabled(chunk_size=64)
    for _ in range(3):
        train(session.model, 256)
    report = session.report(device_peak_bytes=1)
    assert "host bytes: forecast" in report and "measured" in report
    if session.stats.strategy == "memo":
        assert "device peak: forecast" in report and "warning: the forecast is off by" in report
    session.close()


def test_warnings_begin_at_a_tenth():
    lines = compared([("host bytes", "B", 1090, 1000), ("step", "s", 0.5, 1.0), ("host bytes", "B", 0, 0)])
    assert ["warning" in line for line in lines] == [False, True, False]
    assert lines[1] == "  step: forecast 0.5 s, measured 1 s; warning: the forecast is off by -50%"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # raised inside peft
@pytest.mark.parametrize("case", [0, 4, 8, 9])
def test_bytes_are_forecast(case):
    chosen = BENCH["CASES"][case]
    chosen = dataclasses.replace(chosen, tokens=1024 // chosen.batch)
    found = BENCH["run"](chosen, timed=False)
    assert found.forecast_host == found.measured_host
    assert abs(found.peak_error) < 0.05, (found.forecast_peak, found.measured_peak, found.moment)


def test_times_are_of_like_steps_and_leave_the_first_out():
    times, shape, other = StepTimes(), Shape(1, 64), Shape(1, 128)
    for now in (0.0, 9.0, 10.0, 12.0, 15.0):  # the first lasts 9 s, as it maps memory
        times.begin(shape, now)
    assert times.shape == shape and times.median == 2.0  # of 1, 2 and 3
    times.begin(other, 16.0)
    assert times.shape == other and times.median is None
    for now in (20.0, 21.0):
        times.begin(other, now)
    assert times.median == 1.0
    times.restart()
    for now in (22.0, 30.0, 32.0):
        times.begin(other, now)
    assert times.median == 2.0


@pytest.mark.parametrize(
    "device, tokens, chunk",
    [("cpu", 100, 512), ("cpu", 16384, 1024), ("cpu", 2**20, 4096), ("cuda", 100, 4096), ("cuda", 2**17, 8192)],
)
def test_chunks_are_a_sixteenth_within_bounds(device, tokens, chunk):
    assert default_chunk_tokens(tokens, device) == chunk


def test_what_the_first_step_took_beside_the_layers_is_not_held_against_later_lengths(never_checkpoints):
    session = enabled(chunk_size=64)
    planner = session.planners[0]
    train(session.model, 512)
    train(session.model, 512)
    slow = dataclasses.replace(planner.measurement, rest_seconds=1e6)  # kernels were loaded, memory was mapped
    planner._book.measurement = slow
    for _ in range(3):
        train(session.model, 512)
    assert planner.forecast().step_seconds > 1e5
    train(session.model, 640)
    assert planner.forecast().step_seconds < 1e3
