"""Exact tree search: does the problem fit in a capacity? Solves in seconds what defeats greedy orders and the MIP.

Called by `placement.place` after the heuristics. The rules are known from MiniMalloc (ASPLOS 2023) and OmniMalloc:

- Any plan can be pushed down and its buffers sorted by offset. So it is enough to stack buffers in ascending order of
  offset, ties in a fixed order, each on top of what lies below it.
- Time falls into *sections*, moments whose live set is not part of a neighbour's. In a section, the lowest offset that
  is still possible plus the bytes still to place must fit in the capacity, or the branch is dead.
- A buffer that would leave room for a whole other one below it need not be tried.
- Where no buffer still to place crosses a moment, what lies before and after it is solved apart.

Asking "does it fit in the lower bound?" first, then more, prunes far better than walking down from a known plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memo_hf.planner.problem import Placement, Problem

_PLACED = np.int64(1) << 60  # the "lowest offset" of what is placed: above any address
_ORDERS = ("total width area", "total area width", "width area total")  # in which buffers at one offset are tried
_STEPS = (0.25, 0.5, 0.75, 1.0)  # capacities to try from the goal (0) to just below the best peak (1)
_FIRST_NODES = 8_000  # that one order may visit at first; nodes and not seconds, so that a plan can be made again
_DEEPEST_SPLIT = 100  # splits within splits; below it a part is searched whole, which is as right and only slower
_SECONDS_PER_CELL = 4e-9  # measured time of a node, divided by the sum of the section sizes
_SECONDS_PER_NODE = 5e-5


class _OutOfBudget(Exception):
    pass


def tree_search(best: Placement, deadline: float, goal: int) -> Placement:
    """Looks for plans between the goal and the best peak, with all orders in turn and ever more nodes for each.

    Args:
        best: Returned where nothing better is found, with `proved` set where the search was exhausted below it.
        deadline: `time.monotonic` seconds at which to stop.
        goal: Bytes; a plan of no more ends the search.
    """
    problem = best.problem
    began = time.monotonic() - best.seconds
    first, last, _ = sections(problem)
    one_descent = len(problem) * (_SECONDS_PER_NODE + _SECONDS_PER_CELL * float((last - first).sum()))
    least_nodes = 2 * len(problem)
    infeasible, nodes = problem.lower_bound - 1, max(_FIRST_NODES, least_nodes)

    def lower_than_best(step: float, nodes: int) -> bool:
        """Tries a capacity between the goal (0) and the best peak (1); whether that gave a better plan."""
        nonlocal best, infeasible
        least = max(goal, infeasible + 1)
        capacity = int(least + (best.peak - 1 - least) * step)
        if capacity < least or time.monotonic() + one_descent > deadline:
            return False
        answers = (_Fit(problem, capacity, order, nodes, deadline).solve() for order in _ORDERS)
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is False:
            infeasible = capacity
        elif answer is not None:
            best = Placement(problem, answer, "tree search", time.monotonic() - began)
        return isinstance(answer, np.ndarray)

    while best.peak > max(goal, infeasible + 1) and time.monotonic() + one_descent < deadline:
        lower_than_best(0.0, nodes)
        while any(lower_than_best(step, max(nodes // 4, least_nodes)) for step in _STEPS):
            pass
        nodes *= 3
    if best.peak == infeasible + 1:
        best = Placement(problem, best.offsets, best.method, time.monotonic() - began, proved=True)
    return best


def sections(problem: Problem) -> tuple[np.ndarray, np.ndarray, int]:
    """Each buffer's first and one-past-last section (int64), and their number; two live together if these overlap."""
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


@dataclass(frozen=True, slots=True)
class _Node:
    """One buffer placed on top of its parents' ones."""

    parent: _Node | None
    buffer: int
    offset: int
    lowest: np.ndarray  # by buffer: the lowest offset still possible, _PLACED where it is placed
    remaining: np.ndarray  # by section: bytes still to place
    crossing: np.ndarray  # by boundary between sections: buffers still to place that live on both sides
    left: int  # buffers still to place


