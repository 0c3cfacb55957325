"""Bytes of a run, on the device moment by moment and on the host. Called by `forecast` and `baselines`.

A `Moment` is a point of the step at which the device may hold the most; its parts have names, so that a peak says what
it is made of. What a layer holds follows the engine: project and finish go chunk by chunk, attention over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.forecasting.activations import TokenBytes, token_bytes
from memo_hf.forecasting.setup import OPTIMIZERS, Setup
from memo_hf.forecasting.shapes import LayerKind
from memo_hf.planner.layer_costs import DevicePeak

_FP32 = 4
# Tokens of the loss that have logits at once, and bytes per logit: 16-bit, fp32, its log-softmax and its gradient.
LOSS_CHUNK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes held at one point: `parts` whatever the fraction, `per_fraction` at fraction 1, both by name.

    `has_gradients` is False before backward, unless gradients are accumulated over several passes.
    """

    when: str
    treatment: str
    parts: dict[str, float]
    per_fraction: dict[str, float]
    has_gradients: bool = True

    def at(self, fraction: float) -> dict[str, float]:
        """Bytes by part at a swap fraction."""
        names = [*self.parts, *(name for name in self.per_fraction if name not in self.parts)]
        return {n: self.parts.get(n, 0.0) + fraction * self.per_fraction.get(n, 0.0) for n in names}

    def as_peak(self, setup: Setup) -> DevicePeak:
        """For the planner: all that the device holds at this moment."""
        return DevicePeak(
            when=self.when,
            treatment=self.treatment,
            fixed_bytes=sum(static_parts(setup, self.has_gradients).values()) + sum(self.parts.values()),
            bytes_per_fraction=sum(self.per_fraction.values()),
        )


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
    workspace = 0.0
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


def layer_moments(setup: Setup, kind: LayerKind) -> list[Moment]:
    """The moments of layers of `kind` at which the device may hold the most, for every treatment."""
    return [
        moment
        for treatment in ("swap", "rebuild")
        for moment in (*_token_moments(setup, kind, treatment), _loss_moment(setup, treatment))
    ] + [whole_layer_moment(setup, kind, treatment="input", next_input=True)]


def _token_moments(setup: Setup, kind: LayerKind, treatment: str) -> list[Moment]:
    of = layer_bytes(setup, kind)
    e, chunk = setup.training.element_bytes, setup.chunk
    swapped = treatment == "swap"
    # The neighbouring layer, on its way: to the host in forward, back in backward (a rounding buffer in the paper).
    flight = of.input + of.output + of.logsumexp + (of.qkv if swapped else 0.0)
    fraction = of.others + (0.0 if swapped else of.qkv)
    transient = chunk * (of.tokens.finish + of.tokens.mlp_backward - of.tokens.mlp + 4 * of.tokens.input)
    projecting = chunk * (of.tokens.project + 2 * of.tokens.qkv + 2 * of.tokens.input)
    trained = setup.training.is_full
    sums = _FP32 if trained and chunk < setup.local_tokens else (e if trained else 0)
    active = {"in flight": fraction, "chunks": fraction}  # this layer's swapped tokens and the neighbour's
    forward = Moment(
        when="forward of a layer",
        treatment=treatment,
        parts={
            "h": 2 * of.input,
            "o": of.output + of.logsumexp,
            "q, k, v": of.qkv,
            "in flight": flight,
            "chunks": chunk * of.tokens.finish,
        },
        per_fraction=active,
        has_gradients=False,
    )
    finish = Moment(
        when="backward of finish",
        treatment=treatment,
        parts={
            "h": of.input,
            "o": of.output + of.logsumexp,
            "q, k, v": of.qkv if swapped else 0.0,
            "activation gradients": 2 * of.input + of.output,
            "in flight": flight,
            "chunks": transient,
            "gradient sums": sums * setup.model.finish_parameters(kind),
        },
        per_fraction=active,
    )
    attention = Moment(
        when="backward of attention",
        treatment=treatment,
        parts={
            "h": of.input,
            "o": of.output + of.logsumexp,
            "q, k, v": of.qkv,
            "activation gradients": of.input + of.output + of.qkv,
            "attention workspace": of.workspace,
            "in flight": flight,
        },
        per_fraction=active,
    )
    project = Moment(
        when="backward of project",
        treatment=treatment,
        parts={
            "h": of.input,
            "o": of.output + of.logsumexp,
            "q, k, v": of.qkv,
            "activation gradients": of.input + of.qkv,
            "in flight": flight,
            "chunks": projecting,
            "gradient sums": sums * setup.model.project_parameters(),
        },
        per_fraction=active,
    )
    return [forward, finish, attention, project]


