"""All that memo_hf knows of DeepSpeed: its settings, and what ZeRO-3 does to parameters and layers.

ZeRO-3 leaves of each parameter an empty tensor and gathers the whole one by hooks on the module that owns it. A layer
that runs as memo_hf's autograd nodes needs its parameters whole from the layer's call to its end, forward and backward,
which is what DeepSpeed does for a "leaf module". So decoder layers are marked as leaves before the engine is made.

Called by the session, the check and the planner. Never imports DeepSpeed where nobody has: it may not be installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

from memo_hf.errors import ConfigError, UnsupportedModelError
from memo_hf.optimizer_states import local_bytes
from memo_hf.planner.budgets import read_host_memory

# Bytes on the host for each trained parameter: fp32 weight and gradient, and Adam's two moments.
_OFFLOADED_OPTIMIZER_BYTES = 16


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 holds `parameter`, so that it is empty unless gathered."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, gathered or not."""
    return parameter.ds_shape if is_partitioned(parameter) else parameter.shape


def held_bytes(parameter: Tensor) -> int:
    """Bytes that this rank holds of `parameter` between steps."""
    return parameter.ds_tensor.nbytes if is_partitioned(parameter) else local_bytes(parameter)


def gathered(parameters: Iterable[Tensor]) -> contextlib.AbstractContextManager:
    """The parameters are whole in the body, on every rank. They must not be changed there. All ranks must enter."""
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)


class Leaves:
    """Decoder layers marked as ZeRO-3 leaf modules. Without ZeRO-3 the mark means nothing.

    DeepSpeed reduces the gradients of a leaf when that of its input is there, and fails where the input needs none
    (frozen embeddings). So a hook lets the input of a leaf that trains something need one.

    Args:
        layers: the decoder layers, before DeepSpeed makes its engine.
    """

    def __init__(self, layers: list[nn.Module]):
        self._marked: list[nn.Module] = []
        self._hooks: list = []
        if "deepspeed" not in sys.modules and not is_deepspeed_zero3_enabled():
            return
        from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

        for layer in layers:
            if not z3_leaf_module(layer):
                set_z3_leaf_module(layer, True)
                self._marked.append(layer)
            self._hooks.append(layer.register_forward_pre_hook(_let_input_need_gradient, prepend=True))

    def undo(self) -> None:
        """Take the marks off, unless an engine relies on them: it keeps the layers as leaves as long as it lives."""
        if any(map(_has_engine_hooks, self._marked)):
            return
        for hook in self._hooks:
            hook.remove()
        for layer in self._marked:
            vars(layer).pop("_z3_leaf", None)


def _let_input_need_gradient(layer: nn.Module, args: tuple):
    hidden = args[0] if args else None
    if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.requires_grad:
        return None
    if not any(is_partitioned(p) and p.requires_grad for p in layer.parameters()):
        return None
    return (hidden.detach().requires_grad_(), *args[1:])


def refuse_late_enabling(layers: list[tuple[str, nn.Module]]) -> None:
    """Raise `UnsupportedModelError` where a ZeRO-3 engine already has its hooks on `layers`, given as (name, layer)."""
    for name, layer in layers:
        if _has_engine_hooks(layer):
            raise UnsupportedModelError(
                f"DeepSpeed ZeRO-3 has been initialised on {name} already, and its hooks are in the way of the check "
                "of the layers. Call memo_hf.enable(model) before deepspeed.initialize(model=model)"
            )


def refuse_no_leaf(name: str, layer: nn.Module) -> None:
    """Raise `UnsupportedModelError` where ZeRO-3 gathers the parameters of a layer that is about to run one by one."""
    if getattr(layer, "_z3_leaf", False) or not any(map(is_partitioned, layer.parameters())):
        return
    raise UnsupportedModelError(
        f"DeepSpeed ZeRO-3 gathers the parameters of {name} one module at a time, and memo_hf needs them for the whole "
        f'layer. Add "leaf_module": {{"classes": ["{type(layer).__name__}"]}} to "zero_optimization" in the DeepSpeed '
        "config, or import deepspeed before memo_hf.enable, which then does the same"
    )


def _has_engine_hooks(layer: nn.Module) -> bool:
    return any(
        getattr(hook, "__module__", "").startswith("deepspeed.runtime.zero.")
        for module in layer.modules()
        for hook in module._forward_pre_hooks.values()
    )


def refuse_settings() -> None:
    """Raise `ConfigError` where the DeepSpeed config in force checkpoints activations too."""
    section = (deepspeed_config() or {}).get("activation_checkpointing") or {}
    on = sorted(name for name, value in section.items() if value and name != "profile")
    if on:
        raise ConfigError(
            f'"activation_checkpointing" in the DeepSpeed config sets {on}, and would recompute all that memo_hf '
            'swaps. Remove "activation_checkpointing" from it'
        )


class Offload:
    """Host memory of this node that DeepSpeed takes after memo_hf is enabled: for the optimizer, and for parameters.

    From the DeepSpeed config in force. Counted for Adam in fp32, whatever the optimizer is. What goes to NVMe is not
    counted.

    Args:
        model: the whole model.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._free_before = read_host_memory().free_bytes if self.num_bytes() else 0

    def num_bytes(self) -> int:
        """Of all, taken already or not."""
        config = (deepspeed_config() or {}).get("zero_optimization") or {}
        to_host = {
            part for part in ("optimizer", "param") if (config.get(f"offload_{part}") or {}).get("device") == "cpu"
        }
        total = 0
        for parameter in self._model.parameters() if to_host else ():
            size = full_shape(parameter).numel()
            if "optimizer" in to_host and parameter.requires_grad:
                total += size * _OFFLOADED_OPTIMIZER_BYTES
            if "param" in to_host and config.get("stage") == 3:
                total += size * parameter.dtype.itemsize
        ranks, local_ranks = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return total * local_ranks // ranks  # The launcher has said how many.

    def bytes_to_come(self) -> int:
        """Of those that are not taken yet, going by what is free on this node."""
        offloaded = self.num_bytes()
        taken = self._free_before - read_host_memory().free_bytes if offloaded else 0
        return max(0, offloaded - max(0, taken))
