"""Tensors that stand where nobody reads: a shape and a dtype, whose operators are looked up instead of run.

In finish, queries and keys are not wanted, but the layer's own code still turns and rotates them. As plain meta tensors
each of these operators costs a tenth of a millisecond of Python, at every chunk; their results only depend on what came
before, so they are made once and found again. Used by `roles` and `call`. Knows no layer.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_MOST = 4096  # results that are kept; shapes come and go with the lengths of batches
_results: dict = {}
_serials = itertools.count()


class Unmade(Tensor):
    """A meta tensor that remembers what operators made of it. Values asked of it raise, as of any meta tensor."""

    serial: int

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        try:
            key = (function, _known_by(args), _known_by(kwargs))
            if key in _results:
                return _results[key]
        except TypeError:  # An argument that is not hashable.
            key = None
        # Under a mode, such as the tracing one, results would be of that mode.
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
            result = _map(_mark, function(*_map(_plain, args), **_map(_plain, kwargs or {})))
        return result if key is None else _keep(key, result)


def unmade(shape: tuple[int, ...], dtype: torch.dtype) -> Unmade:
    """An `Unmade` of this shape, contiguous; the same one each time."""
    key = ("unmade", shape, dtype)
    found = _results.get(key)
    return _keep(key, _mark(torch.empty(shape, dtype=dtype, device="meta"))) if found is None else found


def _keep(key, result):
    if len(_results) >= _MOST:
        _results.clear()
    _results[key] = result
    return result


def _mark(item):
    if type(item) is not Tensor:
        return item
    marked = item.as_subclass(Unmade)
    marked.serial = next(_serials)  # Not its id, which another one may get once this one is gone.
    return marked


def _plain(item):
    if isinstance(item, Unmade):
        return item.as_subclass(Tensor)
    if isinstance(item, Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return item


def _map(function, value):
    if isinstance(value, list | tuple) and not hasattr(value, "_fields") and type(value) is not torch.Size:
        return type(value)(_map(function, item) for item in value)
    if type(value) is dict:
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


def _known_by(value):
    """What tells an argument from others, hashable."""
    if isinstance(value, Unmade):
        return value.__dict__["serial"]
    if isinstance(value, Tensor):
        return "tensor", value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_known_by, value))
    if type(value) is dict:
        return tuple((key, _known_by(item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return type(value), value
