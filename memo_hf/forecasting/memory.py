"""Bytes of a run whatever the moment: states, and what one layer makes. Called by `moments`, `speed` and `forecast`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memo_hf.forecasting.activations import TokenBytes, token_bytes
from memo_hf.forecasting.setup import OPTIMIZERS, Setup
from memo_hf.forecasting.shapes import LayerKind

_FP32 = 4


def static_parts(setup: Setup, has_gradients: bool = True) -> dict[str, float]:
    """Device bytes that do not grow with the sequence: weights, gathered weights, gradients, optimizer."""
    model, e = setup.model, setup.training.element_bytes
    trained = _trained_parameters(setup)
    element = e if setup.training.is_full else setup.training.adapter_bytes
    weights = e * model.num_parameters + (0 if setup.training.is_full else element * trained)
    gathered = 0.0
    if setup.shards > 1 or setup.weights_device == "host":
        # The layer at work and the next one, and what the root module owns: embedding and head.
        layer = max(model.layer_parameters(kind) for kind in model.kinds(0))
        head = 0 if model.tied else model.vocab * model.hidden
        gathered = e * (2 * layer + model.embedding_parameters + head)
    gradients = element * trained / setup.shards if has_gradients or setup.accumulates else 0.0
    optimizer = _optimizer_bytes(setup) / setup.shards
    on_device = setup.weights_device == "device"
    return {
        "weights": weights / setup.shards if on_device else 0.0,
        "gathered weights": gathered,
        # Offloaded weights take their gradients with them, layer by layer.
        "gradients": gradients
        if on_device
        else element * max(0, trained and model.layer_parameters(model.kinds(0)[-1])),
        "optimizer": optimizer if setup.optimizer_device == "device" else 0.0,
    }


def late_gradient_bytes(setup: Setup) -> float:
    """Of the gradients in `static_parts`, those that come when all layers are through backward: the embedding's."""
    late = setup.training.is_full and not setup.model.tied and not setup.accumulates
    if not late or setup.weights_device == "host":
        return 0.0
    return setup.training.element_bytes * setup.model.embedding_parameters / setup.shards


def host_state_bytes(setup: Setup) -> float:
    """Host bytes per rank of offloaded weights, gradients and optimizer."""
    trained, e = _trained_parameters(setup), setup.training.element_bytes
    total = 0.0
    if setup.optimizer_device == "host":
        total += _optimizer_bytes(setup) + _FP32 * trained
    if setup.weights_device == "host":
        total += e * setup.model.num_parameters
    return total / setup.shards


def _trained_parameters(setup: Setup) -> int:
    return setup.model.num_parameters if setup.training.is_full else setup.adapter_parameters


def _optimizer_bytes(setup: Setup) -> float:
    narrow = setup.training.is_full and setup.training.element_bytes < _FP32
    if narrow and not setup.master_weights:
        # torch's optimizers keep their state in the type of the weights.
        return _trained_parameters(setup) * OPTIMIZERS[setup.optimizer] * setup.training.element_bytes / _FP32
    return _trained_parameters(setup) * (OPTIMIZERS[setup.optimizer] + (_FP32 if narrow else 0))


def kv_copies(setup: Setup) -> float:
    """How many ranks of a sequence hold each key and value head: several where there are fewer heads than ranks."""
    return max(1.0, setup.sequence_parallel / setup.model.kv_heads)


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank: `TokenBytes` times tokens, and what an attention kernel needs besides."""

    input: float
    output: float
    logsumexp: float
    query: float
    key_value: float
    project: float
    finish: float
    workspace: float
    tokens: TokenBytes

    @property
    def qkv(self) -> float:
        return self.query + self.key_value

    @property
    def others(self) -> float:
        return self.project + self.finish


def layer_bytes(setup: Setup, kind: LayerKind) -> LayerBytes:
    """Bytes of a layer of `kind` for this rank's share of the batch."""
    per_token = token_bytes(setup.model, kind, setup.training)
    tokens = setup.local_tokens
    if setup.batch > 1 and setup.chunk < tokens and (setup.training.is_full or "o_proj" in setup.training.lora_targets):
        # A chunk's rows of o are not one run of memory, so o_proj makes a copy and saves that.
        per_token = dataclasses.replace(per_token, finish=per_token.finish + per_token.output)
    workspace = tokens * per_token.query  # the CPU's kernel lays the gradient of o out anew
    if setup.device.flash_workspace:
        workspace = tokens * setup.model.query_width * _FP32
        if setup.model.kv_heads < setup.model.heads:
            workspace += 2 * tokens * per_token.query
    return LayerBytes(
        input=tokens * per_token.input,
        output=tokens * per_token.output,
        logsumexp=tokens * per_token.logsumexp,
        query=tokens * per_token.query,
        key_value=tokens * per_token.key_value * kv_copies(setup),
        project=tokens * per_token.project,
        finish=tokens * per_token.finish,
        workspace=workspace,
        tokens=per_token,
    )
