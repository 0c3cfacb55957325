"""The moments of a step at which the device may hold the most, part by part. Called by `forecast` and `baselines`.

What a layer holds follows the engine: project and finish go chunk by chunk, swapped chunks first, attention over all
tokens; a swapped chunk's activations are gone once its backward has used them.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.forecasting.memory import late_gradient_bytes, layer_bytes, static_parts
from memo_hf.forecasting.setup import Setup
from memo_hf.forecasting.shapes import LayerKind
from memo_hf.planner.chunks import default_loss_chunk_tokens
from memo_hf.planner.layer_costs import DevicePeak

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes held at one point: `parts` whatever the fraction, `per_fraction` at fraction 1, both by name.

    `has_gradients` is False before backward, unless gradients are accumulated over several passes. Of the gradients,
    `late_gradients` are still to come.
    """

    when: str
    treatment: str
    parts: dict[str, float]
    per_fraction: dict[str, float]
    has_gradients: bool = True
    late_gradients: float = 0.0

    def at(self, fraction: float) -> dict[str, float]:
        """Bytes by part at a swap fraction."""
        names = [*self.parts, *(name for name in self.per_fraction if name not in self.parts)]
        return {n: self.parts.get(n, 0.0) + fraction * self.per_fraction.get(n, 0.0) for n in names}

    def static(self, setup: Setup) -> dict[str, float]:
        """What is there whatever the sequence, by part."""
        parts = static_parts(setup, self.has_gradients)
        return {**parts, "gradients": parts["gradients"] - self.late_gradients}

    def as_peak(self, setup: Setup) -> DevicePeak:
        """For the planner: all that the device holds at this moment."""
        return DevicePeak(
            when=self.when,
            treatment=self.treatment,
            fixed_bytes=sum(self.static(setup).values()) + sum(self.parts.values()),
            bytes_per_fraction=sum(self.per_fraction.values()),
        )


def layer_moments(setup: Setup, kind: LayerKind) -> list[Moment]:
    """The moments of layers of `kind` at which the device may hold the most, for every treatment."""
    return [
        moment
        for treatment in ("swap", "rebuild")
        for moment in (*_token_moments(setup, kind, treatment), _loss_moment(setup, treatment))
    ] + [
        whole_layer_moment(setup, kind, treatment="input", next_input=True),
        *(_embedding_moment(setup, kind, treatment) for treatment in ("swap", "rebuild", "input")),
    ]


