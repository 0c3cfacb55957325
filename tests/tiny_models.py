"""Tiny random models of many families, from their configurations alone."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MIXTURE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

# Families that must run in token mode, with what their configurations need beyond the common sizes.
TOKEN_MODE = {
    "llama": {},
    "mistral": dict(sliding_window=None),
    "qwen2": {},
    "qwen3": dict(head_dim=8),
    "gemma": dict(head_dim=8),
    "gemma3_text": dict(head_dim=8, sliding_window=16),
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "cohere": {},
    "gpt_neox": {},
    "stablelm": {},
    "mixtral": _MIXTURE,
    "qwen3_moe": dict(head_dim=8, **_MIXTURE),
}

_SHARED_EXPERTS = dict(
    n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1
)
# Families beyond those, which run in token mode as well.
MORE_TOKEN_MODE = {
    "gemma2": dict(head_dim=8, sliding_window=16),
    "gpt_oss": dict(
        head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_MIXTURE,
    ),
    "deepseek_v3": dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6,
        moe_intermediate_size=32, **_SHARED_EXPERTS,
    ),
    "phi": {},
    "glm": dict(head_dim=8),
    "mimo_v2_flash": dict(head_dim=8, v_head_dim=4, sliding_window=16, **_MIXTURE),
    "modernbert-decoder": {},
    "youtu": dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        head_dim=4,
    ),
    # Its attention does not call the module of its queries, but a method of it.
    "jetmoe": dict(kv_channels=8, num_local_experts=4),
}  # fmt: skip

# Families whose layers all run in layer mode, with a part of the reason that is given.
LAYER_MODE = {
    "bloom": dict(reason="attention interface 0 times"),
    "falcon": dict(reason="attention interface 0 times"),
    # Two attentions in a layer, beside a mixture of experts.
    "longcat_flash": dict(
        reason="attention interface 2 times", num_layers=2, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=4, ffn_hidden_size=64, expert_ffn_hidden_size=32,
        n_routed_experts=4, moe_topk=2, zero_expert_num=1,
    ),
    "mamba": dict(reason="attention interface 0 times"),
    # Per-layer inputs, and keys and values shared by the last layers.
    "gemma3n_text": dict(
        reason="its input has 4 dimensions",
        head_dim=8, vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
        laurel_rank=4, sliding_window=16, altup_num_inputs=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}  # fmt: skip

# Families with layers of both modes.
MIXED_MODE = {
    "recurrent_gemma": dict(lru_width=32, attention_window_size=16),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False, num_experts=2
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "minimax": dict(head_dim=8, block_size=16, **_MIXTURE),
    "qwen3_next": dict(
        head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"] * 2, **_MIXTURE,
    ),
}  # fmt: skip
_FAMILIES = {**TOKEN_MODE, **MORE_TOKEN_MODE, **LAYER_MODE, **MIXED_MODE}


def tiny(family: str, *, seed: int = 0, **changes):
    """A random model of `family` in training mode, in fp32."""
    torch.manual_seed(seed)
    sizes = {**_SIZES, **_FAMILIES.get(family, {}), **changes}
    sizes.pop("reason", None)
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config).train()


def random_ids(batch_size: int, num_tokens: int, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (batch_size, num_tokens), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


def gradients(model, ids: torch.Tensor, **inputs) -> dict[str, torch.Tensor]:
    """Gradients by parameter name of one forward and backward pass; the model's own gradients are cleared."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, **inputs).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst_relative_error(ours: dict, theirs: dict) -> float:
    """Largest error of any parameter's gradient, relative to that gradient's largest entry."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-30) for name in theirs),
        default=torch.tensor(0.0),
    ).item()
