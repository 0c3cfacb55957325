"""Search where greedy orders do not reach the lower bound: over orders for any size, over skylines for tight small problems.

Called by `placement.place` after the greedy portfolio. Both functions only ever return something better than what they got.
"""

from __future__ import annotations

import time

import numpy as np

from memo_hf.planner.heuristic import greedy
from memo_hf.planner.problem import Placement, Problem

_NEVER = np.int64(1) << 60  # above any address
_SHARPNESS = (30.0, 80.0, 8.0)  # how much more a nearly full section counts than an emptier one; which is best varies


def improve_order(best: Placement, deadline: float, patience: int = 40, seed: int = 0) -> Placement:
    """Moves the buffers that end above the lower bound to random earlier places in the order, and places greedily again.

    Args:
        best: Where to start: its buffers by offset are the first order.
        deadline: `time.monotonic` seconds at which to stop.
        patience: Give up after so many attempts in a row that did not lower the peak.
        seed: Of the random moves, so that a plan can be made again.
    """
    problem, began, draw = best.problem, time.monotonic(), np.random.default_rng(seed)
    bound, size = problem.lower_bound, problem.size

    def cost(offsets):
        excess = np.maximum(offsets + size - bound, 0)
        return int(excess.max()), int(excess.sum())

    order = np.argsort(np.array(best.offsets, dtype=np.int64), kind="stable")
    offsets = greedy(problem, order)
    current, failures = cost(offsets), 0
    while failures < patience and not best.proved and time.monotonic() < deadline:
        high = np.flatnonzero(offsets + size > bound)
        moved = high[draw.random(len(high)) < 0.7]
        rank = np.empty(len(order))
        rank[order] = np.arange(len(order))
        rank[moved] *= draw.random(len(moved))
        new_order = np.argsort(rank, kind="stable")
        new_offsets = greedy(problem, new_order)
        new = cost(new_offsets)
        failures += 1
        if new <= current:
            order, offsets, current = new_order, new_offsets, new
        if bound + new[0] < best.peak:
            failures = 0
            best = Placement(problem, new_offsets, "order search", time.monotonic() - began)
    return best


def search_skylines(best: Placement, deadline: float, capacity: int) -> Placement:
    """Beam searches at capacities between the lower bound and the best peak, ever wider, until `capacity` is met or time is up.

    Asking "does it fit in C?" near the lower bound prunes far more than walking down from a known plan.
    """
    problem, began = best.problem, time.monotonic()
    skylines = Skylines(problem)
    width = 8
    while best.peak > capacity and time.monotonic() < deadline:
        for step in (0.0, 0.125, 0.25, 0.5, 0.75):
            limit = int(capacity + (best.peak - 1 - capacity) * step)
            for sharpness in _SHARPNESS:
                offsets = skylines.beam(limit, width, sharpness, deadline)
                if offsets is not None:
                    best = Placement(problem, offsets, "skyline search", time.monotonic() - began)
                    break
            if best.peak <= limit or time.monotonic() > deadline:
                break
        width *= 2
    return best


