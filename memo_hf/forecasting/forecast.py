"""A run, forecast: does it fit, what does it take, how long is a step. Joins `memory`, `speed` and the planner.

Called by `memo_hf.forecast`, the command line and the session's report; knows no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memo_hf.errors import DeviceMemoryError, HostMemoryError
from memo_hf.forecasting.baselines import CHECKPOINTING, BaselineForecast, baseline
from memo_hf.forecasting.memory import host_state_bytes, layer_bytes
from memo_hf.forecasting.moments import layer_moments
from memo_hf.forecasting.setup import Setup
from memo_hf.forecasting.speed import MFU_CONVENTION, layer_seconds, mfu, rest_seconds
from memo_hf.planner.layer_costs import Budgets, LayerCosts
from memo_hf.planner.swap_fraction import HOST_IS_SHORT, SwapPlan, is_feasible, least_plan, solve_swap_plan
from memo_hf.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run will take, if the forecast is right.

    Attributes:
        fits: both memories suffice.
        strategy: "memo", or "checkpoint" where activation checkpointing is predicted to be as fast.
        swap_fraction, qkv, num_swapped, num_input_only, num_kept: the plan (see `SwapPlan`).
        device_peak_bytes: of one device; `device_peak_by_part` says of what, `device_peak_moment` when.
        device_budget_bytes, host_budget_bytes_per_node: what there is of both memories.
        host_bytes_per_rank, host_bytes_per_node: swapped activations, and offloaded weights and optimizer.
        step_seconds, exposed_seconds: of a step, and of it waiting for copies.
        tokens_per_second, mfu: of the whole run; `mfu_convention` says how FLOPs are counted.
        binding_limit: in words, what keeps the step from being shorter, or the run from fitting.
        advice: what to change where it does not fit.
    """

    fits: bool
    strategy: str
    swap_fraction: float
    qkv: str
    num_swapped: int
    num_input_only: int
    num_kept: int
    device_peak_bytes: int
    device_peak_by_part: dict[str, int]
    device_peak_moment: str
    device_budget_bytes: int
    host_bytes_per_rank: int
    host_bytes_per_node: int
    host_budget_bytes_per_node: int
    step_seconds: float
    exposed_seconds: float
    tokens_per_second: float
    mfu: float
    mfu_convention: str
    binding_limit: str
    advice: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Plain values, as `--json` prints them."""
        return dataclasses.asdict(self)


def layer_costs(setup: Setup) -> list[LayerCosts]:
    """What the planner needs to know of each kind of layer."""
    costs = []
    for kind in setup.kinds:
        of, time = layer_bytes(setup, kind), layer_seconds(setup, kind)
        costs.append(
            LayerCosts(
                name=kind.name,
                num_layers=kind.num_layers,
                num_kept=kind.num_kept,
                project_forward_seconds=time.project_forward,
                attend_forward_seconds=time.attend_forward,
                finish_forward_seconds=time.finish_forward,
                project_backward_seconds=time.project_backward,
                attend_backward_seconds=time.attend_backward,
                finish_backward_seconds=time.finish_backward,
                input_bytes=of.input,
                output_bytes=of.output + of.logsumexp,
                qkv_bytes=of.qkv,
                others_bytes=of.others,
                device_peaks=tuple(moment.as_peak(setup) for moment in layer_moments(setup, kind)),
            )
        )
    return costs


def budgets(setup: Setup) -> Budgets:
    """What one rank may use for activations on the host, and in all on the device."""
    rate = setup.device.link_bytes_per_second
    return Budgets(
        host_bytes=max(0.0, setup.node_host_bytes / setup.local_ranks - host_state_bytes(setup)),
        device_bytes=setup.device.budget_bytes,
        to_host_bytes_per_second=rate,
        to_device_bytes_per_second=rate,
    )


def fits(setup: Setup) -> bool:
    """Whether any plan fits both memories, activation checkpointing included."""
    if _host_shortage(setup):
        return False
    return any(
        is_feasible(layer_costs(way), budgets(way), swap_fraction=setup.set_fraction, qkv=setup.qkv)
        for way in _ways(setup)
    ) or (setup.set_fraction is None and baseline(setup, CHECKPOINTING).fits)


def _ways(setup: Setup) -> tuple[Setup, ...]:
    """`setup`, and `setup` without layers that stay on the device."""
    return (setup, setup.replace(num_kept=0)) if setup.num_kept else (setup,)


def _host_shortage(setup: Setup) -> str | None:
    """Where the host does not even hold what is offloaded, what it is short of."""
    needed, there = host_state_bytes(setup), setup.node_host_bytes / setup.local_ranks
    if needed <= there:
        return None
    return (
        f"host memory: offloaded weights and optimizer alone need {format_bytes(needed)} a rank, has"
        f" {format_bytes(there)}"
    )


def forecast_setup(setup: Setup, advise=None) -> Forecast:
    """The forecast of `setup`.

    Args:
        advise: called with a setup that does not fit; returns sentences on what to change.
    """
    ways, limits = [layer_costs(way) for way in _ways(setup)], budgets(setup)
    stock, short = baseline(setup, CHECKPOINTING), _host_shortage(setup)
    options = {
        "rest_seconds": rest_seconds(setup),
        "swap_fraction": setup.set_fraction,
        "qkv": setup.qkv,
        "checkpoint_device_bytes": None if short else stock.device_peak_bytes,
    }
    try:
        if short:
            raise HostMemoryError(short)
        plan = solve_swap_plan(
            ways[0], limits, without_kept=ways[-1], checkpoint_step_seconds=stock.step_seconds, **options
        )
        advice = None
    except (HostMemoryError, DeviceMemoryError):
        plan = least_plan(*ways, budgets=limits, **options)
        plan = dataclasses.replace(plan, binding_limit=short or plan.binding_limit)
        advice = tuple(advise(setup)) if advise else ()
    if plan.strategy == "memo" and not plan.num_kept:
        setup = _ways(setup)[-1]
    return _forecast(setup, plan, stock, advice is None, advice or ())


def _forecast(setup: Setup, plan: SwapPlan, stock: BaselineForecast, fits: bool, advice) -> Forecast:
    if plan.strategy == "checkpoint":
        moment, parts = "activation checkpointing", stock.device_peak_by_part
    else:
        moment, parts = _peak_parts(setup, plan)
    parts = {name: round(value) for name, value in parts.items() if round(value)}
    host = plan.host_bytes + host_state_bytes(setup)
    limit = plan.binding_limit
    if fits and setup.is_one_memory and setup.swap_fraction is None:
        limit = "the CPU, where fraction 0 takes the least memory unless --device-memory sets a limit"
        if plan.num_input_only or plan.qkv != (setup.qkv or "swap"):
            limit = HOST_IS_SHORT
    return Forecast(
        fits=fits,
        strategy=plan.strategy,
        swap_fraction=plan.swap_fraction,
        qkv=plan.qkv,
        num_swapped=plan.num_swapped,
        num_input_only=plan.num_input_only,
        num_kept=plan.num_kept,
        device_peak_bytes=sum(parts.values()),
        device_peak_by_part=parts,
        device_peak_moment=moment,
        device_budget_bytes=round(setup.device.budget_bytes),
        host_bytes_per_rank=round(host),
        host_bytes_per_node=round(host * setup.local_ranks),
        host_budget_bytes_per_node=round(setup.node_host_bytes),
        step_seconds=plan.step_seconds,
        exposed_seconds=plan.exposed_seconds,
        tokens_per_second=setup.batch * setup.seq_len * (setup.gpus // setup.sequence_parallel) / plan.step_seconds,
        mfu=mfu(setup, plan.step_seconds),
        mfu_convention=MFU_CONVENTION,
        binding_limit=limit,
        advice=advice,
    )


def _peak_parts(setup: Setup, plan: SwapPlan) -> tuple[str, dict[str, float]]:
    """When the device holds the most under `plan`, and what it holds then, by part."""
    worst: tuple[float, str, dict] = (-1.0, "", {})
    for kind, chosen in zip(setup.kinds, plan.kinds, strict=True):
        present = [(plan.qkv, chosen.swap_fraction)] if chosen.num_swapped else []
        present += [("input", 0.0)] if chosen.num_input_only else []
        present += [(plan.qkv, chosen.kept_fraction)] if chosen.num_kept else []
        for moment in layer_moments(setup, kind):
            for treatment, fraction in present:
                if moment.treatment != treatment:
                    continue
                parts = {**moment.static(setup), **moment.at(fraction)}
                worst = max(worst, (sum(parts.values()), moment.when, parts), key=lambda found: found[0])
    return worst[1], worst[2]
