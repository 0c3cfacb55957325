"""The solvers: every plan is valid, exact ones agree with brute force, and no time limit loses a plan."""

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np
import pulp
import pytest

from memo_hf.errors import PlanError
from memo_hf.planner import extras
from memo_hf.planner.core import core_search
from memo_hf.planner.heuristic import greedy, orders, portfolio, stack
from memo_hf.planner.mip import count_pairs, mip_search, overlapping_pairs
from memo_hf.planner.placement import METHODS, place
from memo_hf.planner.problem import Buffer, Placement, Problem
from memo_hf.planner.search import improve_order
from memo_hf.planner.solver import backend, run, solve
from memo_hf.planner.tree import sections, tree_search
from memo_hf.planner.verify import verify

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from synthetic_step import llama_step  # noqa: E402

# No plan reaches the lower bound of 8: the best peak is 9.
_LIVES = ((0, 3, 3), (0, 4, 5), (3, 5, 1), (4, 5, 3), (3, 6, 2), (4, 6, 2), (5, 7, 4), (6, 8, 4), (7, 8, 4))
GAP = Problem(tuple(Buffer(str(i), *life) for i, life in enumerate(_LIVES)))


def has_cbc():
    """PuLP 3 ships one; from PuLP 4 on `pip install pulp[cbc]` does, half a gigabyte."""
    try:
        backend("cbc", 1.0, relative_gap=0.0)
    except PlanError:
        return False
    return True


CBC = pytest.mark.skipif(not has_cbc(), reason="there is no CBC")


def random_problem(seed, count=6, span=10, largest=6):
    draw = np.random.default_rng(seed)
    buffers = []
    for i in range(count):
        lower = int(draw.integers(0, span - 1))
        buffers.append(Buffer(str(i), lower, int(draw.integers(lower + 1, span)), int(draw.integers(1, largest))))
    return Problem(tuple(buffers))


def brute_force(problem):
    """The lowest peak: some order of stacking gives it."""
    everything = itertools.permutations(range(len(problem)))
    return min(int((stack(problem, order) + problem.size).max()) for order in everything)


def worst_plan(problem):
    """All buffers on top of each other: valid, and far from good, so that the solvers have work to do."""
    return Placement(problem, np.concatenate(([0], np.cumsum(problem.size)[:-1])), "pile")


def soon(seconds=20.0):
    return time.monotonic() + seconds


@pytest.mark.parametrize("seed", range(40))
def test_tree_search_is_exact(seed):
    problem = random_problem(seed)
    placement = verify(tree_search(worst_plan(problem), soon(), problem.lower_bound))
    assert placement.peak == brute_force(problem)
    assert placement.proved


@pytest.mark.parametrize(
    "search", [tree_search, mip_search, pytest.param(METHODS["cbc"], marks=CBC)], ids=["tree", "highs", "cbc"]
)
def test_a_peak_above_the_lower_bound_is_proved(search):
    placement = verify(search(worst_plan(GAP), soon(), GAP.lower_bound))
    assert (placement.peak, placement.lower_bound, placement.proved) == (9, 8, True)
    again = search(placement, soon(), GAP.lower_bound)
    assert (again.peak, again.proved) == (9, True)


@pytest.mark.parametrize("solver", ["highs", pytest.param("cbc", marks=CBC)])
@pytest.mark.parametrize("seed", range(4))
def test_mip_is_exact(seed, solver):
    problem = random_problem(seed)
    placement = verify(mip_search(worst_plan(problem), soon(), problem.lower_bound, solver))
    assert placement.peak == brute_force(problem)
    assert placement.proved


def test_a_swap_fraction_is_solved_after_addresses():
    # HiGHS keeps its threads for the life of a process, and fails where it is asked for another number of them.
    verify(mip_search(worst_plan(GAP), soon(), GAP.lower_bound))
    model = pulp.LpProblem("half", pulp.LpMinimize)
    fraction = model.add_variable("fraction", 0, 1)
    model += fraction
    model += 2 * fraction >= 1
    assert solve(model)
    assert fraction.value() == 0.5


def test_a_goal_that_is_met_is_no_proof():
    problem = random_problem(3)
    best = brute_force(problem)
    for search in (tree_search, mip_search):
        placement = search(worst_plan(problem), soon(), best + 2)
        assert placement.peak <= best + 2
        assert placement.proved == (placement.peak == problem.lower_bound)
        placement = search(worst_plan(GAP), soon(), 10)
        assert placement.peak in (9, 10) and not placement.proved


