"""The most that a CUDA device had in use in steps of one shape, from torch's own count, without resetting that.

Made by the session, for its report. A peak that others reached before, such as a plain run in the same process, is not
told as that of the steps. Knows no layer and no swap engine.
"""

from __future__ import annotations

import torch


class PeakWatch:
    """Watches `torch.cuda.max_memory_allocated`; elsewhere there is nothing to watch: `num_bytes` is None."""

    def __init__(self):
        self._device: torch.device | None = None
        self._shape: tuple[int, int] | None = None
        self._before = 0

    def begin_step(self, device: torch.device, shape: tuple[int, int]) -> None:
        """A step on a batch of `shape` begins."""
        if device.type == "cuda" and (device, shape) != (self._device, self._shape):
            self._device, self._shape = device, shape
            self._before = torch.cuda.max_memory_allocated(device)

    def begin_other(self) -> None:
        """Something else runs, such as a step without memo_hf: what it takes is not that of the steps."""
        self._shape = None

    @property
    def num_bytes(self) -> int | None:
        """The most there was since steps of the last shape began; None where others took more, or without one."""
        if self._shape is None:
            return None
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak if peak > self._before else None
