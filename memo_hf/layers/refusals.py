"""What cannot be on together with memo_hf, such as activation checkpointing or compilation. Says so, and what to do.

Hooks inside of layers can be, and are warned of. Called by the session and the patched stack. Knows neither
steps nor layers.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memo_hf.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger("memo_hf")
# Whose hooks know what they do: they move, gather and cast parameters, and keep no activations.
_KNOWN_HOOKS = ("torch.", "transformers.", "accelerate.", "peft.", "deepspeed.", "memo_hf.")
_COMPILED = (
    "torch.compile would trace memo_hf's copies and chunks once, and leave out what they do at run time. Train without "
    "torch.compile."
)
_REPLICAS = (
    "nn.DataParallel makes replicas of the model at each step, which memo_hf cannot follow. Start one process per GPU "
    "(accelerate launch), or let one GPU be visible."
)


CONTEXT_PARALLEL = (
    "it is written for torch's scaled_dot_product_attention, which memo_hf does not call, and gives a rank tokens from "
    "both ends of a sequence, where packed documents cannot be told apart. Share sequences with Ulysses instead: "
    "ParallelismConfig(sp_backend='deepspeed', sp_size=...)"
)
TENSOR_PARALLEL = (
    "its all-reduces are inside of the parts of a layer that memo_hf runs chunk by chunk, and again in backward, so "
    "there would be several times as many of them. Share the weights with FSDP2 or ZeRO-3 instead, and long sequences "
    "with ParallelismConfig(sp_backend='deepspeed', sp_size=...)"
)


def refuse_what_cannot_be(model: nn.Module) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` where `model` has what memo_hf replaces, or cannot run.

    Asked when a model is enabled and at each forward pass, since both may come later.
    """
    if (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed.tensor"):
        raise ConfigError(
            f"the model runs within torch's context_parallel, whose ring attention cannot run: {CONTEXT_PARALLEL}."
        )
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                "activated LoRA (alora_invocation_tokens) counts positions from the end of the sequence, and layers "
                "see chunks of it under memo_hf. Train this adapter without memo_hf"
            )
    for name, module in model.named_modules():
        where = name or f"the {type(module).__name__}"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise UnsupportedModelError(f"{where} is compiled. {_COMPILED}")
        if isinstance(module, nn.DataParallel):
            raise UnsupportedModelError(_REPLICAS)
        if type(module).__name__ == "CheckpointWrapper":
            raise ConfigError(
                f"{where} is wrapped in FSDP's activation checkpointing, which memo_hf replaces. Turn it off: "
                "fsdp_activation_checkpointing: false in the accelerate config, or "
                "fsdp_config={'activation_checkpointing': False} in TrainingArguments."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"activation checkpointing of {where} is on together with memo_hf, which replaces it. Turn it off: "
                "activation_checkpointing=False (gradient_checkpointing=False) in TrainingArguments, "
                "use_gradient_checkpointing=False in prepare_model_for_kbit_training, or "
                "model.gradient_checkpointing_disable()."
            )


def refuse_tensor_parallelism(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` where weights are split over ranks that all work on the same tokens.

    Asked when a model is enabled, since `from_pretrained` splits it. FSDP2 gathers its weights for each layer instead.
    """
    modules = list(model.modules())
    size = next((size for module in modules if (size := getattr(module, "_tp_size", None) or 1) > 1), None)
    if size is not None:
        raise UnsupportedModelError(
            f"the model was loaded with tensor parallelism over {size} ranks: {TENSOR_PARALLEL}."
        )
    if any(isinstance(module, FSDPModule) for module in modules):
        return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedModelError(
                f"{name} is a DTensor ({parameter.placements} over {parameter.device_mesh}), and FSDP2 did not make "
                f"it, so it is tensor or expert parallelism: {TENSOR_PARALLEL}."
            )


@torch._disable_dynamo
def refuse_compilation() -> None:
    """Raise `UnsupportedModelError`. A compiler that traces the caller cannot trace this and leaves it to run time."""
    raise UnsupportedModelError(f"the model is compiled. {_COMPILED}")


def refuse_replicas() -> None:
    """Raise `UnsupportedModelError`. Stands in for the method by which nn.DataParallel makes replicas."""
    raise UnsupportedModelError(_REPLICAS)


def warn_of_hooks(layer: nn.Module, name: str) -> bool:
    """Warn where a module inside of `layer`, which runs per token, has forward hooks of the user's; whether it has.

    Such a hook sees a chunk of tokens at a time, and again where the chunk is recomputed. A tensor that it keeps from a
    chunk to be recomputed has no graph: a loss made from it would silently train nothing.
    """
    for child_name, child in layer.named_modules():
        hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()] if child_name else ()
        if any(not (_home_of(hook) + ".").startswith(_KNOWN_HOOKS) for hook in hooks):
            logger.warning(
                f"memo_hf: a forward hook on {name}.{child_name} is called for each chunk of tokens, and again where "
                "one is recomputed; what it keeps from there gives no gradient. Hook the whole layer, or use "
                "MemoConfig(mode='layer')"
            )
            return True
    return False


def _home_of(hook) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__
