"""The swap fraction, solved: the paper's linear program (section 4.1) and what it leaves open.

Called by the session with measured costs and by the forecast with predicted ones; knows neither a model nor torch.

The paper maximises alpha while copies hide behind one layer's forward and the host holds what the layers send. Here the
predicted step is minimised, which gives the same alpha wherever copying a token costs more link time than recomputing
it costs compute, and also settles what the paper does not say: layers whose h and o do not fit the host send h alone
and recompute attention; q, k, v are swapped or rebuilt, whichever is cheaper; exposed copies are weighed against
recompute; the device's memory is a limit too; and where activation checkpointing is as fast, it is kept.

As fast is within 2 % of the layers' time: neither predicted nor measured seconds are right to that, and of two that are
alike the simpler one is better.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from memo_hf.errors import DeviceMemoryError, HostMemoryError
from memo_hf.planner.layer_costs import Budgets, KindPlan, Prediction, checkpoint_seconds, predict
from memo_hf.planner.program import solve_program
from memo_hf.units import format_bytes

_TIE = 0.02
QKV_IN_WORDS = {"swap": "q, k, v swapped", "rebuild": "q, k, v recomputed"}
HOST_IS_SHORT = "host memory, which has no room for all that is swapped at fraction 0"


@dataclass(frozen=True, kw_only=True)
class SwapPlan:
    """What to do with each layer's activations, and what it is predicted to cost one rank.

    Attributes:
        strategy: "memo", or "checkpoint" where stock activation checkpointing is predicted to be as fast.
        swap_fraction: alpha, the mean over the swapped layers.
        qkv: "swap" or "rebuild".
        kinds: a `KindPlan` per kind of layer, in the order given.
        step_seconds, host_bytes, device_bytes: predicted; `device_peak` says when the device holds the most.
        exposed_seconds: of the step, waiting for copies.
        checkpoint_seconds: a step of stock activation checkpointing.
        binding_limit: in words, what keeps the step from being shorter.
    """

    strategy: str
    swap_fraction: float
    qkv: str
    kinds: tuple[KindPlan, ...]
    step_seconds: float
    exposed_seconds: float
    checkpoint_seconds: float
    host_bytes: float
    device_bytes: float
    device_peak: str
    binding_limit: str

    @property
    def num_swapped(self) -> int:
        return sum(kind.num_swapped for kind in self.kinds)

    @property
    def num_input_only(self) -> int:
        return sum(kind.num_input_only for kind in self.kinds)

    @property
    def num_kept(self) -> int:
        return sum(kind.num_kept for kind in self.kinds)


def solve_swap_plan(
    layers,
    budgets: Budgets,
    *,
    without_kept=None,
    rest_seconds: float = 0.0,
    swap_fraction: float | None = None,
    qkv: str | None = None,
    checkpoint_device_bytes: float | None = None,
    checkpoint_step_seconds: float | None = None,
) -> SwapPlan:
    """The plan with the shortest predicted step that fits both memories.

    Args:
        layers: sequence of `LayerCosts`, one per kind of layer.
        budgets: of this rank.
        without_kept: the same layers, none of which stays on the device: for where that is what it takes to fit.
        rest_seconds: of the step outside the decoder layers.
        swap_fraction, qkv: set by hand, or None to be chosen.
        checkpoint_device_bytes: device peak of stock activation checkpointing, or None where it is no alternative.
        checkpoint_step_seconds: its step where it was measured; None: twice the forward and once the backward.

    Raises:
        HostMemoryError, DeviceMemoryError: no choice fits; the message says what is missing and what to do.
    """
    ways = [tuple(way) for way in (layers, without_kept) if way is not None]
    stock_fits = checkpoint_device_bytes is not None and checkpoint_device_bytes <= budgets.device_bytes
    stock_seconds = checkpoint_seconds(ways[0], rest_seconds)
    if checkpoint_step_seconds is not None:
        stock_seconds = checkpoint_step_seconds

    def stock(limit: str) -> SwapPlan:
        return SwapPlan(
            strategy="checkpoint",
            swap_fraction=0.0,
            qkv=qkv or "rebuild",
            kinds=tuple(_all_kept(c) for c in ways[0]),
            step_seconds=stock_seconds,
            exposed_seconds=0.0,
            checkpoint_seconds=stock_seconds,
            host_bytes=0.0,
            device_bytes=checkpoint_device_bytes,
            device_peak="activation checkpointing",
            binding_limit=limit,
        )

    for layers in ways:
        choice = solve_program(layers, budgets, swap_fraction=swap_fraction, qkv=qkv)
        if choice is not None:
            break
    else:
        stock_bytes = None if stock_fits else checkpoint_device_bytes
        least = least_plan(
            *ways, budgets=budgets, swap_fraction=swap_fraction, qkv=qkv, checkpoint_device_bytes=stock_bytes
        )
        if stock_fits and swap_fraction is None:
            return stock(f"{least.binding_limit}; activation checkpointing, which swaps nothing, fits")
        raise _shortage(least)
    mode, kinds = choice
    prediction = predict(layers, budgets, mode, kinds, rest_seconds)
    by_hand = swap_fraction is not None
    gained = stock_seconds - prediction.step_seconds
    if stock_fits and not by_hand and gained <= _TIE * (stock_seconds - rest_seconds):
        limit = (
            f"step time: activation checkpointing fits and is predicted to take {stock_seconds:.3g} s a step,"
            f" swapping {prediction.step_seconds:.3g} s"
        )
        if gained > 0:
            limit += f", which is taken for as fast: {_TIE:.0%} of the layers' time or less apart"
        return stock(limit)
    if by_hand:
        limit = f"swap_fraction: set to {swap_fraction:.3g} by hand"
        if any(kind.num_input_only and costs.token_wise for kind, costs in zip(kinds, layers, strict=True)):
            limit += f"; host memory: {_of(prediction.host_bytes, budgets.host_bytes)}"
    else:
        limit = _binding_limit(layers, budgets, prediction, mode, kinds, qkv)
    return SwapPlan(
        strategy="memo",
        swap_fraction=_mean_fraction(kinds),
        qkv=mode,
        kinds=kinds,
        step_seconds=prediction.step_seconds,
        exposed_seconds=prediction.forward_exposed_seconds + prediction.backward_exposed_seconds,
        checkpoint_seconds=stock_seconds,
        host_bytes=prediction.host_bytes,
        device_bytes=prediction.device_bytes,
        device_peak=prediction.device_peak,
        binding_limit=limit,
    )


def is_feasible(layers, budgets: Budgets, *, swap_fraction: float | None = None, qkv: str | None = None) -> bool:
    """Whether any plan that swaps fits both memories; arguments as for `solve_swap_plan`."""
    return solve_program(tuple(layers), budgets, swap_fraction=swap_fraction, qkv=qkv) is not None


def _all_kept(costs) -> KindPlan:
    return KindPlan(name=costs.name, num_swapped=0, num_input_only=0, num_kept=costs.num_layers, swap_fraction=0.0)


def _mean_fraction(kinds) -> float:
    number = sum(kind.num_swapped for kind in kinds)
    if number == 0:
        return max(kind.swap_fraction for kind in kinds)
    return sum(kind.num_swapped * kind.swap_fraction for kind in kinds) / number


def _lifted(budgets: Budgets) -> dict[str, Budgets]:
    """The budgets with one limit at a time taken away."""
    unlimited = math.inf
    link = {"to_host_bytes_per_second": unlimited, "to_device_bytes_per_second": unlimited}
    return {
        "host memory": dataclasses.replace(budgets, host_bytes=unlimited),
        "link": dataclasses.replace(budgets, **link),
        "device memory": dataclasses.replace(budgets, device_bytes=unlimited),
    }


def _binding_limit(layers, budgets, prediction: Prediction, mode, kinds, qkv) -> str:
    """The limit that, lifted alone, would shorten the predicted step the most."""
    movable = sum(kind.num_swapped + kind.num_input_only for kind in kinds)
    whole = all(kind.swap_fraction == 1 or not costs.token_wise for kind, costs in zip(kinds, layers, strict=True))
    if prediction.forward_exposed_seconds + prediction.backward_exposed_seconds == 0 and whole and movable:
        return "no limit: every token is swapped and the copies are hidden"
    here = predict(layers, budgets, mode, kinds).step_seconds
    gains = {}
    for name, lifted in _lifted(budgets).items():
        choice = solve_program(layers, lifted, qkv=qkv)
        gains[name] = here - predict(layers, lifted, *choice).step_seconds
    name = max(gains, key=gains.get)
    if gains[name] <= 1e-6 * here:
        return "no single limit: none, lifted alone, would shorten the step"
    if name == "host memory":
        return f"host memory: {_of(prediction.host_bytes, budgets.host_bytes)}"
    if name == "device memory":
        return f"device memory: {_of(prediction.device_bytes, budgets.device_bytes)}"
    slowest = min(budgets.to_host_bytes_per_second, budgets.to_device_bytes_per_second)
    return f"link: {slowest / 1e9:.1f} GB/s"


def _of(used: float, limit: float) -> str:
    """`61.2 of 64.0 GiB`, both in the unit of the limit."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit >= size:
            return f"{used / size:.1f} of {limit / size:.1f} {unit}"
    return f"{used:.0f} of {limit:.0f} B"


