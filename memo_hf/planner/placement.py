"""`place`: the best addresses that can be found in a given time. The front door of address planning.

Called by the command line, by the bi-level planner and, beside training, for a recorded step. Greedy orders come first
and are mostly optimal; searches follow where they are not. Whatever happens, the best plan so far is returned, and it
is checked.
"""

from __future__ import annotations

import time

from memo_hf.errors import PlanError
from memo_hf.planner import extras, mip
from memo_hf.planner.core import core_search
from memo_hf.planner.heuristic import portfolio
from memo_hf.planner.problem import Placement, Problem
from memo_hf.planner.search import improve_order
from memo_hf.planner.tree import tree_search
from memo_hf.planner.verify import verify

METHODS = {
    "greedy": None,
    "tree": tree_search,
    "core": core_search,
    "order": improve_order,
    "mip": mip.mip_search,
    "cbc": lambda best, deadline, goal: mip.mip_search(best, deadline, goal, solver="cbc"),
    "cpsat": extras.cpsat_search,
    "supermalloc": extras.supermalloc_search,
}
_PACKAGE = {"cpsat": "ortools", "supermalloc": "omnimalloc"}
_AUTO_PAIRS = 700  # overlapping pairs that HiGHS can prove in a minute


def place(problem: Problem, capacity: int | None = None, time_limit: float = 10.0, method: str = "auto") -> Placement:
    """Addresses with the lowest peak that is found, verified.

    Args:
        problem: The buffers.
        capacity: Bytes of the arena: a plan of no more is good enough. None: look for the lowest peak. Where it cannot
            be met the best plan is returned all the same; compare its `peak`.
        time_limit: Seconds to search. At least one greedy plan is made, whatever it takes.
        method: "auto", or one of `METHODS` after the greedy orders.

    Raises:
        PlanError: unknown method, one whose package is not installed, or a plan that fails the check (a bug of ours).
    """
    if method != "auto" and method not in METHODS:
        raise PlanError(f"unknown method {method!r}; the methods are {['auto', *METHODS]}")
    package = _PACKAGE.get(method)
    if package and not extras.installed(package):
        raise PlanError(f"method {method!r} needs {package}, which is not installed; pip install {package}")
    if not problem.buffers:
        return Placement(problem, (), "nothing to place")
    deadline = time.monotonic() + time_limit
    goal = max(capacity or 0, problem.lower_bound)
    best = portfolio(problem, deadline, goal)
    for search, share in _searches(problem, method):
        left = deadline - time.monotonic()
        if best.peak <= goal or best.proved or left <= 0:
            break
        best = search(best, time.monotonic() + share * left, goal)
    return verify(best)


def _searches(problem, method):
    """The searches to run one after the other, each with the share it may take of the time that is left."""
    if method == "greedy":
        return
    if method != "auto":
        yield METHODS[method], 1.0
        return
    yield core_search, 0.5
    yield improve_order, 0.2
    if extras.installed("omnimalloc"):
        yield extras.supermalloc_search, 0.5
    yield tree_search, 0.8
    if extras.installed("ortools") and len(problem) <= extras.MOST_CPSAT_BUFFERS:
        yield extras.cpsat_search, 0.8
    if mip.count_pairs(problem) <= _AUTO_PAIRS:
        yield mip.mip_search, 1.0
    yield improve_order, 1.0
