"""Core first: the few buffers that live when memory is nearly full are placed by themselves, all others around them.

Called by `placement.place` where no greedy order reaches the lower bound. A training step of thousands of buffers has
its peak in one layer, so its core is a hundred buffers or two, which greedy orders or the tree search place exactly in
no time; what is left has room.
"""

from __future__ import annotations

import time

import numpy as np

from memo_hf.planner.heuristic import contention, greedy, orders, portfolio
from memo_hf.planner.problem import Placement, Problem
from memo_hf.planner.tree import tree_search

_FULL = (0.99, 0.97, 0.9, 0.8, 0.7)  # of the lower bound: what is alive at such moments is the core
_LARGEST = 0.5  # of all buffers; a larger core is no easier than the whole
_CORE_SHARE = 0.3  # of the time that is left, for the tree search of one core


def core_search(best: Placement, deadline: float, goal: int) -> Placement:
    """Places cores of several sizes, and the rest greedily in each order of the portfolio.

    Args:
        best: Returned where nothing better is found.
        deadline: `time.monotonic` seconds at which to stop.
        goal: Bytes; a plan of no more ends the search.
    """
    problem, began = best.problem, time.monotonic() - best.seconds
    crowd, last_size = contention(problem), 0
    for full in _FULL:
        core = np.flatnonzero(crowd >= full * problem.lower_bound)
        if len(core) == last_size or len(core) > _LARGEST * len(problem):
            continue
        last_size = len(core)
        part = Problem(tuple(problem.buffers[i] for i in core))
        placed = portfolio(part, deadline, goal)
        if placed.peak > goal:
            placed = tree_search(placed, time.monotonic() + _CORE_SHARE * (deadline - time.monotonic()), goal)
        # In ascending order of offset each of them falls to where it is, or lower.
        first = core[np.argsort(np.array(placed.offsets), kind="stable")]
        for name, order in orders(problem):
            if best.peak <= goal or placed.peak >= best.peak or time.monotonic() > deadline:
                break
            offsets = greedy(problem, np.concatenate((first, order[~np.isin(order, core)])))
            if int((offsets + problem.size).max()) < best.peak:
                method = f"core of {len(core)} by {placed.method}, then greedy {name}"
                best = Placement(problem, offsets, method, time.monotonic() - began)
    return best
