"""Ulysses sequence parallelism: a rank holds some tokens of a sequence, and attends over all tokens for some heads.

    q, k, v of the rank's tokens, all heads --all-to-all--> of all tokens, the rank's heads --> attention
    o of all tokens, the rank's heads --all-to-all--> of the rank's tokens, all heads

Called by the layer engine around the attention itself. The engine that trains (DeepSpeed, through Accelerate or by
hand) makes the group, deals out the sequence and wraps an attention function of transformers in all-to-alls of its own;
here its group is found, and its wrapper is not run. It must not know layers, swapping or the loss.

Tensors are (batch, tokens, heads, d), in memory in that order.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo_hf.errors import UnsupportedModelError

_TOKENS, _HEADS = 1, 2
_DEEPSPEED = "deepspeed.runtime.sequence_parallel"
_ROWS = 2048  # tokens whose products with a gradient are made at once


def sequence_group(implementation: str) -> SequenceGroup | None:
    """The ranks that share a sequence, where an engine has put its all-to-alls around an attention implementation.

    Raises `UnsupportedModelError` where the engine's function does not show its group.
    """
    function = _registered(implementation)
    return SequenceGroup(_engine_part(function).process_group) if _is_engine(function) else None


def core_attention(implementation: str) -> Callable:
    """transformers' function for an attention implementation, without an engine's all-to-alls around it."""
    function = ALL_ATTENTION_FUNCTIONS[implementation]
    while _is_engine(function):  # each model that is prepared puts another around it
        function = _engine_part(function).attn
    return function


@contextlib.contextmanager
def without_all_to_alls(implementation: str) -> Iterator[None]:
    """Let transformers attend on this rank alone in the body, as the check of a single layer wants it."""
    function = _registered(implementation)
    if not _is_engine(function):
        yield
        return
    ALL_ATTENTION_FUNCTIONS[implementation] = core_attention(implementation)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[implementation] = function


def _registered(implementation: str) -> Callable | None:
    return ALL_ATTENTION_FUNCTIONS[implementation] if implementation in ALL_ATTENTION_FUNCTIONS else None


def _is_engine(function: Callable | None) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_DEEPSPEED)


def _engine_part(function: Callable):
    """The object in DeepSpeed's function that holds the group, and the attention function that it wraps."""
    for item in inspect.getclosurevars(function).nonlocals.values():
        if hasattr(item, "process_group") and hasattr(item, "attn"):
            return item
    raise UnsupportedModelError(
        f"{function.__module__}.{function.__qualname__} is DeepSpeed's sequence parallelism, but does not show its "
        "process group as deepspeed 0.19.8 does. Use that version, or train without memo_hf"
    )


class SequenceGroup:
    """The ranks that share a sequence, and this one among them.

    Args:
        group: the process group; ranks hold the parts of the sequence in their order.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, parts: list[Tensor]) -> list[Tensor]:
        """Queries, keys and values of all tokens and this rank's heads, from those of its tokens and all heads.

        `parts` is emptied, so that each is gone once it is sent. Fewer key heads than ranks are sent to several.

        Raises:
            UnsupportedModelError: the heads cannot be dealt out to the ranks.
        """
        heads = [part.shape[_HEADS] for part in parts]
        for number in heads:
            if number % self.size and self.size % number or heads[0] % self.size:
                raise UnsupportedModelError(
                    f"{heads[0]} attention heads with {heads[1]} key and value heads cannot be dealt out to the "
                    f"{self.size} ranks that share a sequence: the heads must be a multiple of them, and the key heads "
                    "a multiple or a divisor. Choose another sp_size"
                )
        found = []
        while parts:
            part = parts.pop(0)
            if part.shape[_HEADS] < self.size:
                part = part.repeat_interleave(self.size // part.shape[_HEADS], dim=_HEADS)
            found.append(_Exchange.apply(part, self, _HEADS, _TOKENS))
            del part
        return found

    def scatter(self, output: Tensor, along: AlongGradient | None = None) -> Tensor:
        """The attention output of this rank's tokens and all heads, from that of all tokens and its heads.

        Args:
            along: told in backward what to stand in for `output`, where the attention has saved that.
        """
        return _Scatter.apply(output, self, along)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """This rank's part of a (heads,) tensor."""
        return per_head.unflatten(0, (self.size, -1))[self.rank]

    def all_tokens(
        self, batch: int, num_tokens: int, device: torch.device, *tensors: Tensor | None
    ) -> list[Tensor | None]:
        """Tensors (..., tokens) of integers or bools, gathered over the ranks along the last dimension.

        Raises:
            UnsupportedModelError: on every rank, where the batches of two ranks differ in shape.
        """
        mine = [batch, num_tokens, *(-1 if tensor is None else tensor.dim() for tensor in tensors)]
        shapes = torch.stack(self._gathered(torch.tensor(mine, device=device))).tolist()
        for rank, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise UnsupportedModelError(
                    f"rank {rank} of a sequence has {shape[0]} x {shape[1]} tokens and rank 0 has {shapes[0][0]} x "
                    f"{shapes[0][1]} (or one has a mask or position_ids that the other has not). Pad the sequence to a "
                    f"multiple of {self.size} tokens"
                )
        # NCCL gathers no bools.
        return [
            None if tensor is None else torch.cat(self._gathered(tensor.to(device, torch.int64)), -1).to(tensor.dtype)
            for tensor in tensors
        ]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """`tensor` with dimension `split` dealt out to the ranks and dimension `join` put together from theirs."""
        return _join(self.all_to_all(self.deal(tensor, split).contiguous()), join)

    def deal(self, tensor: Tensor, split: int) -> Tensor:
        """A view (ranks, ...) of the parts of dimension `split`."""
        return tensor.unflatten(split, (self.size, -1)).movedim(split, 0)

    def all_to_all(self, send: Tensor) -> Tensor:
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.group)
        return received


