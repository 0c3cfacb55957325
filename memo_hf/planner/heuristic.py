"""Greedy placement: buffers in a fixed order, each into the lowest or tightest gap. On training steps mostly optimal.

Called by `placement.place` before anything else. No single order is best on all traces, so a portfolio is tried until
one reaches the lower bound, which proves it optimal, or the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from memo_hf.planner.problem import Placement, Problem


def greedy(problem: Problem, order: np.ndarray, best_fit: bool = False) -> np.ndarray:
    """Offsets (int64) when buffers are placed in `order` (indices), each in the first or tightest gap that fits."""
    n = len(problem)
    lower, upper, size = problem.lower, problem.upper, problem.size
    offsets = np.zeros(n, dtype=np.int64)
    # What is placed, sorted by offset: lifetime start and end, then offset and end address.
    starts, ends, lows, highs = (np.empty(n, dtype=np.int64) for _ in range(4))
    for count, i in enumerate(order):
        conflicts = np.flatnonzero((starts[:count] < upper[i]) & (ends[:count] > lower[i]))
        offset = 0
        if len(conflicts):
            tops = np.maximum.accumulate(highs[conflicts])
            gaps = lows[conflicts]
            gaps[1:] -= tops[:-1]
            fits = np.flatnonzero(gaps >= size[i])
            if len(fits) == 0:
                offset = tops[-1]
            else:
                at = fits[np.argmin(gaps[fits])] if best_fit else fits[0]
                offset = tops[at - 1] if at else 0
        offsets[i] = offset
        at = np.searchsorted(lows[:count], offset)
        for column, value in ((starts, lower[i]), (ends, upper[i]), (lows, offset), (highs, offset + size[i])):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
    return offsets


def stack(problem: Problem, order: np.ndarray) -> np.ndarray:
    """Offsets (int64) when each buffer is put on top of those before it in `order` (indices) that it lives with."""
    offsets = np.zeros(len(problem), dtype=np.int64)
    tops = np.zeros(len(problem), dtype=np.int64)  # 0: not placed yet
    for i in order:
        below = (problem.lower < problem.upper[i]) & (problem.upper > problem.lower[i])
        offsets[i] = tops[below].max()
        tops[i] = offsets[i] + problem.size[i]
    return offsets


def orders(problem: Problem) -> Iterator[tuple[str, np.ndarray]]:
    """The portfolio: name and order (indices), roughly by how often each one wins.

    `contention` puts what is hardest to place first. `peaks` puts buffers that cross most of the moments when memory is
    full first, and then, of those that cross only one, pairs what dies before the next with what is born before it, by
    time: both moments stack without holes (optimal where `contention` was 0.8% off).
    """
    size, life = problem.size, problem.upper - problem.lower
    times, live = _profile(problem)
    crowd = contention(problem)
    full = times[live >= 0.999 * live.max()]
    before, after = np.searchsorted(full, problem.lower), np.searchsorted(full, problem.upper)
    turn = np.where((before == 0) & (after > 0), problem.upper, problem.lower)
    keys = {
        "peaks": (-size, turn, before - after),
        "contention": (problem.lower, -size, -crowd),
        "late contention": (-size, -problem.upper, -crowd),
        "early contention": (-size, problem.upper, -crowd),
        "size": (-life, -size),
        "area": (-size, -(size.astype(np.float64) * life)),
        "life": (-size, -life),
        "start": (-size, problem.lower),
    }
    for name, key in keys.items():
        yield name, np.lexsort(key)


def contention(problem: Problem) -> np.ndarray:
    """The most bytes (int64) alive at once during each buffer's life: how hard it is to place."""
    times, live = _profile(problem)
    spans = np.stack((np.searchsorted(times, problem.lower), np.searchsorted(times, problem.upper)), axis=1)
    return np.maximum.reduceat(live, spans.ravel())[::2]


def _profile(problem):
    """Moments at which the live bytes change, ascending, and the live bytes from each on."""
    times, which = np.unique(np.concatenate((problem.lower, problem.upper)), return_inverse=True)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, which, np.concatenate((problem.size, -problem.size)))
    return times, np.cumsum(change)


def portfolio(problem: Problem, deadline: float, goal: int) -> Placement:
    """The best of the greedy placements, up to the first with a peak of at most `goal` bytes.

    At least one is made, whatever the deadline (`time.monotonic` seconds).
    """
    began = time.monotonic()
    best = None
    for name, order in orders(problem):
        for best_fit in (False, True):
            if best is not None and (best.peak <= goal or time.monotonic() > deadline):
                return best
            offsets = greedy(problem, order, best_fit)
            if best is None or int((offsets + problem.size).max(initial=0)) < best.peak:
                method = f"greedy {name}, {'best' if best_fit else 'first'} fit"
                best = Placement(problem, offsets, method, time.monotonic() - began)
    return best
