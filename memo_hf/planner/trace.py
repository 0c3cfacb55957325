"""The log of a training step: every malloc and free, with the phase, stream and thread it came in.

Written by the native recorder and by `snapshot.read_snapshot`; read by the planners. A text file, one event a line:

    op,id,size,phase,stream,thread
    malloc,0,4096,forward 0,0,0
    malloc,1,1048576,forward 0,0,0
    free,0,0,backward 0,0,1

`id` is the number of the request, and a free names the malloc it ends. `size` is what was asked for, in bytes, and not
read for a free. `phase` is free text without commas; `forward 3` and `backward 3` are a layer's. The time of an event
is its line.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memo_hf.errors import PlanError
from memo_hf.planner.problem import Buffer, Placement, Problem

ALIGNMENT = 512  # bytes; of every address that is served
_COLUMNS = ("op", "id", "size", "phase", "stream", "thread")


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a trace."""

    op: str
    id: int
    size: int
    phase: str
    stream: int
    thread: int


@dataclass(frozen=True, slots=True)
class Request:
    """A malloc with its free: alive in `[lower, upper)`, in event numbers. `size` is what was asked for, in bytes."""

    id: int
    lower: int
    upper: int
    size: int
    phase: str
    stream: int


@dataclass(frozen=True)
class Trace:
    """The events of one step.

    Attributes:
        events: In the order in which they happened.
        repeats: The step runs again and again, so that what it leaves alive is still there when it starts anew: such
            requests live through all of it. False for a recording that is only looked at: they live to its end.

    Raises:
        PlanError: an id is allocated twice, or freed twice.
    """

    events: tuple[Event, ...]
    repeats: bool = True

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """In the order of their mallocs, without those of no bytes and frees of what was there before the trace."""
        ends: dict[int, int] = {}
        born: set[int] = set()
        for time, event in enumerate(self.events):
            if event.op == "malloc":
                if event.id in born:
                    raise PlanError(
                        f"event {time}: request {event.id} is allocated twice; ids must be unique in a trace"
                    )
                born.add(event.id)
            elif event.id in ends:
                raise PlanError(f"event {time}: request {event.id} is freed twice; record the step again")
            else:
                ends[event.id] = time
        requests = []
        for time, event in enumerate(self.events):
            if event.op == "malloc" and event.size > 0:
                lower, upper = time, ends.get(event.id, len(self.events))
                if event.id not in ends and self.repeats:
                    lower = 0
                requests.append(Request(event.id, lower, upper, event.size, event.phase, event.stream))
        return tuple(requests)

    @property
    def streams(self) -> list[int]:
        """The streams that ask for memory, ascending."""
        return sorted({request.stream for request in self.requests})

    def problem(self, stream: int | None = None) -> Problem:
        """The requests (of one stream, or all) as buffers of aligned sizes, in the order of their mallocs."""
        return Problem(
            tuple(to_buffer(request) for request in self.requests if stream is None or request.stream == stream)
        )

    def serving_table(self, placement: Placement) -> list[tuple[str, int, int, int]]:
        """`(phase, stream, size, offset)` in the order of the mallocs: what the allocator is given to serve.

        Args:
            placement: Of `problem()`.
        """
        if placement.problem != self.problem():
            raise PlanError("the placement was made for another trace; plan this one")
        return [(r.phase, r.stream, r.size, o) for r, o in zip(self.requests, placement.offsets, strict=True)]


def to_buffer(request: Request, lower: int | None = None, upper: int | None = None) -> Buffer:
    """The request as a buffer of aligned size."""
    size = -(-request.size // ALIGNMENT) * ALIGNMENT
    lower, upper = request.lower if lower is None else lower, request.upper if upper is None else upper
    return Buffer(str(request.id), lower, upper, size)


def is_trace(path: str | Path) -> bool:
    """Whether the file begins as a trace does."""
    with open(path, encoding="utf-8") as file:
        return file.readline().strip() == ",".join(_COLUMNS)


def read_trace(path: str | Path, repeats: bool = True) -> Trace:
    """Reads a trace. Raises `PlanError` naming file and line."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = tuple(next(rows, ()))
        if header != _COLUMNS:
            raise PlanError(
                f"{path}: the first line is {','.join(header)!r}; a trace begins with {','.join(_COLUMNS)!r}"
            )
        events = []
        for row in rows:
            try:
                op, number, size, phase, stream, thread = row
                event = Event(op, int(number), int(size), phase, int(stream), int(thread))
            except ValueError as error:
                raise PlanError(f"{path}, line {rows.line_num}: {error}; need {','.join(_COLUMNS)}") from None
            if op not in ("malloc", "free") or event.size < 0:
                raise PlanError(
                    f"{path}, line {rows.line_num}: op {op!r}, size {size}; need malloc or free, at least 0"
                )
            events.append(event)
    return Trace(tuple(events), repeats)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace that `read_trace` reads."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for event in trace.events:
            writer.writerow([getattr(event, name) for name in _COLUMNS])
