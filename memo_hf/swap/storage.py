"""Identity of storages and shapes of views: what may be swapped, what is the same, how a tensor is put together.

Called by `engine` and `group`. It must not know copies, groups or the host pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memo_hf.errors import MemoError


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in its storage. Offset and strides count elements of `dtype`, as torch's do."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())

    def on(self, buffer: Tensor) -> Tensor:
        """The tensor of this dtype and geometry on the storage of `buffer`."""
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), self.offset, self.size, self.stride)


class VersionWatch:
    """Notices in-place writes to a tensor between `put` and `get`.

    `saved_tensors_hooks` switch off torch's own check, so the engine makes it, at the same moment: when backward asks.

    Args:
        alias: shares the version counter of the watched tensor, as `detach()` and `memoryless_alias` give.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, alias: Tensor):
        self._alias = None if alias.is_inference() else alias  # inference tensors have no version
        self._version = 0 if self._alias is None else alias._version

    def check(self, label: str) -> None:
        """Raise `MemoError` where the tensor was written to since."""
        if self._alias is not None and self._alias._version != self._version:
            raise MemoError(
                f"a {self._alias.dtype} tensor saved for backward in {label or 'a layer'} was changed by an in-place "
                f"operation: it is at version {self._alias._version}, saved was version {self._version}. Use the "
                "out-of-place form of that operation"
            )


def memoryless_alias(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of `tensor` and nothing of its memory."""
    alias = tensor.detach()
    # Assigning data exchanges the storage and keeps the counter.
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """A hashable identity that no other storage takes as long as the key lives, even at the same address (case 33)."""
    return StorageWeakRef(tensor.untyped_storage())


def can_swap(tensor: Tensor, device: torch.device, types: tuple[type, ...]) -> bool:
    """Whether the bytes of `tensor` can leave `device` and come back: a strided tensor of `types` with elements there.

    Other types (DTensor, quantized wrappers) carry state that bytes do not hold, and lazy conjugation is a flag that a
    view on bytes loses. Inference tensors have no version to tell apart what was written between two puts.
    """
    return (
        type(tensor) in types
        and tensor.layout == torch.strided
        and tensor.device == device
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and tensor.numel() > 0
    )


def is_small_part(tensor: Tensor) -> bool:
    """Whether `tensor` reads less than half of its storage. Expanded dimensions count once."""
    read = tensor.numel() // math.prod(tensor.size(dim) for dim in _expanded(tensor))
    return 2 * read * tensor.element_size() < tensor.untyped_storage().nbytes()


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of `tensor` as a flat uint8 tensor; keeps the storage alive."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def dense_part(tensor: Tensor) -> Tensor:
    """A copy of what `tensor` reads on a storage of its own, with expanded dimensions at size 1 (see `dense_view`)."""
    once = tensor.detach()
    for dim in _expanded(tensor):
        once = once.narrow(dim, 0, 1)
    return once.clone(memory_format=torch.contiguous_format)


def dense_view(tensor: Tensor) -> View:
    """How `tensor` lies in the storage of `dense_part(tensor)`: row-major, expanded dimensions with stride 0."""
    expanded, stride, strides = _expanded(tensor), 1, []
    for dim in reversed(range(tensor.dim())):
        strides.append(0 if dim in expanded else stride)
        stride *= 1 if dim in expanded else tensor.size(dim)
    return View(tensor.dtype, tuple(tensor.size()), tuple(reversed(strides)), 0)


def _expanded(tensor: Tensor) -> list[int]:
    return [dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.size(dim) > 1]
