"""What a session does and has done, as lines of text, with the forecast beside it. Knows numbers only."""

from __future__ import annotations

from collections import Counter

from memo_hf.units import format_bytes

_TOLERANCE = 0.10


def start_line(stats, batch_size: int, num_tokens: int, forecast, has_stepped: bool) -> str:
    """The line that a run begins with: mode, swap fraction, limit, host memory, and what the forecast says.

    Args:
        stats: the session's `SessionStats`, once the first forward pass is decided.
        batch_size, num_tokens: of that pass: sequences, and tokens of each.
        forecast: its `RunForecast`, or None where the model is not one that the forecast describes.
        has_stepped: an optimizer has, so that its states are among what is forecast.
    """
    line = stats.describe()
    if stats.host_budget_bytes:
        line += f"; host budget {format_bytes(stats.host_budget_bytes)}"
    if forecast is None:
        return line
    line += (
        f"; forecast for {batch_size} x {num_tokens:,} tokens: {format_bytes(forecast.host_bytes)} swapped, "
        f"device peak {format_bytes(forecast.device_bytes)}"
        + ("" if has_stepped else ", the optimizer's states not counted yet")
    )
    return line if forecast.step_seconds is None else f"{line}, step {forecast.step_seconds:.3g} s"


def summary(
    stats, min_tokens: int, figures: list[tuple[str, str, float, float]], forecast=None, num_whole: int = 0
) -> list[str]:
    """Lines on modes with reasons, bytes planned, swapped and prefetched, host memory, and forecast beside measured.

    Args:
        stats: the session's `SessionStats`.
        min_tokens: below which forward passes ran untouched.
        figures: as for `compared`.
        forecast: the `RunForecast` of the last shape, or None.
        num_whole: layers in token mode that were recomputed whole all the same.
    """
    modes = Counter((layer.mode, layer.reason) for layer in stats.layers)
    lines = [f"  {number} x {mode} mode: {reason}" for (mode, reason), number in modes.items()]
    if stats.forwards:
        lines += [f"  chunk: {stats.chunk_size} tokens", f"  {_what_is_swapped(stats, num_whole)}"]
    lines += [
        f"  planned {format_bytes(stats.planned_bytes)}, swapped {format_bytes(stats.swapped_bytes)}, "
        f"prefetched {format_bytes(stats.prefetched_bytes)} in the last step",
        f"  host: peak {format_bytes(stats.peak_host_bytes)}, reserved {format_bytes(stats.host_reserved_bytes)}"
        + (f" of {format_bytes(stats.host_budget_bytes)}" if stats.host_budget_bytes else ""),
    ]
    if stats.serving.allocator == "planned":
        lines.append(f"  {stats.serving.describe()}")
    untouched = stats.untouched(min_tokens)
    if untouched:
        lines.append(f"  {untouched}")
    for line in compared(figures):
        told = untouched and line.startswith("  device peak") and "warning" in line
        lines.append(f"{line}, or the peak was that of an untouched batch" if told else line)
    return lines + ([] if forecast is None else _device_peak(figures, forecast))


def _what_is_swapped(stats, num_whole: int) -> str:
    if stats.strategy != "memo":
        return "swapped: nothing; activation checkpointing is predicted to be as fast, and runs"
    always = "inputs" + (", q, k, v" if stats.qkv == "swap" else "") + " and attention outputs of all tokens"
    if stats.swap_fraction:
        always += f", and all else of {stats.swap_fraction:.1%} of them"
    whole = f"; of {num_whole} layers the inputs alone are swapped, attention is recomputed too" if num_whole else ""
    return f"swapped: {always}; the rest is recomputed{whole}"


def _device_peak(figures, forecast) -> list[str]:
    """The device's peak where nobody has measured it, and what it would be without memo_hf."""
    lines = []
    if all(what != "device peak" for what, *_ in figures):
        lines.append(
            f"  device peak: forecast {format_bytes(forecast.device_bytes)}, not measured; to have it beside, train "
            "in `with AllocatorMeter() as meter:` (from memo_hf.allocator.meter) and call trainer.save_memo_report("
            "path, meter.peak_with(model)), without Trainer session.report(meter.peak_with(model)), with the session "
            "that enable returns or accelerator.memo_sessions[0]"
        )
    without = ", ".join(f"{name} {format_bytes(size)}" for name, size in forecast.device_bytes_without.items())
    lines.append(f"  without memo_hf, by forecast: {without}")
    if min(forecast.device_bytes_without.values()) <= forecast.device_bytes:
        lines.append("  memo_hf saves no device memory at this length")
    return lines


def compared(figures: list[tuple[str, str, float, float]]) -> list[str]:
    """A line for each (what, "B" or "s", forecast, measured), with a warning where they differ by more than 10 %."""
    lines = []
    for what, unit, forecast, measured in figures:
        text = [format_bytes(value) if unit == "B" else f"{value:.3g} s" for value in (forecast, measured)]
        line = f"  {what}: forecast {text[0]}, measured {text[1]}"
        error = forecast / measured - 1 if measured else float(forecast != 0)
        if abs(error) > _TOLERANCE:
            line += f"; warning: the forecast is off by {error:+.0%}"
        lines.append(line)
    return lines
