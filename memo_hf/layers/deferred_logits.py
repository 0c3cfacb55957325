"""`DeferredLogits`: a tensor that has the logits' shape and dtype, and no storage.

`loss.py` puts it in place of the head's output. It knows tensors, not models. What is done to it is answered in one of
three ways:

- shape, dtype and the like, hooks and `repr`: from the wrapper;
- what `logits_ops.py` has an operation for: by a new stand-in, or by running the head in chunks;
- anything else: on the real logits, as right and as large as in the stock model, and `HeadCall.on_whole` is told.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.chunked_head import Consume, HeadCall, WholeJob, autocast_now

_METADATA = frozenset(
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex "
    "is_signed get_device register_hook retain_grad requires_grad_ __len__ __hash__ __set__ __delete__".split()
)
# Attributes arrive as `__get__` of their descriptors; all but these are metadata.
_DATA_ATTRIBUTES = frozenset("T mT H mH real imag".split())
_IN_PLACE = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__".split())


class DeferredLogits(torch.Tensor):
    """Logits that do not exist yet. Made by `defer_logits` and by what is done to the result."""

    call: HeadCall  # the head's call that was put off
    operations: dict[str, Callable]  # name of a torch function -> operation(func, args, kwargs), see logits_ops.py
    index: torch.Tensor  # (*shape[:-1], 1) int64: row of call.hidden that each row of the logits comes from
    recipe: tuple | None  # (function, args, kwargs, autocast, row_wise) that made it; None for the head's own output
    is_view: bool  # whether it shares the storage, had it one, of recipe's first argument
    num_children: int  # how many others were made of it
    twin: torch.Tensor  # meta tensor of this shape and these strides
    probe: torch.Tensor  # real tensor (0, V) of this dtype
    materialised: torch.Tensor | None  # the logits, once something has needed them

    @staticmethod
    def make(call, operations, index, recipe, is_view, twin, probe) -> DeferredLogits:
        """A stand-in outside any graph: `HeadCall.defer` and `derive` put it into one."""
        self = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, twin.shape, strides=twin.stride(), dtype=probe.dtype, device=probe.device
        )
        self.call, self.operations, self.index, self.recipe, self.is_view = call, operations, index, recipe, is_view
        self.twin, self.probe, self.num_children, self.materialised = twin, probe, 0, None
        return self

    def __repr__(self, **_):
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        plain = name in _METADATA
        if name == "__get__":
            name = func.__self__.__name__
            plain = name not in _DATA_ATTRIBUTES
            if name == "data":
                name, func, args, plain = "detach", torch.Tensor.detach, args[:1], False
        if plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _answer(name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Reached where Python's functions are bypassed: from autograd's own C++.
        return _answer(func.overloadpacket.__name__, func, args, kwargs or {})

    def evaluate(self, chunk: torch.Tensor) -> torch.Tensor:
        """Head output (rows, V) -> these logits' rows, by what was noted. Selections are none of its business."""
        if self.recipe is None:
            return chunk
        func, args, kwargs, autocast, row_wise = self.recipe
        if not row_wise:
            return args[0].evaluate(chunk)
        args, kwargs = replace_stand_ins(lambda logits: logits.evaluate(chunk), args, kwargs)
        with autocast:
            value = func(*args, **kwargs)
        return value if self.requires_grad else value.detach()

    def materialise(self, asked: DeferredLogits | None = None) -> torch.Tensor:
        """The logits themselves, in the graph, made once; views of one tensor stay views of one tensor.

        `asked` is the stand-in whose logits are needed: hooks on it are to run in backward. Whether there is a graph
        was settled when the stand-in was made, not by the grad mode of whoever needs the logits first.
        """
        if self.materialised is None:
            asked = self if asked is None or not asked.requires_grad else asked
            with torch.enable_grad():
                if self.recipe is None:
                    self.materialised = Consume.apply(WholeJob(self.call, self.requires_grad), asked)
                else:
                    func, args, kwargs, autocast, _ = self.recipe
                    args, kwargs = replace_stand_ins(lambda logits: logits.materialise(asked), args, kwargs)
                    with autocast:
                        value = func(*args, **kwargs)
                    self.materialised = value if self.requires_grad else value.detach()
        return self.materialised


class _Derive(torch.autograd.Function):
    """Links a stand-in to those it was made of. Carries no gradient: jobs write to the call's ledger instead."""

    @staticmethod
    def forward(ctx, make, *parents):
        ctx.set_materialize_grads(False)
        ctx.num_parents = len(parents)
        return make()

    @staticmethod
    def backward(ctx, _):
        return (None,) * (1 + ctx.num_parents)


def replace_stand_ins(function, args, kwargs):
    """(args, kwargs) with every stand-in replaced by `function(stand-in)`."""
    return tree_map(lambda arg: function(arg) if isinstance(arg, DeferredLogits) else arg, (args, kwargs))


def stand_ins_of(args, kwargs) -> list[DeferredLogits]:
    """The stand-ins among arguments."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]


def wants_grad(logits: DeferredLogits) -> bool:
    """Whether a backward pass may come through what is made of `logits` now."""
    return torch.is_grad_enabled() and logits.requires_grad


def _answer(name, func, args, kwargs):
    """`func(*args, **kwargs)`: without the logits where there is a way, on the real ones otherwise."""
    stand_ins = stand_ins_of(args, kwargs)
    if isinstance(args[0] if args else None, DeferredLogits) and all(s.materialised is None for s in stand_ins):
        operation = args[0].operations.get(name)
        result = NotImplemented if operation is None else operation(func, args, kwargs)
        if result is not NotImplemented:
            return result
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    for logits in stand_ins:
        if logits.materialised is None:
            if in_place and logits is args[0] and not _may_change(logits):
                raise UnsupportedModelError(
                    f"{name} would change logits of shape {tuple(logits.shape)} in place after something else was "
                    "made of them, which memo_hf cannot follow. Use the operation that is not in place, or set "
                    "chunked_loss=False."
                )
            logits.call.on_whole(name, logits)
    args, kwargs = replace_stand_ins(lambda logits: logits.materialise(), args, kwargs)
    return func(*args, **kwargs)


def _may_change(logits) -> bool:
    """Whether nothing else has been made of the logits, nor of what they are a view of."""
    num_children = 0
    while logits.num_children == num_children:
        if not logits.is_view:
            return True
        logits, num_children = logits.recipe[1][0], 1
    return False


def derive(func, args, kwargs, index, twin, probe, *, row_wise, is_view=False) -> DeferredLogits:
    """The stand-in for `func(*args, **kwargs)`, linked to those among its arguments.

    Args:
        func, args, kwargs: how it is made; on (rows, V) chunks if `row_wise`, otherwise on the real logits only.
        index, twin, probe, is_view: as in `DeferredLogits`.
    """
    parents = stand_ins_of(args, kwargs)
    for parent in parents:
        parent.num_children += 1
    first, recipe = parents[0], (func, args, kwargs, autocast_now(probe.device), row_wise)
    return _Derive.apply(
        lambda: DeferredLogits.make(first.call, first.operations, index, recipe, is_view, twin, probe), *parents
    )
