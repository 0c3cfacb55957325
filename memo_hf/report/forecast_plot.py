"""A picture of a forecast over sequence length: device and host bytes with their budgets, step time by strategy.

Called by `memo-hf plan --plot`; needs matplotlib, knows no torch.
"""

from __future__ import annotations

from pathlib import Path

from memo_hf.errors import ConfigError
from memo_hf.forecasting.compare import compare
from memo_hf.forecasting.setup import Setup

_GIB = 2**30
_LENGTHS = 9


def plot_forecast(setup: Setup, path: str | Path) -> None:
    """Write an image of `setup` over lengths from a sixteenth of its own to twice it.

    Args:
        path: of the image; its suffix decides the format (png, svg, pdf).

    Raises:
        ConfigError: matplotlib is missing, or cannot write such a file.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; run pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    lengths = _lengths(setup)
    rows = [compare(setup.replace(seq_len=length)) for length in lengths]
    thousands = [length / 1024 for length in lengths]
    figure, (device, host, seconds) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for index, name in enumerate(row["strategy"] for row in rows[0]):
        chosen = [row[index] for row in rows]
        style = {"label": name, "linewidth": 2.5 if name == "memo_hf" else 1.2}
        device.plot(thousands, [row["device_peak_bytes"] / _GIB for row in chosen], **style)
        host.plot(thousands, [row["host_bytes_per_rank"] * setup.local_ranks / _GIB for row in chosen], **style)
        fitting = [row["step_seconds"] if row["fits"] else float("nan") for row in chosen]
        seconds.plot(thousands, fitting, marker=".", **style)
    device.axhline(setup.device.budget_bytes / _GIB, color="black", linestyle="--", label="budget")
    host.axhline(setup.node_host_bytes / _GIB, color="black", linestyle="--", label="budget")
    device.set(title="device peak", ylabel="GiB")
    host.set(title="host memory of a node", ylabel="GiB")
    fits = any(row["fits"] for found in rows for row in found)  # a log scale without a value cannot be drawn
    seconds.set(title="step, where it fits", ylabel="seconds", yscale="log" if fits else "linear")
    for axes in (device, host, seconds):
        axes.set(xlabel="tokens / 1024")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(alpha=0.3)
    seconds.legend(fontsize="small")
    figure.suptitle(f"{setup.model.name}, {setup.gpus} x {setup.device.name}")
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"plot: cannot write {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _lengths(setup: Setup) -> list[int]:
    """Lengths a factor of `32 ** (1 / 8)` apart, multiples of the ranks that share a sequence."""
    step = setup.sequence_parallel
    first = setup.seq_len / 16
    found = [max(step, round(first * 32 ** (i / (_LENGTHS - 1)) / step) * step) for i in range(_LENGTHS)]
    return sorted(set(found))
