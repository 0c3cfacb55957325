"""Solves a PuLP model: HiGHS where it is installed, CBC otherwise. Called by the planner; knows none of its models.

Written for PuLP 3.3, the last for Python 3.11, and for PuLP 4, which has another answer to `solve` and brings no CBC.
"""

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
    ending = run(problem, backend("highs", time_limit_seconds, relative_gap=0.0))
    if ending == "Optimal":
        return True
    if ending in ("Infeasible", "Undefined"):
        return False
    raise PlanError(
        f"{problem.name}: the solver stopped with status {ending!r} within"
        f" {time_limit_seconds} s; give the machine more time or set swap_fraction by hand"
    )


def run(problem: pulp.LpProblem, solver: pulp.LpSolver) -> str:
    """Solve `problem` in place and say why `solver` stopped, in PuLP's words: "Optimal" for a proved optimum alone."""
    with _silent_stdout():
        answer = problem.solve(solver)
    if hasattr(answer, "status"):  # PuLP 4
        return answer.status.name
    # PuLP 3 calls an incumbent at the time limit "Optimal" too; its `sol_status` tells them apart.
    stopped_early = problem.status == pulp.LpStatusOptimal and problem.sol_status != pulp.LpSolutionOptimal
    return "TimeLimit" if stopped_early else pulp.LpStatus[problem.status]


def backend(name: str, time_limit_seconds: float, *, relative_gap: float) -> pulp.LpSolver:
    """PuLP's solver for `name`, "highs" or "cbc"; CBC stands in for HiGHS where highspy is not installed.

    Args:
        relative_gap: between the best solution and the bound, at which a solution counts as optimal.

    Raises:
        PlanError: neither is installed.
    """
    # The number of threads is the same for all: HiGHS refuses another one than it began with in a process.
    options = {"msg": False, "timeLimit": time_limit_seconds, "gapRel": relative_gap, "threads": 1}
    highs = pulp.HiGHS(**options)
    if name == "highs" and highs.available():
        return highs
    # PuLP 3 ships a CBC; from PuLP 4 on it is found where `pip install pulp[cbc]` puts it.
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    cbc = pulp.COIN_CMD(path=bundled, **options)
    if cbc.available():
        return cbc
    if name == "highs":
        raise PlanError("neither HiGHS nor CBC is installed, so nothing can be planned; pip install highspy")
    raise PlanError("CBC is not installed; pip install 'pulp[cbc]', or use method 'mip', 'tree' or 'auto'")


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
