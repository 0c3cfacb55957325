"""`DeferredLogits`: a tensor that has the logits' shape and dtype, and no storage.

`loss.py` makes it in place of the head's output. It knows tensors, not models. What is done to it is treated by kind:

- *selecting* tokens (indexing, slicing, `view(-1, V)`) is done on a tensor of row numbers;
- *row-wise* operations (casts, scaling, softcap, log_softmax) are noted and done again on each chunk of rows;
- *reductions* of a row (cross_entropy, gather, logsumexp, sum, argmax) run now, chunk by chunk: see `chunked_head.py`;
- anything else gets the real logits: right, as large as in the stock model, with one warning that names the operation.

Shapes, strides and shape errors come from doing each operation on a meta tensor, the twin; dtypes from doing it on a tensor
with no rows, the probe. So both are torch's own, under whatever autocast is on.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.chunked_head import Consume, HeadCall, LossJob, RowJob, WholeJob, autocast_now

_ROW_WISE = frozenset(
    [
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "neg",
        "__neg__",
        "negative",
        "tanh",
        "exp",
        "sigmoid",
        "clamp",
        "mul",
        "multiply",
        "__mul__",
        "__rmul__",
        "div",
        "divide",
        "true_divide",
        "__truediv__",
        "__rtruediv__",
        "__rdiv__",
        "add",
        "__add__",
        "__radd__",
        "sub",
        "subtract",
        "__sub__",
        "__rsub__",
        "rsub",
        "log_softmax",
        "softmax",
    ]
)
_SELECTING = frozenset(["view", "reshape", "flatten"])
_REDUCING = frozenset(["gather", "logsumexp", "sum", "argmax", "amax"])
# Answered from the wrapper itself. Attributes arrive as `__get__` of the attribute's descriptor.
_METADATA = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "__len__",
        "__hash__",
    ]
)
_DATA_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
_IN_PLACE = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"])


class DeferredLogits(torch.Tensor):
    """Logits that do not exist yet. Made by `defer_logits` and by what is done to the result."""

    call: HeadCall  # the head's call that was put off
    index: torch.Tensor  # (*shape[:-1], 1) int64: row of call.hidden that each row of the logits comes from
    recipe: tuple | None  # (function, args, kwargs, autocast, row_wise) that made it; None for the head's own output
    is_view: bool  # whether it shares the storage, had it one, of recipe's first argument
    num_children: int  # how many others were made of it
    twin: torch.Tensor  # meta tensor of this shape and these strides
    probe: torch.Tensor  # real tensor (0, V) of this dtype
    materialised: torch.Tensor | None  # the logits, once something has needed them

    @staticmethod
    def _make(call, index, recipe, view, twin, probe):
        self = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, twin.shape, strides=twin.stride(), dtype=probe.dtype, device=probe.device
        )
        self.call, self.index, self.recipe, self.is_view, self.twin, self.probe = call, index, recipe, view, twin, probe
        self.num_children, self.materialised = 0, None
        return self

    def __repr__(self, **_):
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        plain = name in _METADATA or name in ("__set__", "__delete__")
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
        args, kwargs = _replace(lambda logits: logits.evaluate(chunk), args, kwargs)
        with autocast:
            return func(*args, **kwargs)

    def materialise(self) -> torch.Tensor:
        """The logits themselves, in the graph, made once; views of one tensor stay views of one tensor."""
        if self.materialised is None:
            if self.recipe is None:
                self.materialised = Consume.apply(WholeJob(self.call, _wants_grad(self)), self)
            else:
                func, args, kwargs, autocast, _ = self.recipe
                args, kwargs = _replace(lambda logits: logits.materialise(), args, kwargs)
                with autocast:
                    self.materialised = func(*args, **kwargs)
        return self.materialised


def defer_logits(call: HeadCall, hidden: torch.Tensor) -> DeferredLogits:
    """The stand-in for `head(hidden)`, (..., width) -> (..., V), in the autograd graph of `hidden` and the parameters.

    The head must treat each row by itself. Its output's width and dtype are found by calling it on no rows.
    """
    with torch.no_grad(), call.autocast:
        probe = call.forward(call.hidden[:0])
    index = torch.arange(len(call.hidden), device=hidden.device).view(*call.lead, 1)
    twin = torch.empty(*call.lead, probe.shape[-1], dtype=probe.dtype, device="meta")
    return call.defer(hidden, lambda: DeferredLogits._make(call, index, None, False, twin, probe))


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


def _replace(function, args, kwargs):
    """Arguments with every stand-in replaced by `function(stand-in)`."""
    return tree_map(lambda arg: function(arg) if isinstance(arg, DeferredLogits) else arg, (args, kwargs))


def _stand_ins(args, kwargs):
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]


def _wants_grad(logits) -> bool:
    return torch.is_grad_enabled() and logits.requires_grad


def _answer(name, func, args, kwargs):
    """`func(*args, **kwargs)`: without the logits where there is a way, on the real ones otherwise."""
    stand_ins = _stand_ins(args, kwargs)
    if isinstance(args[0] if args else None, DeferredLogits) and all(s.materialised is None for s in stand_ins):
        result = _without_logits(name, func, args, kwargs)
        if result is not NotImplemented:
            return result
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    for logits in stand_ins:
        if logits.materialised is None:
            if in_place and not _may_change(logits):
                raise UnsupportedModelError(
                    f"{name} would change logits of shape {tuple(logits.shape)} in place after something else was made of "
                    "them, which memo_hf cannot follow. Use the out-of-place operation, or set chunked_loss=False."
                )
            logits.call.on_whole(name, logits)
    args, kwargs = _replace(lambda logits: logits.materialise(), args, kwargs)
    return func(*args, **kwargs)


def _may_change(logits) -> bool:
    """Whether nothing else has been made of the logits, nor of what they are a view of."""
    num_children = 0
    while logits.num_children == num_children:
        if not logits.is_view:
            return True
        logits, num_children = logits.recipe[1][0], 1
    return False


def _without_logits(name, func, args, kwargs):
    if name in ("detach", "alias"):
        return _derive(torch.Tensor.detach, args[:1], {}, args[0].index, args[0].twin, args[0].probe, True, view=True)
    if name == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    if name in _REDUCING:
        return _reduce(func, args, kwargs)
    if name in _ROW_WISE:
        return _row_wise(name, func, args, kwargs)
    if name in _SELECTING:
        return _reshape(func, args, kwargs)
    if name == "__getitem__":
        return _getitem(func, *args)
    return NotImplemented


def _derive(func, args, kwargs, index, twin, probe, row_wise, view):
    parents = _stand_ins(args, kwargs)
    for parent in parents:
        parent.num_children += 1
    call, recipe = parents[0].call, (func, args, kwargs, autocast_now(probe.device), row_wise)
    with torch.set_grad_enabled(torch.is_grad_enabled() and func is not torch.Tensor.detach):
        return _Derive.apply(lambda: DeferredLogits._make(call, index, recipe, view, twin, probe), *parents)


def _row_wise(name, func, args, kwargs):
    """Notes an operation that treats every row of the logits alike."""
    logits = args[0]
    if name == "contiguous":
        if logits.twin.is_contiguous():
            return logits
        return _derive(func, args, kwargs, logits.index, logits.twin.contiguous(), logits.probe, True, view=False)
    if name in ("log_softmax", "softmax"):
        args, kwargs = _over_rows(logits, args, kwargs)
        if args is None:
            return NotImplemented

    def operand(value):
        if isinstance(value, DeferredLogits):
            return value if value.index is logits.index and value.shape == logits.shape else NotImplemented
        if not isinstance(value, torch.Tensor):
            return value
        alike = not value.requires_grad and value.dim() <= logits.dim() and value.shape[:-1].numel() == 1
        return value.reshape(value.shape[-1:]) if alike else NotImplemented

    args, kwargs = tree_map(operand, (args, kwargs))
    if any(value is NotImplemented for value in tree_leaves((args, kwargs))):
        return NotImplemented
    probe_args, probe_kwargs = _replace(lambda other: other.probe, args, kwargs)
    with torch.no_grad():
        probe = func(*probe_args, **probe_kwargs)
    if probe is logits.probe:  # a cast to the dtype it has
        return logits
    if probe.device != logits.probe.device or probe.shape != logits.probe.shape:
        return NotImplemented
    twin = torch.empty_like(logits.twin, dtype=probe.dtype)
    return _derive(func, args, kwargs, logits.index, twin, probe, True, view=False)


def _over_rows(logits, args, kwargs):
    """The arguments with `dim`, the second, as -1, so that they mean the same on (rows, V); (None, None) for another dim."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or dim not in (-1, logits.dim() - 1):
        return None, None
    return (args, {**kwargs, "dim": -1}) if "dim" in kwargs else ((args[0], -1, *args[2:]), kwargs)


