"""A run as it stands, for people: `RunReport` holds the figures and renders them as text, JSON or one HTML page.

Made by the session. Knows plain numbers only; the page's plots need matplotlib, which is optional.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from memo_hf.errors import ConfigError
from memo_hf.forecasting.running import RunForecast
from memo_hf.planner.problem import Placement
from memo_hf.report.stats import SessionStats
from memo_hf.report.summary import summary

FORMATS = ("text", "json", "html")


@dataclass(frozen=True, kw_only=True)
class LayerShares:
    """What becomes of one layer's tokens, as shares of 1: activations swapped to the host, kept on the device, or
    recomputed per token; `whole` where the layer is recomputed whole, its attention too."""

    name: str
    mode: str
    swapped: float = 0.0
    kept: float = 0.0
    recomputed: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One session at one moment.

    Attributes:
        stats: of the session.
        min_tokens: below which forward passes run untouched.
        compared: (what, "B" or "s", forecast, measured).
        layers: what becomes of each layer's tokens in the last forward pass.
        forecast: of the last shape, or None where there was none or the model is not one that the forecast describes.
        device_budget_bytes: what training may take on the device, or None where it has no limit of its own.
        address_map: the planned addresses of a step, or None.
    """

    stats: SessionStats
    min_tokens: int
    compared: tuple[tuple[str, str, float, float], ...] = ()
    layers: tuple[LayerShares, ...] = ()
    forecast: RunForecast | None = None
    device_budget_bytes: float | None = None
    address_map: Placement | None = None

    def with_device_peak(self, measured_bytes: int) -> RunReport:
        """This report, with the peak of the device as somebody measured it beside the forecast's, if there is one."""
        if self.forecast is None:
            return self
        peak = ("device peak", "B", self.forecast.device_bytes, measured_bytes)
        return dataclasses.replace(self, compared=(peak, *(row for row in self.compared if row[0] != "device peak")))

    def render(self, format: str) -> str:
        """The report as "text", "json" or "html". Raises `ConfigError` for another format, or without matplotlib."""
        if format not in FORMATS:
            raise ConfigError(f"format is {format!r}; it must be one of {list(FORMATS)}")
        if format == "html":
            from memo_hf.report.page import page

            return page(self)
        return self.text() if format == "text" else json.dumps(self.to_dict(), indent=1)

    def text(self) -> str:
        """Several lines: modes with reasons, bytes planned, swapped and prefetched, forecast beside measured, and the
        device's peak without memo_hf."""
        if self.stats.stock_forwards and not self.stats.forwards:
            untouched = self.stats.untouched(self.min_tokens)
            return f"memo_hf ran on no batch ({untouched}). MemoConfig(min_tokens=0) runs it on all"
        num_whole = sum(layer.mode == "token" and layer.whole == 1 for layer in self.layers)
        return "\n".join(
            [self.stats.describe(), *summary(self.stats, self.min_tokens, self.compared, self.forecast, num_whole)]
        )

    def to_dict(self) -> dict:
        """Plain values; bytes and seconds, no units in words. The address map is left out: it is as long as a step."""
        forecast = None
        if self.forecast is not None:
            forecast = {
                **dataclasses.asdict(self.forecast),
                "host_bytes": self.forecast.host_bytes,
                "device_bytes": self.forecast.device_bytes,
            }
        return {
            **dataclasses.asdict(self.stats),
            "layers": [
                dataclasses.asdict(layer) | {"reason": stats.reason}
                for layer, stats in zip(self.layers, self.stats.layers, strict=True)
            ],
            "min_tokens": self.min_tokens,
            "untouched": self.stats.untouched(self.min_tokens),
            "compared": [
                {"what": what, "unit": unit, "forecast": forecast, "measured": measured}
                for what, unit, forecast, measured in self.compared
            ],
            "forecast": forecast,
            "device_budget_bytes": self.device_budget_bytes,
        }
