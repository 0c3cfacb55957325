"""What a user would otherwise pick, forecast by the same bytes and seconds. Called by `forecast` and `compare`."""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.forecasting.memory import host_state_bytes, layer_bytes, static_parts
from memo_hf.forecasting.moments import loss_parts, whole_layer_moment
from memo_hf.forecasting.setup import Setup
from memo_hf.forecasting.shapes import LayerKind
from memo_hf.forecasting.speed import layer_seconds, mfu, rest_seconds


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a peer treats the layers.

    Attributes:
        offloads: layer inputs go to the host, with copies on the compute stream.
        keeps_output: attention outputs stay on the device and attention is not recomputed.
        tiled_mlp: the MLP works in chunks.
        fused: Liger's kernels.
        reentrant: torch's reentrant checkpoint, which holds the recomputed output while it runs backward.
        keeps_all: everything that backward needs stays on the device and nothing is recomputed.
    """

    name: str
    offloads: bool = False
    keeps_output: bool = False
    tiled_mlp: bool = False
    fused: bool = False
    reentrant: bool = False
    keeps_all: bool = False


PLAIN = Strategy(name="plain training", keeps_all=True)
CHECKPOINTING = Strategy(name="activation checkpointing")
OFFLOAD = Strategy(name="activation checkpointing, offloaded", offloads=True)
SELECTIVE = Strategy(name="selective checkpointing (attention kept)", keeps_output=True)
ALST = Strategy(name="tiled MLP with offload (ALST)", offloads=True, tiled_mlp=True, fused=True, reentrant=True)
STRATEGIES = (CHECKPOINTING, OFFLOAD, SELECTIVE, ALST)


@dataclass(frozen=True, kw_only=True)
class BaselineForecast:
    """A strategy's forecast; bytes and seconds of one rank."""

    name: str
    fits: bool
    device_peak_bytes: float
    device_peak_by_part: dict[str, float]
    host_bytes: float
    step_seconds: float
    mfu: float


def baseline(setup: Setup, strategy: Strategy) -> BaselineForecast:
    """Forecast `setup` under `strategy`."""
    kinds = setup.model.kinds(0)
    waiting = {"h of waiting layers": 0.0, "o of waiting layers": 0.0, "other activations": 0.0}
    host, seconds = 0.0, rest_seconds(setup)
    for kind in kinds:
        of, time = layer_bytes(setup, kind), layer_seconds(setup, kind, chunked=False)
        forward = time.project_forward + time.attend_forward + time.finish_forward
        again = 0.0 if strategy.keeps_all else forward - (time.attend_forward if strategy.keeps_output else 0.0)
        backward = time.project_backward + time.attend_backward + time.finish_backward
        seconds += kind.num_layers * (forward + again + backward)
        if strategy.offloads:
            host += kind.num_layers * of.input
            seconds += kind.num_layers * 2 * of.input / setup.device.link_bytes_per_second
        else:
            waiting["h of waiting layers"] += kind.num_layers * of.input
        if strategy.keeps_output or strategy.keeps_all:
            waiting["o of waiting layers"] += kind.num_layers * (of.output + of.logsumexp)
        if strategy.keeps_all:
            waiting["other activations"] += kind.num_layers * (of.qkv + of.others)
    # The inputs of all layers wait when backward begins and there are no gradients yet; at its end it is the reverse.
    before = {**static_parts(setup, False), **waiting}
    moments = [{**before, **loss_parts(setup)}, static_parts(setup)]
    for kind in kinds:
        moments += _kept_moments(setup, kind, before) if strategy.keeps_all else _moments(setup, kind, strategy, before)
    parts = max(moments, key=lambda m: sum(m.values()))
    peak = sum(parts.values())
    host_budget = setup.node_host_bytes / setup.local_ranks - host_state_bytes(setup)
    return BaselineForecast(
        name=strategy.name,
        fits=peak <= setup.device.budget_bytes and host <= host_budget,
        device_peak_bytes=peak,
        device_peak_by_part=parts,
        host_bytes=host,
        step_seconds=seconds,
        mfu=mfu(setup, seconds),
    )


def _moments(setup: Setup, kind: LayerKind, strategy: Strategy, before: dict[str, float]) -> list[dict[str, float]]:
    """Backward of a layer that is recomputed whole, as the first to run backward and as the last."""
    found = whole_layer_moment(
        setup,
        kind,
        treatment="input",
        next_input=False,
        tiled_mlp=strategy.tiled_mlp,
        fused=strategy.fused,
        keeps_output=strategy.keeps_output,
    )
    moment = found.parts
    if strategy.reentrant:
        moment = {**moment, "recomputed output": layer_bytes(setup, kind).input}
    # Without offload the layer at work has its input among those that wait.
    first = {**before, **moment, "h": moment["h"] if strategy.offloads else 0.0}
    return [first, {**found.static(setup), **moment}]


def _kept_moments(setup: Setup, kind: LayerKind, before: dict[str, float]) -> list[dict[str, float]]:
    """Backward of the last layer where nothing is recomputed: what all layers saved, and its gradients beside it."""
    of, tokens = layer_bytes(setup, kind), setup.local_tokens
    in_mlp = of.input + tokens * (of.tokens.mlp_backward - of.tokens.mlp)
    in_attention = of.input + of.output + of.qkv + of.workspace - of.finish  # finish's are gone by then
    return [{**before, "activation gradients": max(in_mlp, in_attention)}]
