"""Search over orders: random moves of the buffers that end too high, each order placed greedily. For any size.

Called by `placement.place` where no greedy order reaches the lower bound. Proves nothing unless it reaches that bound.
"""

from __future__ import annotations

import time

import numpy as np

from memo_hf.planner.heuristic import greedy
from memo_hf.planner.problem import Placement


def improve_order(best: Placement, deadline: float, goal: int, patience: int = 40, seed: int = 0) -> Placement:
    """Moves the buffers that end above the goal to random earlier places in the order, and places greedily again.

    Args:
        best: Where to start: its buffers by offset are the first order. Returned where nothing better is found.
        deadline: `time.monotonic` seconds at which to stop.
        goal: Bytes; a plan of no more ends the search.
        patience: Give up after so many attempts in a row that did not lower the peak.
        seed: Of the random moves, so that a plan can be made again.
    """
    problem, draw = best.problem, np.random.default_rng(seed)
    began = time.monotonic() - best.seconds
    order = np.argsort(np.array(best.offsets, dtype=np.int64), kind="stable")
    offsets = greedy(problem, order)
    current, failures = _excess(offsets, problem.size, goal), 0
    while failures < patience and best.peak > goal and time.monotonic() < deadline:
        high = np.flatnonzero(offsets + problem.size > goal)
        moved = high[draw.random(len(high)) < 0.7]
        rank = np.empty(len(order))
        rank[order] = np.arange(len(order))
        rank[moved] *= draw.random(len(moved))
        new_order = np.argsort(rank, kind="stable")
        new_offsets = greedy(problem, new_order)
        new = _excess(new_offsets, problem.size, goal)
        failures += 1
        if new <= current:
            order, offsets, current = new_order, new_offsets, new
        if goal + new[0] < best.peak:
            failures = 0
            best = Placement(problem, new_offsets, "order search", time.monotonic() - began)
    return best


def _excess(offsets, size, goal):
    """By how many bytes the highest buffer, and all together, pass the goal: what the search lowers."""
    excess = np.maximum(offsets + size - goal, 0)
    return int(excess.max()), int(excess.sum())
