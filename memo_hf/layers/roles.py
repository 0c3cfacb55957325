"""The three roles in which a decoder layer's own code is run on some of its tokens.

* project: run up to the attention call, which notes queries, keys and values and ends the run there;
* finish: the attention call hands back the rows of an attention output that is already known, and what only feeds
  queries, keys and values is replaced by stubs that return unmade tensors;
* whole: the attention call attends, over all tokens given.

The registered attention function asks `current_role()` which one it is in. Knows nothing of swapping or autograd nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from memo_hf.layers.unmade import unmade

ATTENTION_NAME = "memo"
_thread = threading.local()


class AttentionReached(Exception):
    """Ends a project run: queries, keys and values are there and nothing after them is wanted."""


@dataclass
class Project:
    """Notes what the layer hands to attention: q, k, v (batch, heads, tokens, head_dim) and keyword arguments."""

    module: nn.Module | None = None
    query_key_value: tuple[torch.Tensor, ...] = ()
    attention_arguments: dict = field(default_factory=dict)


@dataclass
class Finish:
    """Hands back rows of the attention output, (batch, tokens, heads, head_dim)."""

    attention_output: torch.Tensor
    num_calls: int = 0


@dataclass
class Whole:
    """Attends over the whole sequence with `attend(module, query, key, value, **arguments) -> output`."""

    attend: Callable
    num_calls: int = 0


def current_role() -> Project | Finish | Whole | None:
    """The role that the running thread is in, or None outside of memo_hf."""
    return getattr(_thread, "role", None)


@contextmanager
def attention_set_to(name: str, configs: tuple) -> Iterator[None]:
    """Let `configs` (model configurations) choose the attention called `name`, each for itself alone.

    The public setter would also set the configurations inside a configuration, of a vision tower for example.
    """
    names = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, before in zip(configs, names, strict=True):
            config._attn_implementation_internal = before


@contextmanager
def playing(role, configs: tuple) -> Iterator:
    """Run the body in `role`, with the attention of `configs` set to memo_hf's."""
    before = current_role()
    _thread.role = role
    try:
        with attention_set_to(ATTENTION_NAME, configs):
            yield role
    finally:
        _thread.role = before


@contextmanager
def stubbed(stubs: dict[nn.Module, tuple[int, ...]]) -> Iterator[None]:
    """Replace each module's forward by one that returns an unmade tensor: its input's shape, the last width changed."""

    def make(width):
        def forward(inputs, *args, **kwargs):
            return unmade((*inputs.shape[:-1], width), inputs.dtype)

        return forward

    before = {module: module.__dict__.get("forward") for module in stubs}
    for module, width in stubs.items():
        module.forward = make(width)
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@contextmanager
def substituted(parameters: list[tuple[nn.Module, str]], replacements: list[torch.Tensor]) -> Iterator[None]:
    """Let modules compute with `replacements` in place of their parameters, given as (module, name)."""
    before = [module._parameters[name] for module, name in parameters]
    for (module, name), replacement in zip(parameters, replacements, strict=True):
        module._parameters[name] = replacement
    try:
        yield
    finally:
        for (module, name), parameter in zip(parameters, before, strict=True):
            # Parametrizations that come and go within (peft's adapters of experts) leave a plain tensor as a buffer.
            module._buffers.pop(name, None)
            module._parameters[name] = parameter
