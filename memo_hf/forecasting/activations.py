"""The skeletal activations of one decoder layer, in bytes per token, counted tensor by tensor as autograd saves them.

Called by `memory` and by whoever compares a run with its forecast. The counts follow transformers' eager layers, and
`tests/test_forecast_activations.py` holds them against what autograd saves. Knows no devices and no parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.errors import ConfigError
from memo_hf.forecasting.shapes import LayerKind, ModelShape

_FP32 = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# What LoRA adapts, and its rank, where nothing else is asked for.
ALL_LINEAR = _ATTENTION + _MLP
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and in which element size.

    Attributes:
        element_bytes: of weights and activations (2: bf16 or fp16, 4: fp32).
        lora_rank: 0 for full fine-tuning.
        lora_targets: names of the adapted matrices, under Llama's names.
        adapter_bytes: element size of the adapters; peft keeps them in fp32.
        norm_statistic_bytes: element size of layer norm's mean and rstd: fp32 on GPUs, the weights' size on a CPU.
    """

    element_bytes: int = 2
    lora_rank: int = 0
    lora_targets: frozenset[str] = frozenset()
    adapter_bytes: int = _FP32
    norm_statistic_bytes: int = _FP32

    def __post_init__(self):
        unknown = self.lora_targets - set(ALL_LINEAR)
        if unknown:
            raise ConfigError(f"lora_targets {sorted(unknown)} are unknown; choose from {list(ALL_LINEAR)}")
        if bool(self.lora_rank) != bool(self.lora_targets):
            raise ConfigError(
                f"lora_rank is {self.lora_rank} and lora_targets {sorted(self.lora_targets)}; set both or neither"
            )

    @property
    def is_full(self) -> bool:
        return self.lora_rank == 0


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes per token of one layer.

    Attributes:
        input: h.
        output: o.
        logsumexp: of the attention, fp32.
        query, key_value: q; k and v together.
        project, finish: the other skeletal activations of the two token-wise parts.
        mlp_backward: what the MLP's own backward holds at most, its saved tensors among it.
        mlp: the MLP's saved tensors, a part of `finish`.
    """

    input: int
    output: int
    logsumexp: int
    query: int
    key_value: int
    project: int
    finish: int
    mlp: int
    mlp_backward: int

    @property
    def qkv(self) -> int:
        return self.query + self.key_value

    @property
    def others(self) -> int:
        return self.project + self.finish


def token_bytes(shape: ModelShape, kind: LayerKind, training: Training) -> TokenBytes:
    """Bytes per token of a layer of `kind`."""
    e, hidden = training.element_bytes, shape.hidden
    mlp, mlp_backward = _mlp(shape, kind, training)
    project = _inputs(training, ("q_proj", "k_proj", "v_proj"), hidden)
    if training.is_full or kind.takes_gradient:
        project += _norm(shape, training, hidden, 1, is_first=True)
    if shape.qk_norm:
        for heads in (shape.heads, shape.kv_heads):
            project += _norm(shape, training, heads * shape.head_dim, heads, is_first=False)
    finish = _norm(shape, training, hidden, 1, is_first=False) + mlp
    # o_proj's own input is o, which is swapped whole; an adapter in another type copies it.
    finish += _adapter(training, ("o_proj",), shape.query_width) if _casts(training) else _rank(training, ("o_proj",))
    return TokenBytes(
        input=e * hidden,
        output=e * shape.query_width,
        logsumexp=_FP32 * shape.heads,
        query=e * shape.query_width,
        key_value=2 * e * shape.kv_width,
        project=project,
        finish=finish,
        mlp=mlp,
        mlp_backward=mlp_backward,
    )


def _norm(shape, training: Training, width: int, num_statistics: int, *, is_first: bool) -> int:
    """A norm's saved tensors, its output apart. The first norm of a layer reads h, which is counted elsewhere."""
    e = training.element_bytes
    if not shape.rms_norm:
        return (0 if is_first else e * width) + 2 * training.norm_statistic_bytes * num_statistics
    # RMS norm works on an fp32 copy; where the weights are fp32 that is its input itself.
    copy = 0 if is_first and e == _FP32 else _FP32 * width
    normalized = e * width if training.is_full else 0
    return copy + normalized + _FP32 * num_statistics


def _inputs(training: Training, names: tuple[str, ...], width: int) -> int:
    """The one input that the matrices `names` share, as their weight gradients need it."""
    if training.is_full:
        return training.element_bytes * width
    adapted = [name for name in names if name in training.lora_targets]
    if not adapted:
        return 0
    if _casts(training):
        return _adapter(training, names, width)
    return training.element_bytes * width + _rank(training, names)


def _casts(training: Training) -> bool:
    """Whether each adapter makes a copy of its input in its own type."""
    return not training.is_full and training.adapter_bytes != training.element_bytes


def _adapter(training: Training, names: tuple[str, ...], width: int) -> int:
    adapted = sum(name in training.lora_targets for name in names)
    return adapted * training.adapter_bytes * width + _rank(training, names)


def _rank(training: Training, names: tuple[str, ...]) -> int:
    """The low-rank activations between an adapter's two matrices."""
    return sum(name in training.lora_targets for name in names) * training.adapter_bytes * training.lora_rank


def _mlp(shape: ModelShape, kind: LayerKind, training: Training) -> tuple[int, int]:
    """The MLP's saved bytes with its input (the second norm's output), and what its backward holds at most."""
    e, hidden = training.element_bytes, shape.hidden
    if kind.is_moe:
        top, width = shape.experts_per_token, shape.expert_intermediate
        # Gathered inputs and expert outputs, the fused gate and up, silu, product; the routes' weights and indices.
        routed = top * (2 * e * hidden + 4 * e * width + e + 4 * 8)
        router = _FP32 * shape.num_experts
        saved = routed + router + (e * hidden if training.is_full else 0)
        return saved, saved + top * 2 * e * width
    width = shape.intermediate
    first = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    if shape.gated:
        kept, at_most = 3, 6  # gate, silu(gate), up; in backward their gradients beside them
    elif shape.activation in ("gelu", "relu", "gelu_pytorch_tanh"):
        kept, at_most = 1, 3
    else:
        kept, at_most = 4, 7  # the activation written out in elementary functions, as GPT-2's gelu_new is
    product = _inputs(training, ("down_proj",), width)
    saved = _inputs(training, first, hidden) + kept * e * width + product
    return saved, _inputs(training, first, hidden) + max(at_most * e * width, kept * e * width + product + e * width)