class Skylines:
    """A problem as columns of equal live sets ("sections"), placed from the bottom up.

    Any plan can be pushed down and sorted by offset, so it is enough to put buffers on top of what lies below, lowest first.
    A state is, for each buffer not yet placed, the lowest offset it can still have, and for each section the bytes not yet
    placed. Where in some section the lowest such offset and those bytes exceed the capacity, the state is dead.
    """

    def __init__(self, problem: Problem):
        self.size = problem.size
        first, last, num_sections = sections(problem)
        self.overlaps = (first[:, None] < last[None]) & (first[None] < last[:, None])
        columns = np.arange(num_sections)[:, None]
        self.member = (first <= columns) & (columns < last)
        counts = self.member.sum(axis=1)
        self.members = np.nonzero(self.member)[1]  # buffers of section 0, then of section 1, ...
        self.section_starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        self.spans = np.stack((first, last), axis=1).ravel()

    @staticmethod
    def cost(problem: Problem) -> int:
        """About how many numbers one state of the search touches, for `place` to decide whether it pays."""
        first, last, _ = sections(problem)
        return int((last - first).sum())

    def beam(self, capacity: int, width: int, sharpness: float, deadline: float) -> np.ndarray | None:
        """Offsets of a plan within `capacity`, or None where none was found with `width` states kept at a time."""
        size, count = self.size, len(self.size)
        lowest = np.zeros((1, count), dtype=np.int64)  # lowest offset still possible, per state and buffer
        placed = np.zeros((1, count), dtype=bool)
        remaining = (self.member @ size)[None]  # bytes not placed, per state and section
        offsets = np.zeros((1, count), dtype=np.int64)
        for _ in range(count):
            if time.monotonic() > deadline:
                return None
            state, buffer = self._candidates(lowest, placed, remaining, capacity, width)
            offset = lowest[state, buffer]
            top = (offset + size[buffer])[:, None]
            new_lowest = np.where(self.overlaps[buffer], np.maximum(lowest[state], top), lowest[state])
            new_placed = placed[state]
            new_placed[np.arange(len(state)), buffer] = True
            new_remaining = remaining[state] - self.member[:, buffer].T * size[buffer][:, None]
            open_lowest = np.where(new_placed, _NEVER, new_lowest)
            floor = np.minimum.reduceat(open_lowest[:, self.members], self.section_starts, axis=1)
            need = np.where(floor < _NEVER, floor + new_remaining, 0)
            alive = np.flatnonzero((need <= capacity).all(axis=1))
            if len(alive) == 0:
                return None
            fill = need[alive] / capacity
            score = np.where(fill > 0, np.exp((fill - 1) * sharpness), 0).sum(axis=1)
            alive = alive[np.argsort(score, kind="stable")]
            # Of the states that placed the same buffers keep the first.
            _, unique = np.unique(np.packbits(new_placed[alive], axis=1), axis=0, return_index=True)
            keep = alive[np.sort(unique)[:width]]
            offsets = offsets[state[keep]]
            offsets[np.arange(len(keep)), buffer[keep]] = offset[keep]
            lowest, placed, remaining = new_lowest[keep], new_placed[keep], new_remaining[keep]
        return offsets[0]

    def _candidates(self, lowest, placed, remaining, capacity, width):
        """Pairs (state, buffer) worth trying: low, in a section with much left, and with no room for another below."""
        size = self.size
        open_lowest = np.where(placed, _NEVER, lowest)
        room_above = np.where(placed, _NEVER, lowest + size).min(axis=1)
        padded = np.concatenate((remaining, np.zeros((len(remaining), 1), dtype=remaining.dtype)), axis=1)
        left = np.maximum.reduceat(padded, self.spans, axis=1)[:, ::2]
        state, buffer = np.nonzero((open_lowest < room_above[:, None]) & (open_lowest + left <= capacity))
        order = np.lexsort((lowest[state, buffer] - 0.3 * left[state, buffer], state))
        state, buffer = state[order], buffer[order]
        rank = np.arange(len(state)) - np.searchsorted(state, state)
        keep = rank < max(4, 4 * width // len(lowest))
        return state[keep], buffer[keep]


def sections(problem: Problem) -> tuple[np.ndarray, np.ndarray, int]:
    """Each buffer's first and one-past-last section (int64), and their number. Two buffers live together exactly if these overlap.

    A section is a moment at which the set of live buffers is not contained in that of another moment near it.
    """
    count = len(problem)
    first, last = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    times = np.concatenate((problem.upper, problem.lower))
    section, grown = 0, False
    for event in np.argsort(times, kind="stable"):  # at one time frees come before allocations
        if event >= count:
            first[event - count], grown = section, True
        else:
            section += grown
            last[event], grown = section, False
    return first, last, section
