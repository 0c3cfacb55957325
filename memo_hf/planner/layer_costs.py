"""What one layer costs, what may be spent, and the step that follows from a choice. Plain numbers; no solver, no model.

The profiler (measured) and the forecast (predicted) fill in `LayerCosts`; `swap_fraction` chooses; `predict` prices a
choice. All bytes and seconds are those of one rank and one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memo_hf.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """A moment of the step at which the device holds the most: `fixed_bytes + swap_fraction * bytes_per_fraction`.

    `when` names it for people; `treatment` says which layers reach it: "swap" or "rebuild" (swapped whole, by what
    becomes of q, k, v) or "input" (only the layer input is swapped).
    """

    when: str
    treatment: str
    fixed_bytes: float
    bytes_per_fraction: float = 0.0

    def bytes_at(self, fraction: float) -> float:
        return self.fixed_bytes + fraction * self.bytes_per_fraction


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """One kind of decoder layer.

    Attributes:
        num_layers: layers of this kind, the kept ones among them.
        num_kept: the last layers, whose activations stay on the device (the paper's last two, section 4.1).
        token_wise: False where only layer mode is possible: such a layer swaps its input and is recomputed whole.
        project_forward_seconds .. finish_backward_seconds: one layer's time; backward without any recompute.
        input_bytes: h, the layer input.
        output_bytes: o and its logsumexp.
        qkv_bytes: q, k and v.
        others_bytes: every other skeletal activation of project and finish.
        device_peaks: what the device holds at worst; empty where the device is no limit.
    """

    name: str = "layer"
    num_layers: int
    num_kept: int = 0
    token_wise: bool = True
    project_forward_seconds: float
    attend_forward_seconds: float
    finish_forward_seconds: float
    project_backward_seconds: float
    attend_backward_seconds: float
    finish_backward_seconds: float
    input_bytes: float
    output_bytes: float
    qkv_bytes: float
    others_bytes: float
    device_peaks: tuple[DevicePeak, ...] = ()

    def __post_init__(self):
        for field, value in vars(self).items():
            if isinstance(value, (int, float)) and not (value >= 0 and math.isfinite(value)):
                raise PlanError(f"layer kind {self.name!r}: {field} is {value!r}; it must be finite and at least 0")
        if self.num_kept > self.num_layers:
            raise PlanError(f"layer kind {self.name!r}: {self.num_kept} kept layers of only {self.num_layers}")

    @property
    def num_movable(self) -> int:
        return self.num_layers - self.num_kept

    @property
    def forward_seconds(self) -> float:
        return self.project_forward_seconds + self.attend_forward_seconds + self.finish_forward_seconds

    @property
    def backward_seconds(self) -> float:
        return self.project_backward_seconds + self.attend_backward_seconds + self.finish_backward_seconds

    @property
    def recompute_seconds(self) -> float:
        """Running project and finish once more for every token."""
        return self.project_forward_seconds + self.finish_forward_seconds

    def whole_bytes(self, qkv: str) -> float:
        """Bytes that a swapped layer sends whatever the fraction."""
        return self.input_bytes + self.output_bytes + (self.qkv_bytes if qkv == "swap" else 0.0)

    def fraction_bytes(self, qkv: str) -> float:
        """Bytes that a swapped layer sends at fraction 1 beyond `whole_bytes`: with qkv="rebuild" the q, k, v of the
        swapped tokens are among them, as in the paper, and only those of the other tokens are rebuilt."""
        return self.others_bytes + (0.0 if qkv == "swap" else self.qkv_bytes)

    def extra_seconds(self, qkv: str) -> float:
        """Backward's recompute at fraction 0: project and finish, and project once more to rebuild q, k, v."""
        return self.recompute_seconds + (0.0 if qkv == "swap" else self.project_forward_seconds)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What one rank may use: host bytes for activations, device bytes in all, and the link's bytes per second each way,
    as measured or assumed while every rank of the node copies. Infinity means no limit."""

    host_bytes: float
    device_bytes: float = math.inf
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class KindPlan:
    """What is done with the layers of one kind.

    `num_swapped` layers send h, o (and q, k, v) whole and `swap_fraction` of the tokens' other activations;
    `num_input_only` send h alone and are recomputed whole, attention included; `num_kept` stay on the device.
    """

    name: str
    num_swapped: int
    num_input_only: int
    num_kept: int
    swap_fraction: float

    @property
    def kept_fraction(self) -> float:
        """Fraction of the kept layers' tokens that is not recomputed: the mean over the layers that move."""
        movable = self.num_swapped + self.num_input_only
        return self.swap_fraction * self.num_swapped / movable if movable else self.swap_fraction


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a choice costs: seconds of a step, of them the seconds in which compute waits for copies, and bytes."""

    step_seconds: float
    forward_exposed_seconds: float
    backward_exposed_seconds: float
    host_bytes: float
    device_bytes: float
    device_peak: str


def predict(layers, budgets: Budgets, qkv: str, kinds, rest_seconds: float = 0.0) -> Prediction:
    """Price a choice by the rules the plan is made by.

    Args:
        layers: sequence of `LayerCosts`.
        budgets: only the link's two rates are read.
        qkv: "swap" or "rebuild".
        kinds: one `KindPlan` for each of `layers`.
        rest_seconds: of the step outside the decoder layers.
    """
    seconds, forward_exposed, backward_exposed, host, peak = rest_seconds, 0.0, 0.0, 0.0, (0.0, "")
    for costs, plan in zip(layers, kinds, strict=True):
        sent = costs.whole_bytes(qkv) + plan.swap_fraction * costs.fraction_bytes(qkv)
        again = (1 - plan.swap_fraction) * costs.extra_seconds(qkv)
        groups = [
            (plan.num_swapped, sent, again, qkv, plan.swap_fraction),
            (plan.num_input_only, costs.input_bytes, costs.forward_seconds, "input", 0.0),
            (plan.num_kept, 0.0, kept_recompute_seconds(costs, plan.kept_fraction), qkv, plan.kept_fraction),
        ]
        for number, group_bytes, recompute, treatment, fraction in groups:
            if not number:
                continue
            forward, backward = costs.forward_seconds, costs.backward_seconds + recompute
            wait_forward = max(0.0, group_bytes / budgets.to_host_bytes_per_second - forward)
            wait_backward = max(0.0, group_bytes / budgets.to_device_bytes_per_second - backward)
            seconds += number * (forward + backward + wait_forward + wait_backward)
            forward_exposed += number * wait_forward
            backward_exposed += number * wait_backward
            host += number * group_bytes
            treatment = treatment if costs.token_wise else "input"
            for moment in costs.device_peaks:
                if moment.treatment == treatment:
                    peak = max(peak, (moment.bytes_at(fraction), moment.when))
    return Prediction(
        step_seconds=seconds,
        forward_exposed_seconds=forward_exposed,
        backward_exposed_seconds=backward_exposed,
        host_bytes=host,
        device_bytes=peak[0],
        device_peak=peak[1],
    )


def estimated_peaks(layers, held_bytes: float, chunk_share: float) -> tuple[DevicePeak, ...]:
    """What the device holds at worst, from the layers' bytes alone: for a model that no forecast describes.

    The loss is not in it.

    Args:
        layers: sequence of `LayerCosts`.
        held_bytes: whatever the shape, a layer's sums of gradients among it.
        chunk_share: of all tokens, those of one chunk.
    """
    peaks = [
        DevicePeak(
            when="backward of the last layer",
            treatment=treatment,
            fixed_bytes=held_bytes
            + sum(c.num_kept * c.whole_bytes("swap") for c in layers)
            + max(_at_work(c, chunk_share) for c in layers),
            bytes_per_fraction=sum(c.num_kept * c.others_bytes for c in layers),
        )
        for treatment in ("swap", "rebuild")
    ]
    for c in layers:
        # This layer is on the device, and the one before it on its way back.
        for qkv, rebuilt in (("swap", 0.0), ("rebuild", c.qkv_bytes)):
            fixed = held_bytes + 2 * c.whole_bytes(qkv) + rebuilt + _at_work(c, chunk_share)
            per_fraction = 2 * c.fraction_bytes(qkv)
            peaks.append(
                DevicePeak(
                    when="backward of a layer", treatment=qkv, fixed_bytes=fixed, bytes_per_fraction=per_fraction
                )
            )
        whole = held_bytes + c.input_bytes + c.whole_bytes("swap") + c.others_bytes + _at_work(c, chunk_share)
        peaks.append(DevicePeak(when="backward of a layer recomputed whole", treatment="input", fixed_bytes=whole))
    return tuple(dict.fromkeys(peaks))


def _at_work(costs: LayerCosts, chunk_share: float) -> float:
    """The gradients of a layer's input, o, q, k, v, as much again within attention's backward, and those of a chunk."""
    whole = 2 * costs.input_bytes + costs.output_bytes + 2 * costs.qkv_bytes
    return whole + 2 * chunk_share * costs.others_bytes


def kept_recompute_seconds(costs: LayerCosts, fraction: float) -> float:
    """Backward's recompute of a kept layer, which has its q, k, v at hand; of all of it where it is not token-wise."""
    return (1 - fraction) * costs.recompute_seconds if costs.token_wise else costs.forward_seconds


def checkpoint_seconds(layers, rest_seconds: float = 0.0) -> float:
    """Seconds of a step of stock activation checkpointing: every layer's forward runs twice, nothing is copied."""
    return rest_seconds + sum(c.num_layers * (2 * c.forward_seconds + c.backward_seconds) for c in layers)