def least_plan(
    *ways,
    budgets: Budgets,
    rest_seconds: float = 0.0,
    swap_fraction: float | None = None,
    qkv: str | None = None,
    checkpoint_device_bytes: float | None = None,
) -> SwapPlan:
    """The plan that is nearest to fitting, where none fits, with what is missing as its limit.

    That is the one with the fewest host bytes among those that fit the device, or else with the fewest device bytes.

    Args:
        ways: sequences of `LayerCosts`: the layers with those that stay on the device, and without.
        budgets, rest_seconds, swap_fraction, qkv, checkpoint_device_bytes: as for `solve_swap_plan`.
    """
    unlimited = _lifted(budgets)["host memory"]
    for layers in ways:
        choice = solve_program(layers, unlimited, swap_fraction=swap_fraction, qkv=qkv, least_host=True)
        if choice is not None:
            host = predict(layers, budgets, *choice).host_bytes
            limit = f"host memory: needs {format_bytes(host)} a rank, has {format_bytes(budgets.host_bytes)}"
            break
    else:
        found = [(layers, *_least_on_device(layers, swap_fraction, qkv)) for layers in ways]
        layers, *choice = min(found, key=lambda one: predict(one[0], budgets, *one[1:]).device_bytes)
        needed = predict(layers, budgets, *choice).device_bytes
        if checkpoint_device_bytes is not None and swap_fraction is None:
            needed = min(needed, checkpoint_device_bytes)
        limit = f"device memory: needs at least {format_bytes(needed)}, has {format_bytes(budgets.device_bytes)}"
    priced = predict(layers, budgets, *choice, rest_seconds)
    return SwapPlan(
        strategy="memo",
        swap_fraction=_mean_fraction(choice[1]),
        qkv=choice[0],
        kinds=choice[1],
        step_seconds=priced.step_seconds,
        exposed_seconds=priced.forward_exposed_seconds + priced.backward_exposed_seconds,
        checkpoint_seconds=checkpoint_seconds(layers, rest_seconds),
        host_bytes=priced.host_bytes,
        device_bytes=priced.device_bytes,
        device_peak=priced.device_peak,
        binding_limit=limit,
    )


