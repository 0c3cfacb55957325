"""The step of a stack that is measured, from which its plans are made: how it runs, and what it found.

Made by `planning`, which decides when. A step that fails or is never backwarded is not taken for one; another is.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from dataclasses import dataclass

from torch import nn

from memo_hf.planner.plan import Measurement, Shape
from memo_hf.profiler import Profile
from memo_hf.solving import StackSolver
from memo_hf.swap import SwapEngine

# Forward passes that may begin before the profiled one's backward has ended; then another is profiled.
_PATIENCE = 8


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one forward pass runs; fields as in `Step` and `StepSettings`."""

    swap_fraction: float
    rebuild_qkv: bool
    first_kept: int
    whole_layers: frozenset[int] = frozenset()
    observer: Profile | None = None


class FirstStep:
    """Measures one step at fraction 0.

    Args:
        layers: the decoder layers of the stack.
        first_kept: index of the first layer that is not swapped.

    Attributes:
        found: what it found, or None as long as it has not.
    """

    def __init__(self, solver: StackSolver, layers: list[nn.Module], first_kept: int):
        self._solver, self._layers, self._first_kept = solver, layers, first_kept
        self.found: Measurement | None = None
        self._profile = lambda: None  # a weak reference to the one under way
        self._done: tuple[Profile, Shape, float] | None = None
        self._retreats = self._waited = 0

    @property
    def _last_retreat(self) -> int:
        return 1 if self._solver.qkv == "swap" else 2

    def retreat(self) -> bool:
        """The host budget does not suffice for the pass: whether a way that takes less is left to try."""
        if self._retreats >= self._last_retreat:
            return False
        self._retreats += 1
        self._profile = lambda: None
        return True

    @property
    def has_retreated(self) -> bool:
        """Some pass was to swap more than the host budget holds."""
        return self._retreats > 0

    def way(self) -> Choice:
        """Fraction 0, in the way that takes as little host memory as has been found to be necessary."""
        return Choice(
            swap_fraction=0.0,
            rebuild_qkv=self._solver.qkv == "rebuild" or (self.has_retreated and self._solver.sequence_parallel == 1),
            first_kept=self._first_kept,
            whole_layers=frozenset(range(self._first_kept if self._retreats == self._last_retreat else 0)),
        )

    def choice(self, engine: SwapEngine, shape: Shape, now: float) -> Choice:
        """As `way`, under measurement unless an earlier pass's backward is still to come."""
        way = self.way()
        return dataclasses.replace(way, observer=self._observer(engine, shape, now, way.rebuild_qkv))

    def read(self, static_bytes: float) -> bool:
        """Read what a pass that has been through backward measured. False where there is none that was not read.

        Args:
            static_bytes: of the device's memory whatever the shape, as it is now.
        """
        if self._done is None:
            return False
        profile, shape, began = self._done
        self._done = None
        layers = profile.costs(self._first_kept)
        to_host, to_device = profile.rates()
        rest = time.perf_counter() - began - profile.layers_seconds()
        self.found = Measurement(
            shape=shape,
            layers=layers,
            windows=tuple(self._solver.own_window(self._layers[indices[0]]) for indices in profile.kinds),
            static_bytes=static_bytes,
            rest_seconds=max(0.0, rest),
            to_host_bytes_per_second=to_host,
            to_device_bytes_per_second=to_device,
            indices=tuple(tuple(indices) for indices in profile.kinds),
        )
        return True

    def _observer(self, engine: SwapEngine, shape: Shape, now: float, rebuilds: bool) -> Profile | None:
        if self.found is not None or self._done is not None:
            return None  # measured; other ranks are not that far
        if self._profile() is not None and self._waited < _PATIENCE:
            self._waited += 1
            return None
        self._waited = 0
        profile = Profile(
            engine,
            shape.batch * shape.seq_len,
            rebuilds_qkv=rebuilds,
            on_end=lambda ended: self._note(ended, shape, now),
        )
        self._profile = weakref.ref(profile)
        return profile

    def _note(self, profile: Profile, shape: Shape, began: float) -> None:
        # What it found is read later: a GPU may not be there yet.
        self._done = (profile, shape, began)