def test_tolerances_of_the_mip_prove_nothing_about_single_bytes():
    large = [Buffer(b.id, b.lower, b.upper, 10_000 * b.size) for b in GAP.buffers]
    problem = Problem((*large, Buffer("one byte", 0, 1, 1)))
    start = worst_plan(problem)
    assert verify(tree_search(start, soon(), problem.lower_bound)).proved
    placement = verify(mip_search(start, soon(), problem.lower_bound))
    assert (placement.peak, placement.proved) == (90_000, False)


def test_mip_out_of_time_returns_what_it_was_given():
    problem = random_problem(0, count=60, span=40, largest=1000)
    start = portfolio(problem, soon(0), problem.lower_bound)
    placement = verify(mip_search(start, soon(0), problem.lower_bound))
    assert placement.peak <= start.peak
    assert not placement.proved or placement.peak == problem.lower_bound


def test_the_lower_bound_lets_the_mip_stop(monkeypatch):
    """The first 20 buffers of a layer: with `M >= 0` alone HiGHS holds the same plan and looks on for minutes."""
    problem = Problem(llama_step(num_layers=1, tokens=4096).problem().buffers[:20])
    endings = []
    monkeypatch.setattr("memo_hf.planner.solver.run", lambda *given: endings.append(run(*given)) or endings[-1])
    assert verify(mip_search(worst_plan(problem), soon(3), problem.lower_bound)).proved
    assert endings == ["Optimal"]


@pytest.mark.skipif(not pulp.__version__.startswith("3"), reason="PuLP 4 says itself that the time was up")
def test_what_a_solver_holds_when_the_time_is_up_is_no_proof(monkeypatch, capfd):
    class OutOfTime(pulp.LpSolver):
        def actualSolve(self, lp):
            os.write(1, b"a banner, past Python")
            for variable in lp.variables():
                variable.varValue = variable.upBound  # the peak that is known, which is the least
            return lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)

    monkeypatch.setattr("memo_hf.planner.solver.backend", lambda *given, **named: OutOfTime())
    start = portfolio(GAP, soon(), GAP.lower_bound)
    placement = mip_search(start, soon(), GAP.lower_bound)
    assert (placement.peak, placement.proved) == (9, False)
    assert capfd.readouterr().out == ""