class _Part:
    """Buffers that are solved together, in the order in which they are tried, and all that is fixed in the search."""

    def __init__(self, problem, order, buffers, first, last, lowest):
        size = problem.size[buffers]
        first, last = first - first.min(), last - first.min()
        num_sections = int(last.max())
        remaining = _sum_over_spans(first, last, size, num_sections)
        width = problem.upper[buffers] - problem.lower[buffers]
        total = np.maximum.reduceat(np.append(remaining, 0), np.stack((first, last), axis=1).ravel())[::2]
        keys = {"width": width, "area": width.astype(np.float64) * size, "total": total}
        by = np.lexsort([-keys[name] for name in reversed(order.split())])
        self.buffers, self.first, self.last, self.size = buffers[by], first[by], last[by], size[by]
        first, last = self.first, self.last
        self.overlaps = (first[:, None] < last[None]) & (first[None] < last[:, None])
        columns = np.arange(num_sections)[:, None]
        member = (first <= columns) & (columns < last)
        self.members = np.nonzero(member)[1]  # buffers of section 0, then of section 1, ...
        self.starts = np.concatenate(([0], np.cumsum(member.sum(axis=1))[:-1]))
        twins: dict[tuple, int] = {}
        self.twin = []  # the equal buffer that must be placed before, or -1: swapping equals gives nothing new
        for i, kind in enumerate(zip(first.tolist(), last.tolist(), self.size.tolist(), strict=True)):
            self.twin.append(twins.get(kind, -1))
            twins[kind] = i
        crossing = _sum_over_spans(first + 1, last, np.ones(len(by), dtype=np.int64), num_sections + 1)
        crossing[[0, -1]] = 1  # the ends are no boundaries
        self.root = _Node(None, -1, 0, lowest[by], remaining, crossing, len(by))

    def children(self, node: _Node, capacity: int) -> Iterator[_Node]:
        """The nodes below `node` that can still lead to a plan within `capacity`, lowest offset first."""
        lowest, remaining = node.lowest, node.remaining
        most = int(remaining.max())
        candidates = np.flatnonzero(lowest < (lowest + self.size).min())
        for i in candidates[np.argsort(lowest[candidates], kind="stable")].tolist():
            offset, twin = int(lowest[i]), self.twin[i]
            if (offset, i) < (node.offset, node.buffer) or (twin >= 0 and lowest[twin] < _PLACED):
                continue
            if offset + most > capacity:
                return  # nothing may go below this offset any more, and the fullest section does not fit above it
            size, span = self.size[i], slice(self.first[i], self.last[i])
            new_lowest = np.where(self.overlaps[i], np.maximum(lowest, offset + size), lowest)
            new_lowest[i] = _PLACED
            new_remaining = remaining.copy()
            new_remaining[span] -= size
            floor = np.maximum(np.minimum.reduceat(new_lowest[self.members], self.starts), offset)
            if ((floor + new_remaining > capacity) & (new_remaining > 0)).any():
                continue
            new_crossing = node.crossing.copy()
            new_crossing[span.start + 1 : span.stop] -= 1
            yield _Node(node, i, offset, new_lowest, new_remaining, new_crossing, node.left - 1)


class _Fit:
    """One decision: does the problem fit in `capacity`?"""

    def __init__(self, problem, capacity, order, most_nodes, deadline):
        self.problem, self.capacity, self.order = problem, capacity, order
        self.nodes_left, self.deadline = most_nodes, deadline
        self.offsets = np.zeros(len(problem), dtype=np.int64)

    def solve(self) -> np.ndarray | bool | None:
        """The offsets (int64); False where there is no such plan; None where time or nodes did not suffice."""
        first, last, _ = sections(self.problem)
        count = len(self.problem)
        try:
            solved = self._solve_parts(np.arange(count), first, last, np.zeros(count, dtype=np.int64), 0)
        except _OutOfBudget:
            return None
        return self.offsets if solved else False

    def _solve_parts(self, buffers, first, last, lowest, depth):
        """Solves what no buffer joins apart, the largest part first. All must succeed."""
        start, end = int(first.min()), int(last.max())
        crossing = _sum_over_spans(first - start + 1, last - start, np.ones_like(first), end - start + 1)
        part = np.cumsum(crossing == 0)[first - start]
        groups = [np.flatnonzero(part == number) for number in np.unique(part)]
        for group in sorted(groups, key=len, reverse=True):
            columns = (column[group] for column in (buffers, first, last, lowest))
            if not self._solve_part(_Part(self.problem, self.order, *columns), depth):
                return False
        return True

    def _solve_part(self, part, depth):
        stack = [part.children(part.root, self.capacity)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            self.nodes_left -= 1
            if self.nodes_left < 0 or (self.nodes_left % 32 == 0 and time.monotonic() > self.deadline):
                raise _OutOfBudget
            if node.left == 0:
                return self._accept(part, node)
            if depth < _DEEPEST_SPLIT and not node.crossing.all():
                rest = np.flatnonzero(node.lowest < _PLACED)
                columns = (column[rest] for column in (part.buffers, part.first, part.last, node.lowest))
                if self._solve_parts(*columns, depth + 1):
                    return self._accept(part, node)
            else:
                stack.append(part.children(node, self.capacity))
        return False

    def _accept(self, part, node):
        while node.parent is not None:
            self.offsets[part.buffers[node.buffer]] = node.offset
            node = node.parent
        return True


def _sum_over_spans(first, last, value, length):
    """For each index below `length` the sum of the values whose span [first, last) holds it."""
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, first, value)
    np.add.at(change, np.maximum(first, last), -value)
    return np.cumsum(change)[:length]