def _loss_moment(setup: Setup, treatment: str) -> Moment:
    """Between forward and backward: the kept layers' activations, the last hidden states and the logits."""
    whole = others = 0.0
    for kind in setup.kinds:
        of = layer_bytes(setup, kind)
        whole += kind.num_kept * (of.input + of.output + of.logsumexp + of.qkv)
        others += kind.num_kept * of.others
    return Moment(
        when="loss",
        treatment=treatment,
        parts={"kept layers": whole, **loss_parts(setup)},
        per_fraction={"kept layers": others},
        has_gradients=False,
    )


def loss_parts(setup: Setup) -> dict[str, float]:
    """What the final norm, the head and the loss hold, layers apart."""
    model, e, tokens = setup.model, setup.training.element_bytes, setup.local_tokens
    hidden = tokens * model.hidden * e
    at_once = min(tokens, LOSS_CHUNK_TOKENS) if setup.chunked_loss else tokens
    logits = at_once * model.vocab * (e + 3 * _FP32)
    head = _FP32 * model.vocab * model.hidden if setup.training.is_full and setup.chunked_loss else 0
    # The last layer's output, the final norm's output and the gradient of that; the norm works in chunks.
    return {"loss": 3 * hidden + logits + head}


def whole_layer_moment(
    setup: Setup,
    kind: LayerKind,
    *,
    treatment: str,
    next_input: bool,
    tiled_mlp: bool = False,
    fused: bool = False,
    keeps_output: bool = False,
) -> Moment:
    """A layer that is recomputed whole in backward (layer mode and the peers): everything it saves exists at once.

    Args:
        next_input: the next layer's input is being fetched meanwhile.
        tiled_mlp: the MLP works in chunks (ALST).
        fused: Liger's norm and MLP, which save neither fp32 copies nor silu(gate).
        keeps_output: o is there already (selective checkpointing).
    """
    of = layer_bytes(setup, kind)
    per, tokens, e = of.tokens, setup.local_tokens, setup.training.element_bytes
    hidden = per.input
    project, mlp_backward = per.project, per.mlp_backward
    norm = per.finish - per.mlp
    if fused:
        width = setup.model.intermediate * e
        project = hidden if setup.training.is_full else 0
        norm = hidden
        mlp_backward = hidden + 4 * width
    at_work = setup.chunk if tiled_mlp else tokens
    # A tiled MLP keeps its input and sums the gradient of it.
    tiled = 2 * hidden * tokens if tiled_mlp else 0
    base = {"h": of.input, "q, k, v": of.qkv, "o": of.output + of.logsumexp}
    in_mlp = {
        **base,
        "activation gradients": of.input,
        "layer recompute": tokens * (project + norm) + at_work * mlp_backward + tiled,
    }
    in_attention = {
        **base,
        "activation gradients": of.input + of.output + of.qkv,
        "layer recompute": tokens * project,
        "attention workspace": of.workspace,
    }
    worst = max((in_mlp, in_attention), key=lambda parts: sum(parts.values()))
    if keeps_output:
        worst = {**worst, "o": 0.0}
    worst["in flight"] = of.input if next_input else 0.0
    return Moment(when="backward of a layer recomputed whole", treatment=treatment, parts=worst, per_fraction={})