def _token_moments(setup: Setup, kind: LayerKind, treatment: str) -> list[Moment]:
    of = layer_bytes(setup, kind)
    swapped, chunk = treatment == "swap", setup.chunk
    # What follows the fraction: all of it, and what is left once finish's backward is through.
    fraction = of.others + (0.0 if swapped else of.qkv)
    left = fraction - of.finish
    output, qkv = of.output + of.logsumexp, of.qkv if swapped else 0.0
    # Of a chunk, beyond what it saves: the MLP's gradients, or later the norm's in fp32, and the gradient of its input.
    gradient = chunk * (max(of.tokens.mlp_backward - of.tokens.mlp, 3 * of.tokens.input) + of.tokens.input)
    sums = 0
    if setup.training.is_full:
        sums = _FP32 if chunk < setup.local_tokens else setup.training.element_bytes
    # The first chunk, which is a swapped one if any is, has no sums beside it yet.
    summed = {"gradient sums": sums * setup.model.finish_parameters(kind)}
    in_finish = {"activation gradients": 2 * of.input + of.output}
    in_attention = {
        "activation gradients": of.input + of.output + of.qkv,
        "attention workspace": of.workspace,
    }
    recomputed = {**summed, "chunks": gradient + chunk * of.tokens.finish}
    layer = {"h": of.input, "o": output, "q, k, v": qkv}

    def moment(when: str, parts: dict[str, float], has_gradients: bool = True, **rates: float) -> Moment:
        rates = {name.replace("_", " "): rate for name, rate in rates.items()}
        late = late_gradient_bytes(setup) if has_gradients else 0.0
        return Moment(
            when=when,
            treatment=treatment,
            parts=parts,
            per_fraction=rates,
            has_gradients=has_gradients,
            late_gradients=late,
        )

    moments = [
        moment(
            "forward of a layer",
            # The layer before is on its way to the host: the paper's rounding buffers.
            {
                "h": 2 * of.input,
                "o": output,
                "q, k, v": of.qkv,
                "in flight": of.input + output + qkv,
                "chunks": chunk * of.tokens.finish,
            },
            has_gradients=False,
            in_flight=fraction,
            chunks=fraction,
        ),
        # Backward fetches a layer in three turns: its chunks beside the attention of the layer after it, h and o beside
        # that one's project, and the rest as its own backward begins.
        moment("backward of finish, swapped chunk", {**layer, **in_finish, "chunks": gradient}, chunks=fraction),
        moment("backward of finish, recomputed chunk", {**layer, **in_finish, **recomputed}, chunks=left),
        moment("backward of attention", {**layer, "q, k, v": of.qkv, **in_attention}, chunks=left, in_flight=fraction),
        moment(
            "backward of project",
            {
                "h": of.input,
                "q, k, v": 0.0 if swapped else of.qkv,
                "activation gradients": of.input + of.qkv,
                "in flight": of.input + of.output,
                "chunks": chunk * (of.tokens.project + 2 * of.tokens.qkv + 2 * of.tokens.input),
                "gradient sums": sums * setup.model.project_parameters(),
            },
            chunks=left,
            in_flight=fraction,
        ),
    ]
    whole, others = _kept_layers(setup)
    if whole:
        # The last layer's backward, before the first fetch: the other kept layers wait on the device. Of the gradients
        # only the head's are there.
        head = setup.training.element_bytes * setup.model.vocab * setup.model.hidden if setup.training.is_full else 0
        kept = {"kept layers": whole, "head gradient": head}
        rest = others - of.finish
        when = "backward of the last layer"
        moments += [
            moment(
                f"{when}, finish", {**kept, **in_finish, "chunks": gradient}, has_gradients=False, kept_layers=others
            ),
            moment(f"{when}, finish", {**kept, **in_finish, **recomputed}, has_gradients=False, kept_layers=rest),
            moment(f"{when}, attention", {**kept, **in_attention}, has_gradients=False, kept_layers=rest),
        ]
    return moments


def _embedding_moment(setup: Setup, kind: LayerKind, treatment: str) -> Moment:
    """All layers are through backward, and all gradients are there."""
    gradient = {"activation gradients": layer_bytes(setup, kind).input}
    return Moment(when="backward of the embedding", treatment=treatment, parts=gradient, per_fraction={})


def _kept_layers(setup: Setup) -> tuple[float, float]:
    """Bytes that the kept layers hold, whatever the fraction and at fraction 1 besides."""
    whole = others = 0.0
    for kind in setup.kinds:
        of = layer_bytes(setup, kind)
        whole += kind.num_kept * (of.input + of.output + of.logsumexp + of.qkv)
        others += kind.num_kept * of.others
    return whole, others


def _loss_moment(setup: Setup, treatment: str) -> Moment:
    """Between forward and backward: the kept layers' activations, the last hidden states and the logits."""
    whole, others = _kept_layers(setup)
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
    chunk = default_loss_chunk_tokens(tokens, model.hidden, model.vocab, setup.device_type)
    head = model.vocab * model.hidden if setup.training.is_full else 0
    # Per logit 12 bytes, as seen on an H200 and metered on a CPU: in backward, when the fp32 ones are gone, all that is
    # left are log-softmax and gradients.
    whole = 3 * _FP32 * tokens * model.vocab
    if setup.chunked_loss and chunk < tokens:
        # A chunk's 16-bit logits as the head gives them count as well, a little high. Beside them the head's summed
        # gradient.
        copied = e if e < _FP32 else 0
        logits = min(whole, (copied + 3 * _FP32) * chunk * model.vocab) + _FP32 * head
    else:
        # Then the gradients as the head takes them, with the head's own. One chunk is no different.
        logits = max(whole, e * (tokens * model.vocab + head))
    # The last layer's output, the final norm's output and the gradient of that; the norm works in chunks.
    return {"loss": 3 * hidden + logits}


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
    return Moment(
        when="backward of a layer recomputed whole",
        treatment=treatment,
        parts=worst,
        per_fraction={},
        late_gradients=late_gradient_bytes(setup),
    )
