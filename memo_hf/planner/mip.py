"""The paper's mixed-integer programme for addresses (section 4.2), in PuLP, solved by HiGHS or else CBC.

Called by `placement.place` for small problems and by name. It is the reference that the other methods are compared
with; the tree search is faster. What grows is the number of overlapping pairs, one binary variable each.
"""

from __future__ import annotations

import time

import numpy as np

from memo_hf.errors import PlanError
from memo_hf.planner.heuristic import stack
from memo_hf.planner.problem import Placement, Problem

MOST_PAIRS = 20_000  # above this the model alone takes minutes and gigabytes
_TRUSTED_STEPS = 10_000  # with more steps between 0 and the peak than this, the solver's tolerances may hide one
_SCALE = 1000.0  # the best known peak in the model's units: big-M rows need numbers near 1


def count_pairs(problem: Problem) -> int:
    """How many pairs of buffers live together: those born in each one's life, and the pairs born at one time."""
    lower = np.sort(problem.lower)
    born_later = np.searchsorted(lower, problem.upper) - np.searchsorted(lower, problem.lower, side="right")
    _, twins = np.unique(lower, return_counts=True)
    return int(born_later.sum() + (twins * (twins - 1) // 2).sum())


def overlapping_pairs(problem: Problem) -> list[tuple[int, int]]:
    """The pairs (i, j), i < j, of buffers that live together."""
    pairs = []
    for i in range(len(problem)):
        later = slice(i + 1, None)
        together = (problem.lower[later] < problem.upper[i]) & (problem.upper[later] > problem.lower[i])
        pairs.extend((i, i + 1 + int(j)) for j in np.flatnonzero(together))
    return pairs


def mip_search(best: Placement, deadline: float, goal: int, solver: str = "highs") -> Placement:
    """Solves the programme below the best peak; the goal, at least the lower bound, is where it may stop.

    Without `M >= goal` HiGHS proves 15 to 20 buffers in a minute, with it 50 to 80: it can stop at the first plan that
    touches the bound, which nearly always exists. The values that a solver returns are rounded, so only the order of
    its offsets is used: the buffers are stacked in that order, in exact integers.

    Args:
        best: Its peak is the programme's capacity. Returned where nothing better is found.
        deadline: `time.monotonic` seconds at which to stop.
        goal: Bytes; a plan of no more ends the search.
        solver: "highs", with "cbc" as its stand-in where highspy is not installed.

    Raises:
        PlanError: more than `MOST_PAIRS` overlapping pairs.
    """
    problem = best.problem
    num_pairs = count_pairs(problem)
    if num_pairs > MOST_PAIRS:
        raise PlanError(
            f"the MIP would have {num_pairs} overlapping pairs; the limit is {MOST_PAIRS}. Use method 'auto' or 'tree'"
        )
    began = time.monotonic() - best.seconds
    order, proved_bound = _solve(problem, best.peak, goal, deadline, solver)
    found = Placement(problem, stack(problem, order), f"MIP, {solver}")
    better = found if found.peak < best.peak else best
    # Below the goal nothing was looked for. And a bound is a float: it must lie within half of the step between sizes.
    unit = int(np.gcd.reduce(problem.size))
    proved = better.proved or (
        proved_bound > max(goal, better.peak - unit / 2) and better.peak <= _TRUSTED_STEPS * unit
    )
    return Placement(problem, better.offsets, better.method, time.monotonic() - began, proved)


def _solve(problem, capacity, goal, deadline, solver):
    """The buffers in ascending order of the solver's offsets, and the peak in bytes that it proved least, or 0."""
    import pulp  # half a second to import, and `memo-hf` must start fast

    from memo_hf.planner.solver import backend, run

    size = problem.size / capacity * _SCALE
    model = pulp.LpProblem("addresses", pulp.LpMinimize)
    peak = model.add_variable("peak", lowBound=goal / capacity * _SCALE, upBound=_SCALE)
    model += peak
    offsets = [model.add_variable(f"offset_{i}", lowBound=0, upBound=_SCALE - s) for i, s in enumerate(size)]
    for offset, s in zip(offsets, size, strict=True):
        model += offset + s <= peak
    for i, j in overlapping_pairs(problem):
        above = model.add_variable(f"above_{i}_{j}", cat=pulp.LpBinary)  # 0: i lies below j
        model += offsets[i] + size[i] <= offsets[j] + above * _SCALE
        model += offsets[j] + size[j] <= offsets[i] + (1 - above) * _SCALE
    # The relative gap is tightened since sizes are bytes: the default of 1e-4 would call 1 MiB in 10 GiB optimal.
    chosen = backend(solver, max(0.1, deadline - time.monotonic()), relative_gap=1e-9)
    optimal = run(model, chosen) == "Optimal"
    values = [offset.varValue or 0.0 for offset in offsets]
    return np.argsort(np.array(values), kind="stable"), peak.varValue / _SCALE * capacity if optimal else 0
