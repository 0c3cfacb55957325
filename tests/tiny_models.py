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


def tiny(family: str, *, seed: int = 0, **changes):
    """A random model of `family` in training mode, in fp32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_SIZES, **TOKEN_MODE.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config).train()


def random_ids(batch_size: int, num_tokens: int, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch_size, num_tokens), generator=generator)


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
        (
            (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-30)
            for name in theirs
        ),
        default=torch.tensor(0.0),
    ).item()
