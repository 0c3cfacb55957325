"""What can be done to put-off logits without making them, by the names of torch's functions.

`loss.py` gets its stand-ins here. It knows nothing of models, nor of the head but that it can be run on rows.

- *selecting* tokens (indexing, slicing, `view(-1, V)`) is done on a tensor of row numbers;
- *row-wise* operations (casts, scaling, softcap, log_softmax) are noted and done again on each chunk of rows;
- *reductions* of a row (cross_entropy, gather, logsumexp, sum, argmax) run now, chunk by chunk, as jobs of the head.

Shapes, strides and shape errors come from doing each selection on a meta tensor, the twin; dtypes from doing the rest
on a tensor with no rows, the probe. So both are torch's own, under whatever autocast is on.

An operation takes (func, args, kwargs), a stand-in as the first argument, and returns the result or NotImplemented.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from memo_hf.layers.chunked_head import Consume, HeadCall, LossJob, RowJob, autocast_now
from memo_hf.layers.deferred_logits import DeferredLogits, derive, replace_stand_ins, wants_grad


def defer_logits(call: HeadCall, hidden: torch.Tensor) -> DeferredLogits | None:
    """The stand-in for `head(hidden)`, (..., width) -> (..., V), in the autograd graph of `hidden` and the parameters.

    None where the head cannot run on chunks. Its output's width and dtype are found by calling it on one row.
    """
    probe = call.probe()
    if probe is None:
        return None
    index = torch.arange(len(call.hidden), device=hidden.device).view(*call.lead, 1)
    twin = torch.empty(*call.lead, probe.shape[-1], dtype=probe.dtype, device="meta")
    return call.defer(hidden, lambda: DeferredLogits.make(call, OPERATIONS, index, None, False, twin, probe))


def _detach(func, args, kwargs):
    # Not linked: detached for good, unless an autograd node that is being applied links it (DDP, ZeRO-3).
    logits = args[0]
    with torch.no_grad():
        return derive(_same, (logits,), {}, logits.index, logits.twin, logits.probe, row_wise=True, is_view=True)


def _same(logits):
    return logits.view_as(logits)


def _contiguous(func, args, kwargs):
    logits = args[0]
    if logits.twin.is_contiguous():
        return logits
    return derive(func, args, kwargs, logits.index, logits.twin.contiguous(), logits.probe, row_wise=True)


def _row_wise(func, args, kwargs):
    """Notes an operation that treats every row of the logits alike."""
    logits = args[0]

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
    probe_args, probe_kwargs = replace_stand_ins(lambda other: other.probe, args, kwargs)
    with torch.no_grad():
        probe = func(*probe_args, **probe_kwargs)
    if probe is logits.probe:  # a cast to the dtype it has
        return logits
    if not isinstance(probe, torch.Tensor):  # the name of its type
        return probe
    if probe.device != logits.probe.device or probe.shape != logits.probe.shape:
        return NotImplemented
    twin = torch.empty_like(logits.twin, dtype=probe.dtype)
    return derive(func, args, kwargs, logits.index, twin, probe, row_wise=True)


def _softmax(func, args, kwargs):
    args, kwargs = _over_rows(args[0], args, kwargs)
    return NotImplemented if args is None else _row_wise(func, args, kwargs)


def _over_rows(logits, args, kwargs):
    """Arguments with `dim`, the second, as -1, which means the same on (rows, V); (None, None) for another dim."""
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
    return derive(func, args, kwargs, index, twin, logits.probe, row_wise=False, is_view=twin._base is not None)


def _getitem(func, args, kwargs):
    """Follows a selection of tokens, or notes a slice of the vocabulary."""
    logits, key = args
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is None or k is Ellipsis or type(k) is int or isinstance(k, (slice, torch.Tensor)) for k in keys):
        return NotImplemented
    masks = [k for k in keys if isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8)]
    num_dims = sum(k is not None and k is not Ellipsis for k in keys) + sum(mask.dim() - 1 for mask in masks)
    if num_dims == logits.dim() or any(k is Ellipsis for k in keys[:-1]):  # the last key is for the vocabulary
        *others, last = keys
        if not isinstance(last, slice):
            return NotImplemented
        if last != slice(None):
            if not all(k is Ellipsis or (isinstance(k, slice) and k == slice(None)) for k in others):
                return NotImplemented
            args, twin, probe = (logits, (..., last)), logits.twin[..., last], logits.probe[..., last]
            return derive(func, args, {}, logits.index, twin, probe, row_wise=True, is_view=True)
    index = logits.index[key]
    copies = any(isinstance(k, torch.Tensor) for k in keys)
    lead, width = index.shape[:-1], logits.shape[-1]
    twin = logits.twin.new_empty(*lead, width) if copies else logits.twin[key]
    if index.shape[-1:] != (1,) or twin.shape != (*lead, width):
        return NotImplemented
    return derive(func, (logits, key), {}, index, twin, logits.probe, row_wise=False, is_view=not copies)


def _reduce(func, args, kwargs):
    """A reduction of each row to one value, or to a few."""
    logits = args[0]
    args, kwargs = _over_rows(logits, args, kwargs)
    _, *others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)] or [None]
    per_row = all(type(other) is torch.Tensor and other.shape[:-1] == logits.shape[:-1] for other in others)
    if args is None or logits.dim() < 2 or not per_row:
        return NotImplemented
    autocast = autocast_now(logits.device)

    def on_rows(rows, *row_args):
        stand_in = iter([rows, *row_args])
        new_args, new_kwargs = tree_map(lambda a: next(stand_in) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        with autocast:
            return func(*new_args, **new_kwargs)

    row_args = [other.flatten(0, -2) for other in others]
    result = Consume.apply(RowJob(logits.call, logits.evaluate, on_rows, logits.index.flatten(), row_args), logits)
    return result.unflatten(0, logits.shape[:-1])


def _cross_entropy(func, args, kwargs):
    """`torch.nn.functional.cross_entropy` of (rows, V) logits and (rows,) labels. Ignored rows are not computed.

    The loss of half-precision logits is computed and summed in fp32, then rounded.
    """
    if len(args) != 2 or any(kwargs.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return NotImplemented
    logits, target = args
    if logits.dim() != 2 or type(target) is not torch.Tensor or target.is_floating_point():
        return NotImplemented
    reduction, ignore_index = kwargs.get("reduction", "mean"), kwargs.get("ignore_index", -100)
    options = {"label_smoothing": kwargs.get("label_smoothing", 0.0), "ignore_index": ignore_index}
    functional.cross_entropy(logits.twin, target.to("meta"), reduction=reduction, **options)  # torch's own shape errors
    dtype = functional.cross_entropy(logits.probe, target[:0], reduction="sum").dtype
    call, rows = logits.call, logits.index.flatten()

    def loss(chunk, labels, reduction="sum"):
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        return functional.cross_entropy(chunk, labels, reduction=reduction, **options)

    def row_losses(rows, labels):
        each = functools.partial(loss, reduction="none")
        return Consume.apply(RowJob(call, logits.evaluate, each, rows, [labels]), logits)

    if reduction == "none":
        return row_losses(rows, target).to(dtype)
    counted = (target != ignore_index).nonzero().squeeze(1)
    rows, labels = rows[counted], target[counted]
    if logits.probe.dtype == torch.float16 or call.hidden.dtype == torch.float16:
        total = row_losses(rows, labels).sum()  # gradients want the loss scale, which only backward knows
    else:
        total = Consume.apply(LossJob(call, logits.evaluate, loss, rows, labels, wants_grad(logits)), logits)
    if reduction == "mean":
        total = total / len(rows) if len(rows) else total + float("nan")  # as torch: nan, with zero gradients
    return total.to(dtype)


_ROW_WISE = (
    "float double half bfloat16 to type type_as clone neg __neg__ negative tanh exp sigmoid clamp "
    "mul multiply __mul__ __rmul__ div divide true_divide __truediv__ __rtruediv__ __rdiv__ "
    "add __add__ __radd__ sub subtract __sub__ __rsub__ rsub"
)
OPERATIONS = {
    **dict.fromkeys(_ROW_WISE.split(), _row_wise),
    **dict.fromkeys(["log_softmax", "softmax"], _softmax),
    **dict.fromkeys(["view", "reshape", "flatten", "squeeze", "unsqueeze"], _reshape),
    **dict.fromkeys(["gather", "logsumexp", "sum", "argmax", "amax"], _reduce),
    **dict.fromkeys(["detach", "alias"], _detach),
    "contiguous": _contiguous,
    "__getitem__": _getitem,
    "cross_entropy": _cross_entropy,
}