def _join(parts: Tensor, dim: int) -> Tensor:
    """(ranks, ...) put together along a dimension; a copy where that is not how they lie."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


class AlongGradient:
    """Stands in for the attention output in the attention's backward.

    An attention kernel reads from its output o, in backward, one number for each token and head: the product of o with
    its gradient g. The part of o along g has the same product, and is made from g and one number. So o is not kept a
    second time, in the layout of heads: the rank's own part of it is kept for what follows the attention anyway.
    """

    def __init__(self):
        self.num_readers = 0
        self._readers_left = 0
        self._gradient: Tensor | None = None
        self._lengths: Tensor | None = None

    def tell(self, gradient: Tensor, lengths: Tensor) -> None:
        """g (batch, tokens, heads, d), and the length of o along it (batch, tokens, heads, 1)."""
        self._gradient, self._lengths, self._readers_left = gradient, lengths, self.num_readers

    def take(self) -> Tensor:
        """The part of o along g, in the dtype of g."""
        gradient, lengths = self._gradient, self._lengths
        self._readers_left -= 1
        if not self._readers_left:
            self._gradient = self._lengths = None
        scale = lengths / _norm(gradient)
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, memory_format=torch.contiguous_format))


def _norm(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dim=-1, keepdim=True, dtype=dtype).clamp_min(1e-30)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks, split, join):
        ctx.back = ranks, join, split
        return ranks.exchange(tensor, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ranks, split, join = ctx.back
        return ranks.exchange(gradient, split, join), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, ranks, along):
        ctx.ranks, ctx.along = ranks, along
        output = ranks.exchange(output, _TOKENS, _HEADS)
        if along is not None:
            ctx.save_for_backward(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ranks, along = ctx.ranks, ctx.along
        if along is None:
            return ranks.exchange(gradient, _HEADS, _TOKENS), None, None
        (output,) = ctx.saved_tensors
        lengths = _lengths_along(gradient, output)
        del output
        # One all-to-all takes both, as plain Ulysses has one here: the numbers ride behind the gradient, bit by bit.
        parts = [ranks.deal(part, _HEADS) for part in (gradient, lengths.view(gradient.dtype))]
        shapes, sizes = [part.shape[1:] for part in parts], [part[0].numel() for part in parts]
        send = gradient.new_empty(ranks.size, sum(sizes))
        for room, part in zip(send.split(sizes, 1), parts, strict=True):
            room.unflatten(1, part.shape[1:]).copy_(part)
        del parts, gradient
        received = ranks.all_to_all(send)
        del send
        gradient, lengths = (
            _join(room.unflatten(1, shape), _TOKENS).contiguous()
            for room, shape in zip(received.split(sizes, 1), shapes, strict=True)
        )
        along.tell(gradient, lengths.view(_wide(gradient.dtype)))
        return gradient, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _lengths_along(gradient: Tensor, output: Tensor) -> Tensor:
    """The length of `output` along `gradient`, (batch, tokens, heads, 1), in fp32 or wider."""
    dtype = _wide(gradient.dtype)
    pieces = [
        (g.to(dtype) * o.to(dtype)).sum(-1, keepdim=True) / _norm(g)
        for g, o in zip(gradient.split(_ROWS, _TOKENS), output.split(_ROWS, _TOKENS), strict=True)
    ]
    return torch.cat(pieces, _TOKENS)
