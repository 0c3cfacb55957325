"""What a `config.json` says about sizes: parameters, and the bytes per token of every activation of a decoder layer.

This is the one description of bytes: the forecast prices it before a run, the session reports against it after one.
Called by `memory`, `speed` and the session; knows no devices, no parallelism and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.errors import ConfigError
from memo_hf.forecasting.models import read_config

_FP32 = 4
# The same thing under the names that transformers uses.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
}
# Beside those above, and not always there.
_NUMBERS = (
    "num_key_value_heads head_dim num_experts num_local_experts num_experts_per_tok decoder_sparse_step "
    "max_position_embeddings n_positions"
).split()
_UNDESCRIBED = {
    "kv_lora_rank": "multi-head latent attention",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "encoder_layers": "an encoder",
    "is_encoder_decoder": "an encoder",
    "n_routed_experts": "experts of its own kind",
    "multi_query": "keys and values of its own kind",
}
# Of these the MLP, the heads of keys or the tied weights are other than they are read here.
_OTHER_LAYERS = frozenset(
    ("falcon", "starcoder2", "bloom", "phi", "gptj", "codegen", "mpt", "llama4", "llama4_text", "t5", "bert", "roberta")
)
_UNKNOWN_BYTES = (
    "whose bytes the forecast does not describe; train without one, since the first step is measured anyway"
)


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Decoder layers that are built alike.

    Attributes:
        num_layers, num_kept: how many, and how many of them are among the last, unswapped ones.
        is_moe: a mixture of experts instead of a dense MLP.
        takes_gradient: its input needs a gradient; that of the first layer does not where the embedding is frozen.
        window: tokens that attention looks back, or None for all.
    """

    name: str
    num_layers: int
    num_kept: int
    is_moe: bool
    window: int | None
    takes_gradient: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Counts are elements; `*_width` is a width in elements.

    `num_positions` is of an embedding of positions, `trained_positions` how many the model was trained for, if known.
    """

    name: str
    model_type: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    gated: bool
    activation: str
    rms_norm: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    num_positions: int = 0
    trained_positions: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    moe_layers: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()

    @classmethod
    def from_config(cls, name: str, config: dict) -> ModelShape:
        """Sizes from the fields of a `config.json`. Raises `ConfigError` for what is missing or not described here."""
        try:
            return cls._read(name, config)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"model {name!r}: a field of its configuration has another type than its name: {error}"
            ) from error

    @classmethod
    def _read(cls, name: str, config: dict) -> ModelShape:
        inner = config.get("text_config")
        config = inner if isinstance(inner, dict) else config
        if config.get("model_type") in _OTHER_LAYERS:
            raise ConfigError(f"model {name!r} is a {config['model_type']}, {_UNKNOWN_BYTES}")
        for key in _NUMBERS:
            if not isinstance(config.get(key), int | None):
                raise TypeError(f"{key} is {config[key]!r}")
        for key, what in _UNDESCRIBED.items():
            if config.get(key):
                raise ConfigError(f"model {name!r} has {what} ({key}), {_UNKNOWN_BYTES}")

        def get(field):
            for key in _NAMES[field]:
                if isinstance(config.get(key), int) and config[key] > 0:
                    return config[key]
            raise ConfigError(f"model {name!r}: its configuration has none of {list(_NAMES[field])}")

        layers, hidden, heads = get("num_layers"), get("hidden"), get("heads")
        model_type = str(config.get("model_type") or "")
        is_gpt2 = model_type in ("gpt2", "gpt_neo", "gpt_bigcode", "gpt_neox", "opt")
        intermediate = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
        if not isinstance(intermediate, int):
            raise ConfigError(f"model {name!r} has MLPs of several widths ({intermediate}), {_UNKNOWN_BYTES}")
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
        moe = tuple(i for i in range(layers) if experts and i not in dense and (i + 1) % every == 0)
        return cls(
            name=name,
            model_type=model_type,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=intermediate,
            vocab=get("vocab"),
            tied=config.get("tie_word_embeddings", is_gpt2 or model_type.startswith("gemma")),
            gated=not is_gpt2,
            activation=config.get("hidden_act") or config.get("activation_function") or "silu",
            rms_norm=not is_gpt2,
            qk_norm=model_type.startswith(("qwen3", "olmo2", "gemma3")),
            attention_bias=is_gpt2 or model_type == "qwen2" or bool(config.get("attention_bias")),
            mlp_bias=is_gpt2 or bool(config.get("mlp_bias")),
            trained_positions=config.get("max_position_embeddings") or config.get("n_positions") or None,
            num_positions=(config.get("n_positions") or 0) if is_gpt2 else 0,
            num_experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            expert_intermediate=config.get("moe_intermediate_size") or intermediate,
            moe_layers=moe,
            windows=_windows(name, config, layers),
        )

    @classmethod
    def load(cls, name_or_path) -> ModelShape:
        """Sizes of a shipped model or a `config.json`. Raises `ConfigError`."""
        return cls.from_config(*read_config(name_or_path))

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def kinds(self, num_kept: int, *, frozen_embedding: bool = False) -> list[LayerKind]:
        """The kinds of layer, with the last `num_kept` layers marked; the first is apart with a frozen embedding."""
        groups: dict[tuple, list[int]] = {}
        for index in range(self.num_layers):
            takes_gradient = index > 0 or not frozen_embedding
            groups.setdefault((index in self.moe_layers, self.windows[index], takes_gradient), []).append(index)
        first_kept = self.num_layers - min(num_kept, self.num_layers)
        return [
            LayerKind(
                name=("moe" if is_moe else "dense")
                + ("" if window is None else f", window {window}")
                + ("" if takes_gradient else ", first"),
                num_layers=len(indices),
                num_kept=sum(index >= first_kept for index in indices),
                is_moe=is_moe,
                window=window,
                takes_gradient=takes_gradient,
            )
            for (is_moe, window, takes_gradient), indices in groups.items()
        ]

    # Parameters.

    def project_parameters(self) -> int:
        widths = self.query_width + 2 * self.kv_width
        norms = self.hidden * (1 if self.rms_norm else 2) + (2 * self.head_dim if self.qk_norm else 0)
        return self.hidden * widths + (widths if self.attention_bias else 0) + norms

    def finish_parameters(self, kind: LayerKind) -> int:
        matrices = 3 if self.gated else 2
        if kind.is_moe:
            mlp = self.num_experts * (matrices * self.hidden * self.expert_intermediate + self.hidden)
        else:
            mlp = matrices * self.hidden * self.intermediate
        biases = self.hidden if self.attention_bias and not self.qk_norm and not self.gated else 0
        biases += (self.intermediate * (matrices - 1) + self.hidden) if self.mlp_bias else 0
        return self.query_width * self.hidden + mlp + biases + self.hidden * (1 if self.rms_norm else 2)

    def layer_parameters(self, kind: LayerKind) -> int:
        return self.project_parameters() + self.finish_parameters(kind)

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.num_positions) * self.hidden

    @property
    def num_parameters(self) -> int:
        layers = sum(k.num_layers * self.layer_parameters(k) for k in self.kinds(0))
        head = 0 if self.tied else self.vocab * self.hidden
        return layers + self.embedding_parameters + head + self.hidden * (1 if self.rms_norm else 2)

    # Multiply-adds per token that are matrix products, forward.

    def project_macs(self) -> int:
        return self.hidden * (self.query_width + 2 * self.kv_width)

    def finish_macs(self, kind: LayerKind) -> int:
        matrices = 3 if self.gated else 2
        width = self.experts_per_token * self.expert_intermediate if kind.is_moe else self.intermediate
        router = self.hidden * self.num_experts if kind.is_moe else 0
        return self.query_width * self.hidden + matrices * self.hidden * width + router


def _windows(name: str, config: dict, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None."""
    types = config.get("layer_types")
    window = config.get("sliding_window")
    if types is None:
        uses = window and config.get("use_sliding_window", config.get("model_type") == "mistral")
        return (window if uses else None,) * layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise ConfigError(
            f"model {name!r} has layer_types {unknown or len(types)} in {layers} layers, {_UNKNOWN_BYTES}"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)
