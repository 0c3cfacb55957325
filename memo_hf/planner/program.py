"""The linear program behind the swap fraction (the paper's section 4.1, extended). Called by `swap_fraction` alone.

It stays linear because a kind's swapped layers are counted in layers' worth of tokens: with n swapped layers at
fraction alpha, A = n * alpha is a variable of its own, and `max(compute, copy)` over n equal layers is linear in both.
"""

from __future__ import annotations

import math

import pulp

from memo_hf.planner.layer_costs import Budgets, KindPlan
from memo_hf.planner.solver import solve

_TREATMENTS = ("swap", "rebuild")


def solve_program(
    layers, budgets: Budgets, *, swap_fraction: float | None = None, qkv: str | None = None, least_host: bool = False
) -> tuple[str, tuple[KindPlan, ...]] | None:
    """The choice with the shortest step, as (qkv, a `KindPlan` per kind), or None when nothing fits.

    Args:
        layers: sequence of `LayerCosts`.
        swap_fraction, qkv: fixed, or None.
        least_host: look for the fewest host bytes instead.
    """
    # Bytes and seconds are scaled to about one a layer: the solver's tolerances are absolute.
    byte = 1.0 / (max(c.whole_bytes("swap") + c.others_bytes for c in layers) or 1.0)
    second = 1.0 / (max(c.forward_seconds + c.backward_seconds for c in layers) or 1.0)
    out_rate = budgets.to_host_bytes_per_second * byte / second
    back_rate = budgets.to_device_bytes_per_second * byte / second
    problem = pulp.LpProblem("swap_fraction", pulp.LpMinimize)
    swap_qkv = problem.add_variable("swap_qkv", cat="Binary")
    if qkv is not None:
        problem += swap_qkv == (qkv == "swap")
    times, host, counts = [], [], []
    shared = None
    for index, costs in enumerate(layers):
        movable = costs.num_movable
        mean = problem.add_variable(f"mean_fraction_{index}", 0, 1)
        input_only = problem.add_variable(f"input_only_{index}", 0, movable, cat="Integer")
        swapped = {t: problem.add_variable(f"{t}_{index}", 0, movable, cat="Integer") for t in _TREATMENTS}
        tokens = {t: problem.add_variable(f"{t}_tokens_{index}", 0, movable) for t in _TREATMENTS}
        counts.append((mean, swapped, tokens))
        problem += input_only + pulp.lpSum(swapped.values()) == movable
        problem += pulp.lpSum(tokens.values()) == movable * mean
        problem += swapped["swap"] <= movable * swap_qkv
        problem += swapped["rebuild"] <= movable - movable * swap_qkv
        if not costs.token_wise:
            problem += input_only == movable
            problem += mean == 0
        if swap_fraction is None and costs.token_wise:
            # One fraction for all kinds, as in the paper: it is the one dial that the layers have.
            if shared is not None:
                problem += mean - shared == 0  # PuLP 4 takes `==` of two variables for whether they are the same
            shared = mean
        if swap_fraction is not None and costs.token_wise:
            if movable == 0:
                problem += mean == swap_fraction
            for t in _TREATMENTS:
                problem += tokens[t] == swap_fraction * swapped[t]
        for t in _TREATMENTS:
            problem += tokens[t] <= swapped[t]
            sent = costs.whole_bytes(t) * byte * swapped[t] + costs.fraction_bytes(t) * byte * tokens[t]
            host.append(sent)
            compute = (costs.backward_seconds + costs.extra_seconds(t)) * second * swapped[t]
            compute -= costs.extra_seconds(t) * second * tokens[t]
            times.append(
                _longer(problem, f"{t}_forward_{index}", costs.forward_seconds * second * swapped[t], sent, out_rate)
            )
            times.append(_longer(problem, f"{t}_backward_{index}", compute, sent, back_rate))
        sent = costs.input_bytes * byte * input_only
        host.append(sent)
        forward, backward = costs.forward_seconds * second, (costs.forward_seconds + costs.backward_seconds) * second
        times.append(_longer(problem, f"input_forward_{index}", forward * input_only, sent, out_rate))
        times.append(_longer(problem, f"input_backward_{index}", backward * input_only, sent, back_rate))
        if costs.token_wise:
            times.append(-costs.num_kept * costs.recompute_seconds * second * mean)
        _limit_device(problem, costs, budgets.device_bytes, byte, swap_qkv, mean, input_only, swapped, tokens)
    if math.isfinite(budgets.host_bytes):
        problem += pulp.lpSum(host) <= budgets.host_bytes * byte
    problem.setObjective(pulp.lpSum(host if least_host else times))
    if not solve(problem):
        return None
    kinds = tuple(_read(costs, *count) for costs, count in zip(layers, counts, strict=True))
    return ("swap" if _value(swap_qkv, qkv != "rebuild") > 0.5 else "rebuild"), kinds


def _longer(problem, name, compute, sent, rate):
    """A variable that is at least `compute` and at least the time to copy `sent`."""
    longer = problem.add_variable(name, 0)
    problem += longer >= compute
    if math.isfinite(rate):
        problem += longer >= sent * (1.0 / rate)
    return longer


def _limit_device(problem, costs, device_bytes, byte, swap_qkv, mean, input_only, swapped, tokens):
    """Each moment's bytes within the budget, for the layers that there are: n * (fixed - budget) + A * slope <= 0."""
    if not math.isfinite(device_bytes):
        return
    for peak in costs.device_peaks:
        spare, slope = (device_bytes - peak.fixed_bytes) * byte, peak.bytes_per_fraction * byte
        if peak.treatment == "input":
            if spare < 0:
                problem += input_only == 0
                if costs.num_kept and not costs.token_wise:
                    problem += mean >= 1  # contradicts mean == 0: not even a kept layer of this kind fits
            continue
        problem += spare * swapped[peak.treatment] >= slope * tokens[peak.treatment]
        if costs.num_kept and costs.token_wise:
            unused = (1 - swap_qkv) if peak.treatment == "swap" else swap_qkv
            problem += slope * mean <= spare + (slope + abs(spare)) * unused


def _read(costs, mean, swapped, tokens) -> KindPlan:
    number = sum(round(_value(v)) for v in swapped.values())
    fraction = sum(_value(v) for v in tokens.values()) / number if number else 0.0
    if costs.num_movable == 0 and costs.token_wise:
        fraction = _value(mean)
    return KindPlan(
        name=costs.name,
        num_swapped=number,
        num_input_only=costs.num_movable - number,
        num_kept=costs.num_kept,
        swap_fraction=_snap(fraction),
    )


def _snap(fraction: float) -> float:
    """0 and 1 where the solver's rounding alone keeps the fraction from them."""
    return float(round(fraction)) if abs(fraction - round(fraction)) < 1e-9 else fraction


def _value(variable, default: float = 0.0) -> float:
    """PuLP gives no value to a variable that no constraint mentions."""
    return default if variable.value() is None else variable.value()
