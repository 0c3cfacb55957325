"""Configurations of well-known models, and the reading of a `config.json`. Called by the forecast; knows no torch.

The four GPT models are the paper's (table 2). The others are those fields of the published `config.json` that decide
sizes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from memo_hf.errors import ConfigError, did_you_mean


def _gpt(layers: int, hidden: int, heads: int) -> dict:
    return {
        "model_type": "gpt2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": 50257,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "n_positions": 0,
    }


def _llama_like(
    model_type, positions, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied=False, **more
) -> dict:
    return {
        "model_type": model_type,
        "max_position_embeddings": positions,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **more,
    }


SHIPPED: dict[str, dict] = {
    "gpt-7b": _gpt(32, 4096, 32),
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-30b": _gpt(48, 7168, 56),
    "gpt-65b": _gpt(80, 8192, 64),
    "llama-2-7b": _llama_like("llama", 4096, 32, 4096, 11008, 32, 32, 128, 32000),
    "llama-3.1-8b": _llama_like("llama", 131072, 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": _llama_like("llama", 131072, 80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-0.6b": _llama_like("qwen3", 40960, 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "qwen3-4b": _llama_like("qwen3", 40960, 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "qwen3-8b": _llama_like("qwen3", 40960, 36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": _llama_like("qwen3", 40960, 64, 5120, 25600, 64, 8, 128, 151936),
    "qwen3-30b-a3b": _llama_like(
        "qwen3_moe",
        40960,
        48,
        2048,
        6144,
        32,
        4,
        128,
        151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "smollm2-135m": _llama_like("llama", 8192, 30, 576, 1536, 9, 3, 64, 49152, tied=True),
}


def adapter_base(folder: str | Path) -> str | None:
    """The model that the PEFT adapter in `folder` was trained on, as it names it; None where no adapter is there."""
    file = Path(folder) / "adapter_config.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text()).get("base_model_name_or_path") or "the model it was trained on"


def read_config(name_or_path: str | Path) -> tuple[str, dict]:
    """A model's name and configuration.

    Args:
        name_or_path: one of `SHIPPED` (case does not matter) with or without its owner on the hub, a `config.json`, or
            a folder that holds one.

    Raises:
        ConfigError: neither a shipped name nor a readable configuration, or an adapter.
    """
    path = Path(name_or_path)
    is_folder = path.is_dir()
    if base := adapter_base(path):
        raise ConfigError(f"model: {name_or_path} holds an adapter; give its base ({base})")
    if is_folder:
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            raise ConfigError(f"model: cannot read {path}: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"model: {path} holds no JSON object, so it is no model configuration")
        return path.parent.name or str(path), config
    # "meta-llama/Llama-3.1-8B" is a name, "./runs/llama-3.1-8b" a path that may hold any model.
    name = re.fullmatch(r"(\w[\w.-]*/)?([^/]+)", str(name_or_path).lower())
    if name and name[2] in SHIPPED and not (name[1] and is_folder):
        return name[2], SHIPPED[name[2]]
    asked = "" if is_folder else did_you_mean(str(name_or_path).lower().split("/")[-1], SHIPPED)
    raise ConfigError(
        f"model: {str(name_or_path)!r} is neither a config.json, a folder that holds one, nor one of the shipped names"
        f" {sorted(SHIPPED)}{asked}; download the model's config.json and give its folder"
    )
