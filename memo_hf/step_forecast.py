"""Steps by forecast, beside what they took. Made by `planning`, which says when a step begins and how it runs."""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.forecasting.running import RunForecast
from memo_hf.planner.plan import Measurement, Shape
from memo_hf.planner.step_times import StepTimes
from memo_hf.planner.swap_fraction import SwapPlan
from memo_hf.solving import Memory, StackSolver


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan by which steps run, and what it was made from."""

    plan: SwapPlan
    measured: Measurement
    memory: Memory


class StepForecast:
    """Forecast and measured steps of one stack.

    Attributes:
        times: of the last steps.
    """

    def __init__(self, solver: StackSolver):
        self._solver = solver
        self.times = StepTimes()
        self._rest_per_token: float | None = None  # seconds outside of the layers, by steps after the measured one

    @property
    def shape(self) -> Shape | None:
        """Of the step that is on, or None before the first."""
        return self.times.shape

    def seconds(self, planned: Planned | None) -> float | None:
        """What a step of the last shape takes; None where no plan is followed."""
        if planned is None:
            return None
        rest = planned.measured.rest_seconds_at(self.shape)
        if self._rest_per_token is not None:
            rest = min(rest, self._rest_per_token * self.shape.num_tokens)
        return self._layers_seconds(planned) + rest

    def learn_rest(self, planned: Planned | None) -> None:
        """Steps of a shape end. What they took beside the layers was more in the measured step, a process's first."""
        measured = self.times.median
        if measured is not None and planned is not None:
            beside = max(0.0, measured - self._layers_seconds(planned))
            self._rest_per_token = beside / self.shape.num_tokens

    def compare(
        self, forecast: RunForecast | None, seconds: float | None, swapped_bytes: int
    ) -> list[tuple[str, str, float, float]]:
        """(what, unit, forecast, measured) of the last shape that ran, for what is known. The device's peak is the
        report's."""
        found = []
        if forecast is not None:
            found.append(("host bytes", "B", forecast.host_bytes, swapped_bytes))
        if self.times.median is not None and seconds is not None:
            found.append(("step", "s", seconds, self.times.median))
        return found

    def _layers_seconds(self, planned: Planned) -> float:
        return self._solver.layers_seconds(planned.plan, planned.measured, self.shape, planned.memory)
