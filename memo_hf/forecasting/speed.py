"""Seconds of a run, from counted operations and a device's achieved rates. Called by `forecast` and `baselines`.

FLOPs are counted as two per multiply-add. Causal attention counts half of the square, and its backward two and a half
times its forward (the kernel computes the scores again), of which the MFU counts two.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.forecasting.hardware import Device
from memo_hf.forecasting.memory import layer_bytes
from memo_hf.forecasting.setup import OPTIMIZERS, Setup
from memo_hf.forecasting.shapes import LayerKind

MFU_CONVENTION = (
    "model FLOPs only: 6 per token and parameter of the matrices with the head (4 where frozen), causal attention"
    " counted half (6 * layers * width * length per token), no recompute; over the dense peak of all devices"
)
# Element-wise kernels: bytes moved per byte that a layer saves, reading what the last one wrote.
_PASSES = 3.0
# Parameters per second and node that an optimizer on the host updates.
_HOST_UPDATES = 2e9


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer's parts on one rank; backward without recompute."""

    project_forward: float
    attend_forward: float
    finish_forward: float
    project_backward: float
    attend_backward: float
    finish_backward: float


def attention_flops(setup: Setup, kind: LayerKind) -> float:
    """Of one rank, one layer, forward: causal, within the window."""
    window = min(kind.window or setup.seq_len, setup.seq_len)
    pairs = setup.seq_len * window - window * window / 2
    return 4.0 * setup.batch * pairs * setup.model.query_width / setup.sequence_parallel


def layer_seconds(setup: Setup, kind: LayerKind, *, chunked: bool = True) -> LayerSeconds:
    """Predicted seconds of a layer of `kind`; `chunked` counts what launching chunks takes at least."""
    device, model, tokens = setup.device, setup.model, setup.local_tokens
    of = layer_bytes(setup, kind)
    gemm = device.flops * device.gemm_efficiency
    project = 2.0 * tokens * model.project_macs() / gemm
    finish = 2.0 * tokens * model.finish_macs(kind) / gemm
    move_project = _PASSES * (of.project + of.qkv + of.input) / device.memory_bytes_per_second
    move_finish = _PASSES * (of.finish + of.input) / device.memory_bytes_per_second
    weight_gradient = 2.0 if setup.training.is_full else 1.0  # frozen matrices have no gradient of their own
    flops = attention_flops(setup, kind)
    exchange = _exchange_seconds(setup, of)
    fetch = _weights_seconds(setup, kind)
    # By the share of a chunk: were the last one counted whole, the step would jump at each multiple of the chunk by
    # more than swapping gains at short lengths, and the choice of a strategy would go back and forth there.
    least = setup.device.chunk_seconds * tokens / setup.chunk if chunked else 0.0
    project_forward, finish_forward = max(least, project + move_project), max(least, finish + move_finish)
    attend_forward = flops / (device.flops * device.attention_forward_efficiency) + exchange
    attend_backward = 2.5 * flops / (device.flops * device.attention_backward_efficiency) + 2 * exchange
    project_backward = max(least, weight_gradient * project + 2 * move_project)
    finish_backward = max(least, weight_gradient * finish + 2 * move_finish)
    # Weights and gradients travel beside the computation; what it does not hide is waited for.
    late_forward = max(0.0, fetch - project_forward - attend_forward - finish_forward)
    in_backward = fetch + _gradients_seconds(setup, kind)
    late_backward = max(0.0, in_backward - project_backward - attend_backward - finish_backward)
    return LayerSeconds(
        project_forward=project_forward,
        attend_forward=attend_forward + late_forward,
        finish_forward=finish_forward,
        project_backward=project_backward,
        attend_backward=attend_backward + late_backward,
        finish_backward=finish_backward,
    )


def _exchange_seconds(setup: Setup, of) -> float:
    """Ulysses: q, k, v to the ranks of their heads, o back to those of its tokens."""
    ranks = setup.sequence_parallel
    return (of.qkv + of.output) * (ranks - 1) / ranks / setup.rate_among(ranks)