def _reshape(func, args, kwargs):
    """Follows a reshape that leaves rows whole."""
    logits = args[0]
    twin = func(logits.twin, *args[1:], **kwargs)
    if twin.dtype != logits.twin.dtype or twin.dim() == 0 or twin.shape[-1] != logits.shape[-1]:
        return NotImplemented
    index = logits.index.reshape(*twin.shape[:-1], 1)
    return _derive(func, args, kwargs, index, twin, logits.probe, False, view=twin._base is not None)


def _getitem(func, logits, key):
    """Follows a selection of tokens, or notes a slice of the vocabulary."""
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is None or k is Ellipsis or type(k) is int or isinstance(k, (slice, torch.Tensor)) for k in keys):
        return NotImplemented
    masks = [k for k in keys if isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8)]
    num_dims = sum(k is not None and k is not Ellipsis for k in keys) + sum(mask.dim() - 1 for mask in masks)
    if num_dims == logits.dim():  # the last key is for the vocabulary
        *others, last = keys
        if not isinstance(last, slice):
            return NotImplemented
        if last != slice(None):
            if any(k is not Ellipsis and k != slice(None) for k in others):
                return NotImplemented
            args, twin, probe = (logits, (..., last)), logits.twin[..., last], logits.probe[..., last]
            return _derive(func, args, {}, logits.index, twin, probe, True, view=True)
    index = logits.index[key]
    copies = any(isinstance(k, torch.Tensor) for k in keys)
    lead, width = index.shape[:-1], logits.shape[-1]
    twin = logits.twin.new_empty(*lead, width) if copies else logits.twin[key]
    if index.shape[-1:] != (1,) or twin.shape != (*lead, width):
        return NotImplemented
    return _derive(func, (logits, key), {}, index, twin, logits.probe, False, view=not copies)


