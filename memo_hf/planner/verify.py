"""The independent check of a placement. It shares only the data types with the solvers, and trusts nothing they say."""

from __future__ import annotations

from bisect import bisect_left, insort

from memo_hf.errors import PlanError
from memo_hf.planner.problem import Placement


def verify(placement: Placement, capacity: int | None = None) -> Placement:
    """Checks that no two buffers that live together share a byte, and that all lie in `[0, capacity)`.

    Walks through time with the live buffers sorted by address; a new one can only collide with its two neighbours.

    Args:
        placement: What to check; returned unchanged, so that calls chain.
        capacity: Bytes of the arena, or None for no limit.

    Raises:
        PlanError: names both buffers of a collision, or the buffer that lies outside the arena.
    """
    buffers, offsets = placement.problem.buffers, placement.offsets
    for buffer, offset in zip(buffers, offsets, strict=True):
        if offset < 0:
            raise PlanError(f"{_show(buffer, offset)} lies below the arena; the plan by {placement.method!r} is wrong")
        if capacity is not None and offset + buffer.size > capacity:
            raise PlanError(f"{_show(buffer, offset)} lies outside the capacity of {capacity} bytes; plan again")
    # At one time frees (0) come before allocations (1): lifetimes are half-open.
    events = sorted(
        event for i, b in enumerate(buffers) for event in ((b.lower, 1, i), (b.upper, 0, i))
    )  # fmt: skip
    live: list[tuple[int, int]] = []  # (offset, index)
    for _, is_allocation, i in events:
        entry = (offsets[i], i)
        if not is_allocation:
            del live[bisect_left(live, entry)]
            continue
        insort(live, entry)
        at = bisect_left(live, entry)
        for low, high in ((at - 1, at), (at, at + 1)):
            if low < 0 or high >= len(live):
                continue
            (below, j), (above, k) = live[low], live[high]
            if below + buffers[j].size > above:
                raise PlanError(
                    f"{_show(buffers[j], below)} and {_show(buffers[k], above)} live together and share bytes; "
                    f"the plan by {placement.method!r} is wrong"
                )
    return placement


def _show(buffer, offset) -> str:
    return f"buffer {buffer.id!r} (time [{buffer.lower}, {buffer.upper}), bytes [{offset}, {offset + buffer.size}))"