def _weights_seconds(setup: Setup, kind: LayerKind) -> float:
    """Fetching one layer's sharded or offloaded weights."""
    size = setup.training.element_bytes * setup.model.layer_parameters(kind)
    seconds = size * (setup.shards - 1) / setup.shards / setup.rate_among(setup.shards)
    if setup.weights_device == "host":
        seconds += size / setup.shards / setup.device.link_bytes_per_second
    return seconds


def _gradients_seconds(setup: Setup, kind: LayerKind) -> float:
    """Summing one layer's gradients: to the rank that has the shard, then among those that have the same shard."""
    size = setup.training.element_bytes * setup.model.layer_parameters(kind)
    if not setup.training.is_full:
        size = setup.training.adapter_bytes * setup.adapter_parameters / setup.model.num_layers
    shards, copies = setup.shards, setup.gpus // setup.shards
    seconds = size * (shards - 1) / shards / setup.rate_among(shards)
    return seconds + 2 * size / shards * (copies - 1) / copies / setup.rate_among(setup.gpus)


def rest_seconds(setup: Setup) -> float:
    """Seconds of a step outside the decoder layers: head and loss, optimizer, their copies."""
    device, model = setup.device, setup.model
    head = 2.0 * setup.local_tokens * model.vocab * model.hidden
    passes = 3.0 if setup.training.is_full else 2.0
    loss = passes * head / (device.flops * device.gemm_efficiency)
    logits = setup.local_tokens * model.vocab * (setup.training.element_bytes + 12)
    loss += _PASSES * logits / device.memory_bytes_per_second
    trained = model.num_parameters if setup.training.is_full else setup.adapter_parameters
    mine = trained / setup.shards
    if setup.optimizer_device == "host":
        copies = 2 * setup.training.element_bytes * mine / device.link_bytes_per_second
        return loss + copies + mine * setup.local_ranks / _HOST_UPDATES
    return loss + 2 * mine * (OPTIMIZERS[setup.optimizer] + 8) / device.memory_bytes_per_second


def model_flops(setup: Setup) -> float:
    """FLOPs of a step of one data-parallel group by `MFU_CONVENTION`."""
    model = setup.model
    tokens = setup.batch * setup.seq_len
    per_parameter = 6.0 if setup.training.is_full else 4.0
    macs = model.vocab * model.hidden
    attention = 0.0
    for kind in model.kinds(0):
        macs += kind.num_layers * (model.project_macs() + model.finish_macs(kind))
        attention += kind.num_layers * 3 * attention_flops(setup, kind) * setup.sequence_parallel
    return per_parameter * tokens * macs + attention


def mfu(setup: Setup, step_seconds: float) -> float:
    """Model FLOPs utilisation by `MFU_CONVENTION`."""
    return model_flops(setup) / setup.sequence_parallel / setup.device.flops / step_seconds


def calibrate(setup: Setup, measured: LayerSeconds) -> Device:
    """The device of `setup` with its rates set so that a layer of the first kind takes what was measured.

    One factor for project and finish, forward and backward together, and one for each direction of attention.

    Args:
        setup: of the run that was measured; another length may then be forecast with the device returned.
        measured: seconds of one layer's parts, backward without recompute.
    """
    device = setup.device
    predicted = layer_seconds(setup, setup.model.kinds(0)[0], chunked=False)

    def total(seconds: LayerSeconds) -> float:
        return seconds.project_forward + seconds.finish_forward + seconds.project_backward + seconds.finish_backward

    tokens = total(predicted) / total(measured)
    return device.with_rates(
        gemm_efficiency=device.gemm_efficiency * tokens,
        memory_bytes_per_second=device.memory_bytes_per_second * tokens,
        attention_forward_efficiency=device.attention_forward_efficiency
        * (predicted.attend_forward / measured.attend_forward),
        attention_backward_efficiency=device.attention_backward_efficiency
        * (predicted.attend_backward / measured.attend_backward),
        chunk_seconds=0.0,
    )
