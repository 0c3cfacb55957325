"""Host memory for swapped activations: slabs under a byte budget, carved into blocks that are used again.

Called by `engine`. It must not know tensors of the model, copies or groups; all calls come under the engine's lock.

A slab is an anonymous private mapping, not memory of torch's CPU allocator, so that whatever meters that allocator
sees device memory only. Free blocks keep their size until a request finds none that fits, and only then are neighbours
joined: a step with the sizes of the step before finds each block where it left it, and maps nothing. A new slab is a
whole number of the requested blocks and at most about 3 % of what is reserved (or one block), so that reserved bytes
stay near the peak payload where caching allocators take up to twice as much (case 89).
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable

import torch
from torch import Tensor

from memo_hf.errors import HostMemoryError
from memo_hf.units import format_bytes

ALIGNMENT = 64
_GROWTH = 32


class _Slab:
    """One mapping. Dropped, never closed by hand: closing it under a view that is still in use would be a crash."""

    __slots__ = ("bytes", "pinned", "serial", "size")

    def __init__(self, serial: int, size: int):
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A forked data loader would otherwise get a second copy of every page that is written after the fork.
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.serial, self.size, self.pinned = serial, size, False
        self.bytes: Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)


class Block:
    """A run of bytes of one slab; `nbytes` is what was asked for, `size` what is taken."""

    __slots__ = ("nbytes", "offset", "size", "slab")

    def __init__(self, slab: _Slab, offset: int, size: int):
        self.slab, self.offset, self.size, self.nbytes = slab, offset, size, 0

    def bytes(self) -> Tensor:
        """The payload as a flat uint8 tensor."""
        return self.slab.bytes[self.offset : self.offset + self.nbytes]


class HostPool:
    """Blocks of host memory under `budget_bytes`, which bounds what is reserved, not only what is used.

    Args:
        budget_bytes: upper bound of all slabs together.
        pin: locks the pages of a slab and says whether it did; RuntimeError means that it cannot.
        unpin: undoes `pin`.
    """

    def __init__(self, budget_bytes: int, pin: Callable[[Tensor], bool], unpin: Callable[[Tensor], None]):
        self.budget_bytes = budget_bytes
        self.payload_bytes = self.peak_payload_bytes = self.reserved_bytes = self.num_slabs_made = 0
        self._pin, self._unpin, self._may_pin = pin, unpin, True
        self._slabs: dict[int, _Slab] = {}
        self._free: list[Block] = []  # by size, then place

    @property
    def pinned(self) -> bool:
        """Whether there are slabs and all of them are pinned."""
        return bool(self._slabs) and all(slab.pinned for slab in self._slabs.values())

    def take(self, nbytes: int) -> Block | None:
        """A block of `nbytes` > 0 from the slabs there are (best fit), or None where none is large enough."""
        size = _round_up(nbytes, ALIGNMENT)
        place = bisect_left(self._free, (size, 0, 0), key=_by_size)
        if place == len(self._free):
            return None
        block = self._free.pop(place)
        if block.size > size:
            insort(self._free, Block(block.slab, block.offset + size, block.size - size), key=_by_size)
            block.size = size
        block.nbytes = nbytes
        self.payload_bytes += nbytes
        self.peak_payload_bytes = max(self.peak_payload_bytes, self.payload_bytes)
        return block

    def make_room(self, nbytes: int) -> None:
        """Join free blocks or map a slab, so that `take(nbytes)` finds room.

        Raises:
            HostMemoryError: the budget is spent, or the system refuses to map more.
        """
        block_size = _round_up(nbytes, ALIGNMENT)
        self._join_neighbours()
        if self._free and self._free[-1].size >= block_size:
            return
        size = _round_up(max(1, self.reserved_bytes // _GROWTH // block_size) * block_size, mmap.PAGESIZE)
        if self.reserved_bytes + size > self.budget_bytes:
            size = _round_up(block_size, mmap.PAGESIZE)
            self._unmap_free_slabs(self.reserved_bytes + size - self.budget_bytes)
        if self.reserved_bytes + size > self.budget_bytes:
            raise HostMemoryError(self._shortage(nbytes, "that is over the budget"))
        try:
            self._map(size)
        except OSError as failure:
            raise HostMemoryError(self._shortage(nbytes, f"the system refused to map it ({failure})")) from failure

    def reserve(self, nbytes: int) -> None:
        """Map, and pin, until `nbytes` are reserved. Does nothing where the budget or the system has no more."""
        size = _round_up(nbytes - self.reserved_bytes, mmap.PAGESIZE)
        if 0 < size <= self.budget_bytes - self.reserved_bytes:
            with contextlib.suppress(OSError):
                self._map(size)

    def _map(self, size: int) -> None:
        slab = _Slab(self.num_slabs_made, size)
        self._pin_slab(slab)
        self.num_slabs_made += 1
        self.reserved_bytes += size
        self._slabs[slab.serial] = slab
        insort(self._free, Block(slab, 0, size), key=_by_size)

    def give_back(self, block: Block) -> None:
        """Take a block back. Its memory is handed out again at once, so no copy may be under way on it."""
        if block.slab.bytes is None:
            return  # the pool was closed before the last handle died
        self.payload_bytes -= block.nbytes
        block.nbytes = 0
        insort(self._free, block, key=_by_size)

    def close(self) -> None:
        """Give every slab back to the system. No copy may be under way. Blocks still out become harmless."""
        for slab in list(self._slabs.values()):
            self._unmap(slab)
        self._free.clear()
        self.payload_bytes = 0

    def _join_neighbours(self) -> None:
        joined: list[Block] = []
        for block in sorted(self._free, key=lambda block: (block.slab.serial, block.offset)):
            last = joined[-1] if joined else None
            if last and last.slab is block.slab and last.offset + last.size == block.offset:
                last.size += block.size
            else:
                joined.append(block)
        self._free = sorted(joined, key=_by_size)

    def _unmap_free_slabs(self, excess: int) -> None:
        """Unmap wholly free slabs, which other lengths than today's left behind, until `excess` bytes are gone."""
        for block in [block for block in self._free if block.size == block.slab.size]:
            if excess <= 0:
                break
            self._free.remove(block)
            self._unmap(block.slab)
            excess -= block.size

    def _unmap(self, slab: _Slab) -> None:
        del self._slabs[slab.serial]
        self.reserved_bytes -= slab.size
        if slab.pinned:
            self._unpin(slab.bytes)
        slab.bytes = None

    def _pin_slab(self, slab: _Slab) -> None:
        if not self._may_pin:
            return
        try:
            slab.pinned = self._pin(slab.bytes)
        except RuntimeError as failure:
            self._may_pin = False
            warnings.warn(
                f"host memory could not be pinned ({format_bytes(slab.size)} on top of "
                f"{format_bytes(self.reserved_bytes)}: {failure}). Swapping goes on with pageable host memory, which "
                "copies slower and does not overlap. Device memory is not short; raise the limit on locked host memory "
                "(ulimit -l, or the container's)",
                stacklevel=2,
            )

    def _shortage(self, nbytes: int, why: str) -> str:
        return (
            f"no host memory for {format_bytes(nbytes)} of swapped activations: {why}. In use "
            f"{format_bytes(self.payload_bytes)}, reserved {format_bytes(self.reserved_bytes)}, budget "
            f"{format_bytes(self.budget_bytes)}. Raise host_memory, lower swap_fraction, or train on shorter sequences"
        )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _by_size(block: Block) -> tuple[int, int, int]:
    return block.size, block.slab.serial, block.offset
