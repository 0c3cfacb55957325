"""Draws a placement: which bytes of the arena are taken when. Needs matplotlib, which is optional.

Called by `memo-hf place --plot`, by a run's HTML page and by notebooks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memo_hf.errors import PlanError
from memo_hf.planner.problem import Placement

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def address_map(placement: Placement):
    """A matplotlib figure: time to the right, addresses upwards, a rectangle for each buffer.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("plots need matplotlib, which is not installed; pip install matplotlib") from None

    problem = placement.problem
    unit, unit_name = next((u, name) for u, name in _UNITS if placement.peak >= u or u == 1)
    bottom = np.array(placement.offsets, dtype=np.float64) / unit
    top = bottom + problem.size / unit
    x = np.stack((problem.lower, problem.lower, problem.upper, problem.upper), axis=1)
    y = np.stack((bottom, top, top, bottom), axis=1)

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    boxes = PolyCollection(np.stack((x, y), axis=2), cmap="viridis", rasterized=True)
    boxes.set_array(np.log2(problem.size))
    axes.add_collection(boxes)
    axes.axhline(
        placement.lower_bound / unit, color="tab:red", linewidth=1, label="lower bound: most bytes alive at once"
    )
    axes.set(
        xlim=(x.min(initial=0), x.max(initial=1)),
        ylim=(0, 1.05 * max(placement.peak, 1) / unit),
        xlabel="time (events)",
        ylabel=f"address ({unit_name})",
        title=f"{len(problem)} buffers, peak {placement.peak / unit:.4g} {unit_name}, "
        f"{100 * placement.gap:.2f}% above the lower bound",
    )
    axes.annotate(placement.method, (0, -0.1), xycoords="axes fraction", fontsize="x-small", annotation_clip=False)
    axes.legend(loc="upper right")
    figure.colorbar(boxes, label="log2 of size in bytes")
    return figure


def plot_address_map(placement: Placement, path: str | Path) -> None:
    """Writes `address_map` as an image, by the suffix of `path`. Raises `PlanError` where that cannot be."""
    try:
        address_map(placement).savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise PlanError(f"plot: cannot write {path}: {error}") from None