def _reduce(func, args, kwargs):
    """A reduction of each row to one value, or to a few."""
    logits = args[0]
    args, kwargs = _over_rows(logits, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if args is None or any(type(t) is not torch.Tensor or t.shape[:-1] != logits.shape[:-1] for t in tensors[1:]):
        return NotImplemented
    autocast, lead = autocast_now(logits.device), logits.dim() - 1

    def on_rows(rows, *row_args):
        stand_in = iter([rows, *row_args])
        new_args, new_kwargs = tree_map(lambda a: next(stand_in) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        with autocast:
            return func(*new_args, **new_kwargs)

    row_args = [tensor.flatten(0, lead - 1) for tensor in tensors[1:]]
    job = RowJob(logits.call, logits.evaluate, on_rows, logits.index.flatten(), row_args)
    result = Consume.apply(job, logits)
    return result.unflatten(0, logits.shape[:-1])


def _cross_entropy(
    logits,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """`torch.nn.functional.cross_entropy` of (rows, V) logits and (rows,) labels. Rows that are ignored are not computed.

    The loss of half-precision logits is computed and summed in fp32, then rounded.
    """
    legacy = size_average is not None or reduce is not None
    if (
        weight is not None
        or legacy
        or logits.dim() != 2
        or type(target) is not torch.Tensor
        or target.is_floating_point()
    ):
        return NotImplemented
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    functional.cross_entropy(logits.twin, target.to("meta"), reduction=reduction, **options)  # torch's own shape errors
    dtype = functional.cross_entropy(logits.probe, target[:0], reduction="sum").dtype
    call, rows = logits.call, logits.index.flatten()

    def loss(chunk, labels, reduction="sum"):
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        return functional.cross_entropy(chunk, labels, reduction=reduction, **options)

    def row_losses(rows, labels):
        return Consume.apply(
            RowJob(call, logits.evaluate, lambda *args: loss(*args, reduction="none"), rows, [labels]), logits
        )

    if reduction == "none":
        return row_losses(rows, target).to(dtype)
    counts = target != ignore_index
    rows, labels = rows[counts], target[counts]
    if logits.probe.dtype == torch.float16 or call.hidden.dtype == torch.float16:
        total = row_losses(rows, labels).sum()  # gradients want the loss scale, which only backward knows
    else:
        total = Consume.apply(LossJob(call, logits.evaluate, loss, rows, labels, _wants_grad(logits)), logits)
    if reduction == "mean":
        total = total / len(rows) if len(rows) else total + float("nan")  # as torch: no gradient where all are ignored
    return total.to(dtype)
