"""Finds the decoder layers of a model, and the modules ("stacks") that hold and call them.

Says why where there are none. Knows nothing of how they are run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from memo_hf.errors import UnsupportedModelError


@dataclass(frozen=True)
class Stack:
    """A module with a list of decoder layers that it calls in turn, such as LlamaModel.

    Attributes:
        name: its path in the model, "" for the model itself.
        module: the module; its forward builds masks and positions.
        layers: (path in the model, layer) in the order of the list.
    """

    name: str
    module: nn.Module
    layers: tuple[tuple[str, nn.Module], ...]


def layers_of(module: nn.Module, name: str) -> tuple[tuple[str, nn.Module], ...]:
    """(path, layer) of each decoder layer in the lists that `module`, of path `name`, holds itself; each layer once."""
    paths: dict[nn.Module, str] = {}
    for list_name, children in module.named_children():
        for index, layer in enumerate(children if isinstance(children, nn.ModuleList) else ()):
            if isinstance(layer, GradientCheckpointingLayer):
                paths.setdefault(layer, f"{name}.{list_name}.{index}".lstrip("."))
    return tuple((path, layer) for layer, path in paths.items())


def find_stacks(model: nn.Module) -> list[Stack]:
    """Every stack of `model`, in module order.

    Raises:
        UnsupportedModelError: the model has no layer that transformers marks as one that may be checkpointed, or a
            module that holds such layers has no config.
    """
    stacks = []
    for name, module in model.named_modules():
        layers = layers_of(module, name)
        if layers and getattr(module, "config", None) is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} holds decoder layers and has no config, from which memo_hf reads its "
                "attention. Train this model without memo_hf"
            )
        if layers:
            stacks.append(Stack(name, module, layers))
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers: memo_hf looks for module lists of transformers' "
            "GradientCheckpointingLayer, which this model does not use. Choose a model that supports activation "
            "checkpointing in transformers, or train it without memo_hf."
        )
    return stacks
