"""What the allocator logged during a step, made into a trace that the planner places.

Called by `memory` and `planned`. Knows the allocator's events and the planner's traces, and not how either is used.

The clock of a recording is the number of requests so far, not the number of events: requests come in the same order in
every step, while a copy thread may free what it has copied a little sooner or later. So recordings of several steps can
be merged: each request ends where it ended last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memo_hf.allocator import native
from memo_hf.planner.trace import Event, Trace

# What a thread that marks no phase freed, as a copy thread does, may be freed so many phases later the next time:
# a layer has three in each direction.
_SLACK_PHASES = 3


@dataclass(frozen=True, slots=True)
class PhaseLabel:
    """One visit of a phase: `name` as the planner knows it, `visit` from 0 as it comes again within a step."""

    name: str
    visit: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a step; it lives from its own number until just before request number `end`."""

    phase: PhaseLabel
    stream: int
    num_bytes: int
    thread: int
    end: int | None = None  # None: it outlives the step

    def is_like(self, other: RecordedRequest) -> bool:
        """The same request of another step."""
        return (self.phase, self.stream, self.num_bytes) == (other.phase, other.stream, other.num_bytes)


@dataclass(frozen=True)
class Recording:
    """One step's requests, in their order."""

    requests: tuple[RecordedRequest, ...]

    @cached_property
    def trace(self) -> Trace:
        """For the planner; its requests are these, in the same order."""
        ends: dict[int, list[int]] = {}
        for number, request in enumerate(self.requests):
            if request.end is not None:
                ends.setdefault(request.end, []).append(number)
        events, phase, thread = [], "", 0
        for number in range(len(self.requests) + 1):
            events += [Event("free", ended, 0, phase, 0, thread) for ended in ends.get(number, ())]
            if number < len(self.requests):
                request = self.requests[number]
                phase, thread = request.phase.name, request.thread
                events.append(Event("malloc", number, request.num_bytes, phase, request.stream, thread))
        return Trace(tuple(events))

    def merged(self, earlier: Recording) -> Recording:
        """This recording with each request living as long as in either; this one alone where the steps differ."""
        if len(self.requests) != len(earlier.requests):
            return self
        both = []
        for mine, other in zip(self.requests, earlier.requests, strict=True):
            if not mine.is_like(other):
                return self
            end = None if mine.end is None or other.end is None else max(mine.end, other.end)
            both.append(replace(mine, end=end))
        return Recording(tuple(both))


def to_recording(events: Iterable[native.Event], phases: Sequence[PhaseLabel]) -> Recording:
    """Keeps what can be planned: the requests within phases, of threads that mark phases.

    Args:
        events: The log, in order.
        phases: The label of each phase number.
    """
    events = list(events)
    planned_threads = {event.thread for event in events if event.kind == native.EVENT_MARK}
    requests: list[RecordedRequest] = []
    number_of: dict[int, int] = {}  # by the log's number of the request: its number here
    ends: dict[int, int] = {}
    late: list[tuple[int, int]] = []  # the mark at which a free counts, and the request it ends
    num_marks = 0
    for event in events:
        if event.kind == native.EVENT_MARK:
            num_marks += 1
            ends |= {number: len(requests) for due, number in late if due < num_marks}
            late = [(due, number) for due, number in late if due >= num_marks]
        elif event.kind == native.EVENT_ALLOC:
            if event.phase != native.NO_PHASE and event.thread in planned_threads:
                number_of[event.request] = len(requests)
                phase = phases[event.phase]
                requests.append(RecordedRequest(phase, event.stream, event.bytes, event.thread))
        elif event.kind == native.EVENT_FREE and event.request in number_of:
            number = number_of[event.request]
            if event.thread in planned_threads:
                ends[number] = len(requests)
            else:
                late.append((num_marks + _SLACK_PHASES, number))
    ends |= {number: len(requests) for _, number in late}
    return Recording(tuple(replace(request, end=ends.get(number)) for number, request in enumerate(requests)))
