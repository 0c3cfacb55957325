"""The address table that the allocator serves from, saved between runs.

Made by `planned` from a recording and the planner's placement. The file is JSON: data only, checked in every number.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from memo_hf.allocator import native
from memo_hf.allocator.recording import PhaseLabel, Recording
from memo_hf.errors import PlanError
from memo_hf.planner.problem import Placement

_FORMAT = 1
_LARGEST = 2**62


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a step: which it is (its lane's next one of these bytes) and where it goes."""

    phase: PhaseLabel
    stream: int
    num_bytes: int
    offset: int


@dataclass(frozen=True)
class ServingPlan:
    """The addresses of one step.

    Attributes:
        fingerprint: Of all that the requests depend on: model, settings, library releases, shape of the batch.
        requests: In the order in which they come.
        arena_bytes: What the addresses span.
        lower_bound: The most bytes ever alive at once; no plan needs fewer.
        proved: No plan needs fewer than `arena_bytes`.

    Raises:
        PlanError: a number that cannot be.
    """

    fingerprint: str
    requests: tuple[PlannedRequest, ...]
    arena_bytes: int
    lower_bound: int
    proved: bool

    def __post_init__(self):
        for number, request in enumerate(self.requests):
            fits = 0 < request.num_bytes <= _LARGEST and 0 <= request.offset <= _LARGEST
            if not (fits and 0 <= request.stream < native.NO_PHASE and request.phase.visit >= 0):
                raise PlanError(f"request {number} of the plan is {request}: a number is out of range; plan again")
        if not 0 <= self.arena_bytes <= _LARGEST:
            raise PlanError(f"the plan's arena has {self.arena_bytes} bytes, which is out of range; plan again")

    @classmethod
    def of(cls, recording: Recording, placement: Placement, fingerprint: str) -> ServingPlan:
        """The table for a recording whose trace was placed."""
        rows = recording.trace.serving_table(placement)
        requests = tuple(
            PlannedRequest(request.phase, stream, size, offset)
            for request, (_, stream, size, offset) in zip(recording.requests, rows, strict=True)
        )
        return cls(fingerprint, requests, placement.peak, placement.lower_bound, placement.proved)

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        phases = list(dict.fromkeys(request.phase for request in self.requests))
        number_of = {phase: number for number, phase in enumerate(phases)}
        content = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "arena_bytes": self.arena_bytes,
            "lower_bound": self.lower_bound,
            "proved": self.proved,
            "phases": [[phase.name, phase.visit] for phase in phases],
            "requests": [[number_of[r.phase], r.stream, r.num_bytes, r.offset] for r in self.requests],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> ServingPlan:
        """Reads a saved plan.

        Raises:
            PlanError: the file is damaged, of another release, or belongs to another model, setting or shape.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise PlanError(f"{path} has format {content['format']}, this release reads {_FORMAT}; delete it")
            if content["fingerprint"] != fingerprint:
                raise PlanError(
                    f"{path} was made for {content['fingerprint']!r}, not for {fingerprint!r}; delete it or use "
                    "another folder"
                )
            phases = [PhaseLabel(str(name), int(visit)) for name, visit in content["phases"]]
            requests = []
            for row in content["requests"]:
                phase, stream, num_bytes, offset = (_whole(value) for value in row)
                requests.append(PlannedRequest(phases[phase], stream, num_bytes, offset))
            sizes = (_whole(content[name]) for name in ("arena_bytes", "lower_bound"))
            return cls(fingerprint, tuple(requests), *sizes, content["proved"] is True)
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise PlanError(f"{path} is damaged ({type(error).__name__}: {error}); delete it") from error


def _whole(value) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value
