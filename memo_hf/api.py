"""`enable` and `disable`: memo_hf in plain torch loops. The Trainer and Accelerate integrations call these."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError
from memo_hf.session import Session, session_of


def enable(model: nn.Module, config: MemoConfig | None = None) -> Session:
    """Train `model` with its activations swapped and recomputed per token, from the next forward pass on.

    Args:
        model: a transformers model, or a peft model around one, before DeepSpeed wraps it. DDP and FSDP2 may be around
            it already.
        config: settings; not given: `MemoConfig()`.

    Returns:
        The session; its `stats` say what each layer does and why, and how many bytes move.

    Raises:
        UnsupportedModelError: no decoder layers, compiled, or already enabled.
        ConfigError: activation checkpointing is on as well, or what is given is no model or no `MemoConfig`.
    """
    if not isinstance(model, nn.Module):
        given = type(model).__name__ + (f" ({model!r})" if isinstance(model, str) else "")
        raise ConfigError(
            f"model is {given}; pass the model itself, as AutoModelForCausalLM.from_pretrained returns it"
        )
    config = MemoConfig() if config is None else config
    if not isinstance(config, MemoConfig):
        raise ConfigError(f"config is {type(config).__name__}; pass a MemoConfig, or MemoConfig.from_dict(...)")
    return Session(_within_ddp(model), config)


def disable(model: nn.Module) -> None:
    """Leave `model` as `enable` found it, and free all host memory. Raises `MemoError` where it is not enabled."""
    session_of(_within_ddp(model)).close()


def _within_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
