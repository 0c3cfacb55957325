"""Figures of a run: bytes by part against their budgets, what becomes of each layer's tokens, forecast beside measured.

Called by `page`. Needs matplotlib, which is optional; knows numbers only.
"""

from __future__ import annotations

from memo_hf.report.address_map import address_map
from memo_hf.report.run_report import RunReport
from memo_hf.units import format_bytes

_GIB = 2**30
_MIB = 2**20
_SHARES = {
    "swapped": ("swapped to the host", "tab:blue"),
    "kept": ("kept on the device", "tab:green"),
    "recomputed": ("recomputed per token", "tab:orange"),
    "whole": ("recomputed whole, attention too", "tab:red"),
}


def figures(report: RunReport) -> dict:
    """Matplotlib figures by title, of what the report has. Raises ImportError without matplotlib."""
    found = {}
    if report.forecast is not None:
        found["Bytes by part"] = bytes_by_part(report)
        found["Device peak with and without memo_hf"] = with_and_without(report)
    if report.layers:
        found["What becomes of each layer's tokens"] = layer_shares(report)
    if report.compared:
        found["Forecast beside measured"] = forecast_beside_measured(report)
    if report.address_map is not None:
        found["Planned addresses of a step"] = address_map(report.address_map)
    return found


def bytes_by_part(report: RunReport):
    """Forecast bytes of the device at its peak and of the host, stacked by what they are, against the budgets."""
    forecast = report.forecast
    rows = {
        "device peak": (forecast.device_parts, report.device_budget_bytes),
        "host": (forecast.host_parts, report.stats.host_budget_bytes),
    }
    figure, axes = _figure(11, 4.4, columns=2)
    for axis, (where, (parts, budget)) in zip(axes, rows.items(), strict=True):
        total = sum(parts.values())
        unit, name = _unit(total)
        bottom = 0.0
        for part, size in parts.items():
            if size >= 0.0005 * total and size > 0:
                axis.bar(0, size / unit, bottom=bottom, width=0.5, label=f"{part}: {format_bytes(size)}")
                bottom += size / unit
        title = f"{where}: {format_bytes(total)}"
        if budget:
            title += f" of {format_bytes(budget)}"
            # A budget far above what is used would flatten the bar; the title says it.
            if budget < 3 * total:
                axis.axhline(budget / unit, color="black", linestyle="--", label="budget")
        axis.set(title=title, ylabel=name, xticks=[], xlim=(-0.5, 1.6))
        axis.legend(fontsize="small", loc="upper right")
    figure.suptitle(f"forecast; the device's peak is at: {forecast.moment}")
    return figure


def with_and_without(report: RunReport):
    """The device's peak by forecast: as it is, and by what would run instead."""
    peaks = {"memo_hf": report.forecast.device_bytes, **report.forecast.device_bytes_without}
    unit, name = _unit(max(peaks.values()))
    figure, (axes,) = _figure(11, 0.8 + 0.5 * len(peaks))
    bars = axes.barh(list(peaks), [size / unit for size in peaks.values()], height=0.5)
    bars[0].set_color("tab:orange")
    axes.bar_label(bars, [format_bytes(size) for size in peaks.values()], padding=3, fontsize="small")
    axes.set(xlabel=f"{name} on the device, forecast", xlim=(0, 1.15 * max(peaks.values()) / unit))
    axes.invert_yaxis()
    return figure


def layer_shares(report: RunReport):
    """For each layer the shares of its tokens that are swapped, kept, recomputed, or recomputed with the layer."""
    figure, (axes,) = _figure(11, 3.6)
    bottom = [0.0] * len(report.layers)
    for field, (label, colour) in _SHARES.items():
        shares = [getattr(layer, field) for layer in report.layers]
        if any(shares):
            axes.bar(range(len(shares)), shares, bottom=bottom, label=label, color=colour, width=0.9)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set(xlabel="layer", ylabel="share of tokens", ylim=(0, 1.25), xlim=(-0.6, len(report.layers) - 0.4))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="upper right", ncols=4)
    return figure


def forecast_beside_measured(report: RunReport):
    """Each compared figure, measured as a multiple of its forecast."""
    figure, (axes,) = _figure(11, 1.2 + 0.8 * len(report.compared))
    labels = []
    for row, (what, unit, forecast, measured) in enumerate(report.compared):
        said = [format_bytes(value) if unit == "B" else f"{value:.3g} s" for value in (forecast, measured)]
        labels.append(f"{what}\nforecast {said[0]}\nmeasured {said[1]}")
        axes.barh(row, measured / forecast if forecast else 0.0, height=0.5, color="tab:blue")
    axes.axvline(1.0, color="black", linestyle="--", label="forecast")
    axes.set(xlabel="measured / forecast", xlim=(0, None))
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def _unit(num_bytes: float) -> tuple[int, str]:
    return (_GIB, "GiB") if num_bytes >= _GIB / 10 else (_MIB, "MiB")


def _figure(width: float, height: float, columns: int = 1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
