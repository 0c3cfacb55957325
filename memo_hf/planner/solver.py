"""Solves a PuLP model: HiGHS where it is installed, CBC otherwise. Called by the planner; knows none of its models."""

from __future__ import annotations

import contextlib
import os

import pulp

from memo_hf.errors import PlanError


def solve(problem: pulp.LpProblem, *, time_limit_seconds: float = 10.0) -> bool:
    """Solve `problem` in place, to proved optimality.

    Returns:
        True when the variables hold a proved optimum, False when the problem is infeasible.

    Raises:
        PlanError: the solver stopped for another reason, such as the time limit.
    """
    if "HiGHS" in pulp.listSolvers(onlyAvailable=True):
        solver = pulp.HiGHS(msg=False, gapRel=0.0, timeLimit=time_limit_seconds, threads=1)
    else:
        solver = pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, timeLimit=time_limit_seconds)
    with _silent_stdout():
        problem.solve(solver)
    # LpStatus calls an incumbent at the time limit "Optimal" too; sol_status tells them apart.
    if problem.sol_status == pulp.LpSolutionOptimal:
        return True
    if problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
        return False
    raise PlanError(
        f"{problem.name}: the solver stopped with status {pulp.LpStatus[problem.status]!r} within"
        f" {time_limit_seconds} s; give the machine more time or set swap_fraction by hand"
    )


@contextlib.contextmanager
def _silent_stdout():
    """HiGHS prints its banner to file descriptor 1, whatever it is told, and `--json` output must stay clean."""
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
