"""Plans a step in two levels (paper section 4.2): each layer's forward and backward, then the step made of them.

Called beside training with the recorded trace. Level 1 places what is born and dies inside one layer's forward or
backward; layers whose requests are alike share one solution. Level 2 places these plans in the step, beside everything
that crosses phases or lies outside layers. What crosses is no part of level 1: neighbouring layers would overlap (43%
more memory on a Llama step). The paper makes one block of each plan; here it is cut into slabs at every address that no
buffer crosses, since a single block wastes what its buffers leave free before its end (up to 2% with recomputation).
Where the two levels miss the lower bound by more than a thousandth, as they do where chunks come and go beside what is
swapped (7% on such a step), the step is planned flat as well in the time that is left, and the better plan is taken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memo_hf.planner.placement import place
from memo_hf.planner.problem import Buffer, Placement, Problem
from memo_hf.planner.trace import Request, Trace, to_buffer
from memo_hf.planner.verify import verify

_GOOD_ENOUGH = 1.001  # over the lower bound
_LAYER_PHASE = re.compile(r"(forward|backward) \d+( \w+)?")


def plan_step(
    trace: Trace,
    time_limit: float = 10.0,
    two_levels: bool = True,
    capacity: int | None = None,
    method: str = "auto",
) -> Placement:
    """Addresses for `trace.problem()`, verified. Each stream has its own range: none reuses the memory of another.

    Args:
        trace: One step.
        time_limit: Seconds to search; split evenly among streams.
        two_levels: False plans the step flat, for comparison.
        capacity: Bytes of the arena: a plan of no more is good enough. Streams get shares of it in proportion to the
            most that each has alive.
        method: As in `placement.place`; other than "auto" plans the step flat.
    """
    began = time.monotonic()
    offset_of: dict[int, int] = {}
    arena, plans = 0, []
    problems = {stream: trace.problem(stream) for stream in trace.streams}
    most_alive = sum(problem.lower_bound for problem in problems.values())
    for stream, problem in problems.items():
        requests = [request for request in trace.requests if request.stream == stream]
        seconds, share = time_limit / len(problems), problem.lower_bound / most_alive
        goal = None if capacity is None else int(capacity * share)
        deadline, plan = time.monotonic() + seconds, None
        if two_levels and method == "auto" and any(_LAYER_PHASE.fullmatch(request.phase) for request in requests):
            # Half of the time, or none would be left to plan flat where that is better.
            plan = _two_levels(trace, requests, problem, seconds / 2, goal)
        if plan is None or plan.peak > max(goal or 0, _GOOD_ENOUGH * problem.lower_bound):
            flat = place(problem, goal, max(0.0, deadline - time.monotonic()), method)
            if plan is None:
                plan = flat
            elif flat.peak < plan.peak:
                plan = replace(flat, method=f"{plan.method}; flat: {flat.method}")
        plans.append(plan)
        for request, offset in zip(requests, plan.offsets, strict=True):
            offset_of[request.id] = arena + offset
        arena += plan.peak
    offsets = tuple(offset_of[request.id] for request in trace.requests)
    methods = "; ".join(plan.method for plan in plans)
    proved = len(plans) == 1 and plans[0].proved  # several streams could do with less if they shared
    return verify(Placement(trace.problem(), offsets, methods, time.monotonic() - began, proved))


@dataclass(frozen=True)
class _Block:
    """What lives and dies in one layer's forward or backward, and the same as a problem with times 0, 1, 2, ..."""

    requests: tuple[Request, ...]
    kind: Problem

    @classmethod
    def of(cls, requests: Sequence[Request]) -> _Block:
        times = np.unique([time for r in requests for time in (r.lower, r.upper)])
        buffers = []
        for number, r in enumerate(requests):
            lower, upper = (int(np.searchsorted(times, time)) for time in (r.lower, r.upper))
            buffers.append(Buffer(str(number), lower, upper, to_buffer(r).size))
        return cls(tuple(requests), Problem(tuple(buffers)))


def _two_levels(trace, requests, problem, time_limit, goal):
    """The placement of `problem`, which is that of `requests`."""
    deadline = time.monotonic() + time_limit
    blocks, crossing = _split(trace, requests)
    kinds = list(dict.fromkeys(block.kind for block in blocks))
    plans = {}
    for number, kind in enumerate(kinds):
        # Half of the time for level 1, split evenly over what is left to do.
        left = deadline - time_limit / 2 - time.monotonic()
        plans[kind] = place(kind, time_limit=max(0.0, left / (len(kinds) - number)))
    step = [to_buffer(request) for request in crossing]
    members: list[list[tuple[Request, int]]] = [[(request, 0)] for request in crossing]
    for block in blocks:
        for bottom, top, group in _slabs(plans[block.kind]):
            requests_in = [block.requests[i] for i in group]
            lower, upper = min(r.lower for r in requests_in), max(r.upper for r in requests_in)
            members.append(
                [(r, plans[block.kind].offsets[i] - bottom) for i, r in zip(group, requests_in, strict=True)]
            )
            step.append(Buffer(f"slab {len(step)}", lower, upper, top - bottom))
    whole = place(Problem(tuple(step)), goal, max(0.0, deadline - time.monotonic()))
    offset_of = {}
    for base, inside in zip(whole.offsets, members, strict=True):
        offset_of.update((request.id, base + offset) for request, offset in inside)
    method = f"two levels: {len(kinds)} kinds of layer phase, then {len(step)} buffers by {whole.method}"
    return Placement(problem, tuple(offset_of[request.id] for request in requests), method)


def _slabs(plan: Placement) -> list[tuple[int, int, list[int]]]:
    """The plan cut at every address that no buffer crosses: bottom, top and the buffers (indices) of each slab."""
    slabs: list[tuple[int, int, list[int]]] = []
    for i in np.argsort(np.array(plan.offsets), kind="stable").tolist():
        bottom, top = plan.offsets[i], plan.offsets[i] + plan.problem.buffers[i].size
        if slabs and bottom < slabs[-1][1]:
            low, high, group = slabs[-1]
            slabs[-1] = (low, max(high, top), [*group, i])
        else:
            slabs.append((bottom, top, [i]))
    return slabs


def _split(trace, requests):
    """The blocks of level 1, and the requests that only level 2 sees."""
    runs = []  # for each event the number of its run: consecutive events of one phase
    for event, before in zip(trace.events, (None, *trace.events), strict=False):
        same = before is not None and event.phase == before.phase
        runs.append(runs[-1] + (not same) if runs else 0)
    runs.append(-1)  # the end of the step, where what is never freed ends
    inside: dict[int, list[Request]] = {}
    crossing = []
    for request in requests:
        run = runs[request.lower]
        if run == runs[request.upper] and _LAYER_PHASE.fullmatch(request.phase):
            inside.setdefault(run, []).append(request)
        else:
            crossing.append(request)
    return [_Block.of(group) for group in inside.values()], crossing
