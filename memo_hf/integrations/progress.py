"""What a run shows while it trains: tokens per second and peak bytes, on Trainer's progress bar and in its logs.

Made by the Trainer integration for one training loop. It adds to the bar that Trainer draws and draws none itself.
"""

from __future__ import annotations

import resource
import time

import torch
from transformers import TrainerCallback

from memo_hf.units import format_bytes

_GIB = 2**30


class RunFigures(TrainerCallback):
    """Figures of the steps of one session.

    Args:
        session: whose steps these are.
        callbacks: of the trainer; whichever of them draws the bar.
    """

    def __init__(self, session, callbacks: list):
        self._session, self._callbacks = session, callbacks
        self._tokens, self._time = 0, time.perf_counter()
        self._rate: float | None = None
        self._steps = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if self._steps == 0:
            self._show("measuring the first step" if self._session.stats.phase == "measuring" else "first step")

    def on_step_end(self, args, state, control, **kwargs):
        tokens, now = self._session.stats.total_tokens, time.perf_counter()
        if now > self._time:
            self._rate = (tokens - self._tokens) / (now - self._time)
        self._tokens, self._time = tokens, now
        self._steps += 1
        stats, (where, peak) = self._session.stats, _peak_bytes(args.device)
        doing = "measured, solving next" if stats.phase == "measuring" else f"swap fraction {stats.swap_fraction:.3g}"
        untouched = stats.untouched(self._session.config.effective_min_tokens)
        if untouched:
            doing = f"{doing}, {untouched}" if stats.forwards else untouched
        self._show(f"{doing}, {self._rate or 0.0:,.0f} tokens/s, {where} peak {format_bytes(peak)}")

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Numbers for Trainer's loggers, of this process. The rate is of the last step."""
        stats, (where, peak) = self._session.stats, _peak_bytes(device)
        found = {
            "memo/swapped_gib": stats.swapped_bytes / _GIB,
            "memo/host_peak_gib": stats.peak_host_bytes / _GIB,
            "memo/swap_fraction": stats.swap_fraction,
            "memo/untouched_batches": stats.stock_forwards,
            f"memo/{where}_peak_gib": peak / _GIB,
        }
        return found if self._rate is None else {**found, "memo/tokens_per_second": self._rate}

    def _show(self, text: str) -> None:
        for callback in self._callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.set_postfix_str(f"memo_hf: {text}")


def _peak_bytes(device: torch.device) -> tuple[str, int]:
    """Where, and the most bytes that were in use there: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return "device", torch.cuda.max_memory_allocated(device)
    return "process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
