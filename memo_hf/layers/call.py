"""One call of a decoder layer: its arguments, cut to a run of tokens.

Used by the check, token mode and layer mode. Knows nothing of swapping or autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Cache

from memo_hf.layers.unmade import unmade


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value):
    """`value` with `function` applied to each tensor in its tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        mapped = [map_tensors(function, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_in(value) -> list[torch.Tensor]:
    """Every tensor in the tuples, lists and dictionaries of `value`."""
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


class LayerCall:
    """The arguments of one layer call, without the layer input and without a cache.

    Args:
        args, kwargs: as the model gave them; the layer input is the first positional argument or `hidden_states`.
    """

    def __init__(self, args: tuple, kwargs: dict):
        kwargs = dict(kwargs)
        self.hidden_is_keyword = not args
        self.hidden: torch.Tensor | None = kwargs.pop("hidden_states") if self.hidden_is_keyword else args[0]
        # A training forward has no use for a cache, under whatever name it comes, and a recompute must not extend it.
        self.args = () if self.hidden_is_keyword else tuple(None if isinstance(arg, Cache) else arg for arg in args[1:])
        self.kwargs = {name: None if isinstance(arg, Cache) else arg for name, arg in kwargs.items()}
        if self.kwargs.get("use_cache"):
            self.kwargs["use_cache"] = False
        self.batch_size, self.num_tokens = self.hidden.shape[:2]

    def take_hidden(self) -> torch.Tensor:
        """The layer input (batch, tokens, hidden); the call forgets it, so that it does not outlive forward."""
        hidden, self.hidden = self.hidden, None
        return hidden

    def names_needing_gradients(self) -> list[str]:
        """The arguments beside the layer input that hold a tensor which needs a gradient; positional ones by number."""
        given = {**{f"argument {number}": arg for number, arg in enumerate(self.args, 1)}, **self.kwargs}
        return [name for name, arg in given.items() if any(tensor.requires_grad for tensor in tensors_in(arg))]

    def whole(self, hidden: torch.Tensor) -> tuple[tuple, dict]:
        """Arguments for all tokens with `hidden` as the layer input."""
        if self.hidden_is_keyword:
            return self.args, {"hidden_states": hidden, **self.kwargs}
        return (hidden, *self.args), self.kwargs

    def is_per_token(self, tensor: torch.Tensor) -> bool:
        """Whether dimension 1 of an argument counts tokens (positions, cos and sin, masks of shape batch x tokens)."""
        return tensor.dim() >= 2 and tensor.shape[1] == self.num_tokens and tensor.shape[0] in (1, self.batch_size)

    def on_tokens(self, hidden: torch.Tensor, start: int, stop: int, *, meta_rope: bool = False) -> tuple[tuple, dict]:
        """Arguments for tokens [start, stop) with `hidden` as the layer input.

        With `meta_rope`, cos and sin are unmade: rotary embedding of queries that nobody reads costs nothing.
        """

        def cut(tensor):
            if not self.is_per_token(tensor):
                return tensor
            part = tensor[:, start:stop]
            if hasattr(tensor, "memo_pattern"):  # A mask of ours says what it stands for; so do its parts.
                part.memo_pattern = tensor.memo_pattern
            return part

        args, kwargs = map_tensors(cut, self.args), map_tensors(cut, self.kwargs)
        if meta_rope and kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = map_tensors(
                lambda tensor: unmade(tuple(tensor.shape), tensor.dtype), kwargs["position_embeddings"]
            )
        if self.hidden_is_keyword:
            return args, {"hidden_states": hidden, **kwargs}
        return (hidden, *args), kwargs