def _least_on_device(layers, swap_fraction, qkv) -> tuple[str, tuple[KindPlan, ...]]:
    """The choice with the lowest device peak, whatever the host must hold."""
    link = Budgets(host_bytes=math.inf, to_host_bytes_per_second=math.inf, to_device_bytes_per_second=math.inf)
    found = []
    for mode in ("rebuild", "swap") if qkv is None else (qkv,):
        kinds = []
        for costs in layers:
            movable = costs.num_movable
            options = [
                KindPlan(
                    name=costs.name,
                    num_swapped=number,
                    num_input_only=movable - number,
                    num_kept=costs.num_kept,
                    swap_fraction=(swap_fraction or 0.0) if number or not movable else 0.0,
                )
                for number in ({0, movable} if costs.token_wise else {0})
            ]
            kinds.append(min(options, key=lambda kind: predict([costs], link, mode, [kind]).device_bytes))
        found.append((mode, tuple(kinds)))
    return min(found, key=lambda choice: predict(layers, link, *choice).device_bytes)


def _shortage(least: SwapPlan) -> HostMemoryError | DeviceMemoryError:
    """What `least` is short of, and what to do about it in a run."""
    if least.binding_limit.startswith("host"):
        return HostMemoryError(
            f"no plan fits. {least.binding_limit}; share the sequence among more ranks, set a larger host_memory, or"
            " leave less else on the host (an offloaded optimizer)"
        )
    return DeviceMemoryError(
        f"out of memory. No plan fits. {least.binding_limit}; share the sequence or the weights among more ranks,"
        " offload the optimizer, or set a smaller chunk_size"
    )
