"""A model of PyTorch's CUDA caching allocator: the bytes it would reserve for a trace, to compare a plan with.

Used by reports and benchmarks only. The rules (c10/cuda/CUDACachingAllocator, default settings): sizes are rounded up
to 512 bytes; up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB, above that a segment is the
size rounded up to 2 MiB. The smallest free block that fits is taken, and split where the rest is at least 512 bytes
(small) or more than 1 MiB (large). Freed blocks merge with free neighbours. Each stream has its own blocks. No segment
is ever given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from memo_hf.planner.trace import Trace

_ROUND = 512
_MIB = 2**20
_SMALL = _MIB
_SMALL_SEGMENT, _MIDDLE_SEGMENT, _MIDDLE, _LARGE_ROUND = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    pool: tuple
    address: int
    size: int
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class _Pools:
    """Free blocks by stream and kind, each sorted by size and then address."""

    def __init__(self):
        self.free: dict[tuple, list] = {}
        self.reserved = 0
        self.next_address = 0

    def allocate(self, size, stream):
        size = -(-max(size, 1) // _ROUND) * _ROUND
        small = size <= _SMALL
        pool = (stream, small)
        blocks = self.free.setdefault(pool, [])
        at = bisect_left(blocks, (size, -1))
        block = blocks.pop(at)[2] if at < len(blocks) else self._segment(size, pool)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            remainder = _Block(pool, block.address + size, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            self._release(remainder)
        return block

    def deallocate(self, block):
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            blocks = self.free[neighbour.pool]
            del blocks[bisect_left(blocks, (neighbour.size, neighbour.address))]
            low, high = (neighbour, block) if neighbour is block.before else (block, neighbour)
            low.size += high.size
            low.after = high.after
            if high.after is not None:
                high.after.before = low
            block = low
        self._release(block)

    def _release(self, block):
        block.free = True
        insort(self.free[block.pool], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _segment(self, size, pool):
        if size <= _SMALL:
            total = _SMALL_SEGMENT
        elif size < _MIDDLE:
            total = _MIDDLE_SEGMENT
        else:
            total = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        block = _Block(pool, self.next_address, total)
        self.next_address += total
        self.reserved += total
        return block


def reserved_bytes(trace: Trace) -> int:
    """Bytes that PyTorch's caching allocator would have reserved by the end of the trace, which is also its peak."""
    pools, live = _Pools(), {}
    for event in trace.events:
        if event.op == "malloc":
            if event.size > 0:
                live[event.id] = pools.allocate(event.size, event.stream)
        elif event.id in live:
            pools.deallocate(live.pop(event.id))
    return pools.reserved