def test_mip_refuses_what_it_cannot_model():
    problem = Problem(tuple(Buffer(str(i), 0, 1, 1) for i in range(300)))
    with pytest.raises(PlanError, match="44850 overlapping pairs; the limit is 20000"):
        mip_search(worst_plan(problem), soon(), 1)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_counted_as_they_are_listed(seed):
    problem = random_problem(seed, count=30)
    pairs = overlapping_pairs(problem)
    assert count_pairs(problem) == len(pairs)
    first, last, _ = sections(problem)
    assert pairs == [
        p for p in itertools.combinations(range(30), 2) if first[p[0]] < last[p[1]] and first[p[1]] < last[p[0]]
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_greedy_plan_is_valid(seed):
    problem = random_problem(seed, count=80, span=60, largest=100)
    for name, order in orders(problem):
        assert sorted(order) == list(range(80)), name
        for best_fit in (False, True):
            verify(Placement(problem, greedy(problem, order, best_fit), name))
        verify(Placement(problem, stack(problem, order), name))


def test_best_fit_takes_the_tightest_gap():
    problem = Problem(
        (
            Buffer("floor", 0, 9, 1),
            Buffer("hole of 3", 0, 1, 3),
            Buffer("middle", 0, 9, 1),
            Buffer("hole of 2", 0, 1, 2),
            Buffer("top", 0, 9, 1),
            Buffer("new", 1, 9, 2),
        )
    )
    order = np.arange(6)
    assert greedy(problem, order)[5] == 1
    assert greedy(problem, order, best_fit=True)[5] == 5


def test_order_search_never_makes_it_worse():
    problem = random_problem(1, count=100, span=60, largest=100)
    start = worst_plan(problem)
    placement = verify(improve_order(start, soon(5), problem.lower_bound, patience=30))
    assert placement.peak < start.peak
    again = improve_order(start, soon(5), problem.lower_bound, patience=30)
    assert again.offsets == placement.offsets  # seeded


def test_a_core_is_placed_first():
    """Many small buffers, and where memory is full a few that no greedy order places in the lower bound."""
    lives = [(6, 7, 2), (5, 8, 2), (2, 3, 5), (6, 8, 3), (3, 7, 4), (4, 8, 3), (2, 3, 5), (2, 6, 4), (4, 8, 4)]
    hard = [Buffer(f"hard {i}", 50 + lower, 50 + upper, 100 * size) for i, (lower, upper, size) in enumerate(lives)]
    easy = [Buffer(f"easy {i}", lower, lower + 3, 1 + i % 7) for i, lower in enumerate([*range(45), *range(60, 110)])]
    problem = Problem((*easy, *hard))
    start = portfolio(problem, soon(), problem.lower_bound)
    assert start.peak > problem.lower_bound
    placement = verify(core_search(start, soon(5), problem.lower_bound))
    assert placement.proved and "by tree search, then greedy" in placement.method
    assert core_search(start, soon(-1), problem.lower_bound) is start


def test_order_search_gives_up():
    began = time.monotonic()
    assert improve_order(worst_plan(GAP), soon(60), GAP.lower_bound).peak > GAP.lower_bound
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("with_extras", [False, True])
def test_searches_follow_one_another_until_one_is_done(monkeypatch, with_extras):
    """Stand-ins for the searches note their calls; "tree" finds what the test says."""
    calls = []

    def stand_in(name):
        def search(best, deadline, goal):
            calls.append(name)
            return found if name == "tree" and found is not None else best

        return search

    for module, name in (
        ("placement", "core_search"),
        ("placement", "improve_order"),
        ("placement", "tree_search"),
        ("mip", "mip_search"),
        ("extras", "supermalloc_search"),
        ("extras", "cpsat_search"),
    ):
        monkeypatch.setattr(f"memo_hf.planner.{module}.{name}", stand_in(name.split("_")[0]))
    monkeypatch.setattr(extras, "installed", lambda package: with_extras)
    exact = ["core", "improve", *["supermalloc"] * with_extras, "tree"]
    everything = [*exact, *["cpsat"] * with_extras, "mip", "improve"]

    def calls_of(problem, **options):
        calls.clear()
        place(problem, **options)
        return list(calls)

    found = None
    assert calls_of(GAP) == everything
    assert calls_of(GAP, capacity=9) == []
    assert calls_of(GAP, time_limit=0) == []
    assert calls_of(Problem(GAP.buffers[:3])) == []  # the lower bound is met
    many_pairs = random_problem(0, count=200, span=60, largest=1000)
    assert calls_of(many_pairs) == [name for name in everything if name != "mip"]
    found = Placement(GAP, portfolio(GAP, soon(), 9).offsets, "tree", proved=True)
    assert calls_of(GAP) == exact
    found = Placement(GAP, (0,) * len(GAP), "tree")
    with pytest.raises(PlanError, match="share bytes; the plan by 'tree' is wrong"):
        place(GAP)


def test_time_is_kept():
    problem = random_problem(2, count=400, span=300, largest=10_000)
    began = time.monotonic()
    placement = place(problem, time_limit=1.0)
    assert time.monotonic() - began < 4.0
    assert placement.peak >= problem.lower_bound


def test_no_time_at_all_still_gives_a_plan():
    problem = random_problem(2, count=100, span=60, largest=1000)
    first = "greedy peaks, first fit"
    assert place(problem, method="greedy").method != first
    assert place(problem, time_limit=0.0).method == first


def test_capacity_is_enough():
    problem = random_problem(4, count=100, span=60, largest=1000)
    pile = int(problem.size.sum())
    placement = place(problem, capacity=pile)
    assert placement.peak <= pile
    assert placement.method == "greedy peaks, first fit"  # the first that fits ends the search


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_every_method(method):
    package = {"cpsat": "ortools", "supermalloc": "omnimalloc", "cbc": "'pulp"}.get(method)
    if package and not (has_cbc() if method == "cbc" else extras.installed(package)):
        with pytest.raises(PlanError, match=f"pip install {package}"):
            place(GAP, method=method)
        return
    placement = place(GAP, time_limit=10, method=method)
    assert placement.peak == 9
    assert placement.proved or method in ("greedy", "core", "order")


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(PlanError, match="'magic'.*'auto', 'greedy', 'tree'"):
        place(GAP, method="magic")


def test_nothing_to_place():
    placement = place(Problem(()))
    assert (placement.peak, placement.gap, placement.proved) == (0, 0.0, True)


def test_splits_deeper_than_the_limit(monkeypatch):
    """A chain of short buffers splits again and again; without splits the answer is the same."""
    problem = random_problem(11, count=40, span=80, largest=50)
    split = tree_search(worst_plan(problem), soon(5), problem.lower_bound)
    monkeypatch.setattr("memo_hf.planner.tree._DEEPEST_SPLIT", 0)
    whole = tree_search(worst_plan(problem), soon(5), problem.lower_bound)
    assert verify(split).peak == verify(whole).peak == problem.lower_bound


def test_hundreds_of_splits_do_not_exhaust_the_stack():
    buffers = [Buffer(f"link {i}", i, i + 2, 1 + i % 3) for i in range(400)]
    problem = Problem(tuple(buffers))
    assert verify(tree_search(worst_plan(problem), soon(30), problem.lower_bound)).proved
