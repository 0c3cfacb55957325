"""Solvers that are used where they are installed: OmniMalloc's SuperMalloc and OR-Tools' CP-SAT.

They come with the extra `solvers`, and `placement.place` calls them. Neither is needed: the tree search is
as good on most problems.
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np

from memo_hf.planner.problem import Placement

MOST_CPSAT_BUFFERS = 3_000  # above this CP-SAT finds nothing in a minute


def installed(package: str) -> bool:
    """Whether the package could be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def supermalloc_search(best: Placement, deadline: float, goal: int) -> Placement:
    """OmniMalloc's branch and bound, whose only goal is the lower bound. Takes and returns what `tree_search` does."""
    from omnimalloc import Allocation
    from omnimalloc.allocators import SupermallocAllocator

    began = time.monotonic() - best.seconds
    problem = best.problem
    # Twelve threads whatever the cores: with fewer it does not try the lower bound at once, and is far slower.
    solver = SupermallocAllocator(timeout=max(0.1, deadline - time.monotonic()), num_threads=12)
    request = tuple(
        Allocation(id=i, size=b.size, start=b.lower, end=b.upper) for i, b in enumerate(problem.buffers)
    )  # fmt: skip
    result = solver.solve(request)
    offsets = np.zeros(len(problem), dtype=np.int64)
    for allocation in result.allocations:
        offsets[allocation.id] = allocation.offset
    return _better(best, offsets, "supermalloc", began, result.proved_optimal)


def cpsat_search(best: Placement, deadline: float, goal: int) -> Placement:
    """CP-SAT: first whether the goal can be met, then as low as it gets. Takes and returns what `tree_search` does."""
    from ortools.sat.python import cp_model

    began = time.monotonic() - best.seconds
    problem = best.problem
    unit = int(np.gcd.reduce(problem.size))
    status = None
    for limit, minimise in ((goal, False), (best.peak, True)):
        model = cp_model.CpModel()
        highest = limit // unit
        peak = model.new_int_var(-(-problem.lower_bound // unit), highest, "peak")
        offsets, times, places = [], [], []
        for i, b in enumerate(problem.buffers):
            size = b.size // unit
            offset = model.new_int_var(0, highest - size, f"offset_{i}")
            offsets.append(offset)
            times.append(model.new_fixed_size_interval_var(b.lower, b.upper - b.lower, f"time_{i}"))
            places.append(model.new_fixed_size_interval_var(offset, size, f"place_{i}"))
            model.add(offset + size <= peak)
            if minimise:
                model.add_hint(offset, best.offsets[i] // unit)
        model.add_no_overlap_2d(times, places)
        if minimise:
            model.minimize(peak)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 2
        seconds = deadline - time.monotonic()
        solver.parameters.max_time_in_seconds = max(0.1, seconds if minimise else seconds / 2)
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            proved = minimise and status == cp_model.OPTIMAL
            return _better(best, [solver.value(o) * unit for o in offsets], "CP-SAT", began, proved)
    return best


def _better(best, offsets, method, began, proved):
    found = Placement(best.problem, offsets, method, time.monotonic() - began, proved)
    if found.peak < best.peak:
        return found
    return Placement(best.problem, best.offsets, best.method, found.seconds, best.proved or proved)
