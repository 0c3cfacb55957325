"""How long the last steps took, to be compared with what was predicted. Used by `planning`; knows no plan."""

from __future__ import annotations

import statistics
from collections import deque

from memo_hf.planner.plan import Shape


class StepTimes:
    """Durations of steps of one shape, from the beginning of one to that of the next.

    The first step of a shape is left out: it makes memory that later ones find.

    Attributes:
        shape: of the step that is on, or None before the first.
    """

    def __init__(self):
        self.shape: Shape | None = None
        self._began = 0.0
        self._num_alike = 0
        self._seconds: deque[float] = deque(maxlen=32)

    def begin(self, shape: Shape, now: float) -> None:
        """A step of `shape` begins at `now`, in seconds, and the one before ends."""
        if shape != self.shape:
            self.restart()
        elif self._num_alike > 1:
            self._seconds.append(now - self._began)
        self.shape, self._began = shape, now
        self._num_alike += 1

    def restart(self) -> None:
        """Steps from the one that is on are not like those before."""
        self._seconds.clear()
        self._num_alike = 0

    @property
    def median(self) -> float | None:
        """Seconds of the last steps, or None where none has been seen."""
        return statistics.median(self._seconds) if self._seconds else None
