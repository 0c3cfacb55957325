"""What the allocator logged during one step, made into a trace that the planner places.

Called by `planned`. Knows the allocator's events and the planner's traces, and nothing of how either is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memo_hf.allocator import native
from memo_hf.planner.trace import Event, Trace

# A block that a copy thread frees may be freed later the next time: the swap engine lets go of it at most so many
# phases on. Where it takes longer still, the request that finds the address in use is served dynamically.
_SLACK_PHASES = 2


@dataclass(frozen=True)
class PhaseLabel:
    """One visit of a phase: `name` as the planner knows it, `visit` from 0 as it comes again within a step."""

    name: str
    visit: int = 0


@dataclass(frozen=True)
class Recording:
    """One step's requests.

    Attributes:
        trace: For the planner.
        labels: The phase visit of each of `trace.requests`.
    """

    trace: Trace
    labels: tuple[PhaseLabel, ...]


def to_recording(events: Iterable[native.Event], phases: Sequence[PhaseLabel]) -> Recording:
    """Keeps what can be planned: the requests within phases, of threads that mark phases.

    Args:
        events: The log, in order.
        phases: The label of each phase number.
    """
    events = list(events)
    planned_threads = {event.thread for event in events if event.kind == native.EVENT_MARK}
    kept: list[Event] = []
    labels: list[PhaseLabel] = []
    open_requests: dict[int, PhaseLabel] = {}
    late: list[tuple[int, Event]] = []  # the mark at which a free counts, and the free
    num_marks = 0
    for event in events:
        if event.kind == native.EVENT_MARK:
            num_marks += 1
            kept += [free for due, free in late if due <= num_marks]
            late = [(due, free) for due, free in late if due > num_marks]
        elif event.kind == native.EVENT_ALLOC:
            if event.phase == native.NO_PHASE or event.thread not in planned_threads:
                continue
            label = phases[event.phase]
            open_requests[event.request] = label
            labels.append(label)
            kept.append(Event("malloc", event.request, event.bytes, label.name, event.stream, event.thread))
        elif event.kind == native.EVENT_FREE and open_requests.pop(event.request, None):
            name = "" if event.phase == native.NO_PHASE else phases[event.phase].name
            free = Event("free", event.request, 0, name, event.stream, event.thread)
            if event.thread in planned_threads:
                kept.append(free)
            else:
                late.append((num_marks + _SLACK_PHASES, free))
    kept += [free for _, free in late]
    return Recording(Trace(tuple(kept)), tuple(labels))
