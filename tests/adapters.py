"""Adapters of peft for the tests, with nothing at zero that would hide a gradient."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def lora(model: nn.Module, **settings) -> nn.Module:
    """`model` with LoRA of rank 4 and these settings, in training mode."""
    return with_adapter(model, LoraConfig(r=4, **settings))


def with_adapter(model: nn.Module, config) -> nn.Module:
    """`model` with the adapter that `config` describes, in training mode."""
    torch.manual_seed(1)
    model = get_peft_model(model, config).train()
    randomise_adapters(model)
    return model


def randomise_adapters(model: nn.Module) -> None:
    """What peft starts at zero would hide half of the gradients."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
