"""What surrounds a run of a layer's code and its recompute alike: random state and autocast. Knows no layer."""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor


class RandomState:
    """The random state of the CPU and of `device` at one moment; `restored()` draws from it again, then goes back."""

    def __init__(self, device: torch.device):
        self._device = None if device.type == "cpu" else device
        self._states = self._read()

    @classmethod
    def now(cls, device: torch.device, last: RandomState) -> RandomState:
        """The present state; `last` itself where nothing was drawn since."""
        state = cls(device)
        pairs = zip(state._states, last._states, strict=True)
        return last if all(mine is None or _bytes(mine) == _bytes(its) for mine, its in pairs) else state

    def _read(self):
        own = torch.get_device_module(self._device).get_rng_state(self._device) if self._device else None
        return torch.get_rng_state(), own

    def _write(self, states):
        torch.set_rng_state(states[0])
        if self._device:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    @contextlib.contextmanager
    def restored(self):
        now = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(now)


def drawing_from(state: RandomState | None):
    """Around a recompute: draw what was drawn from `state`, where anything was."""
    return contextlib.nullcontext() if state is None else state.restored()


def _bytes(state: Tensor) -> bytes:
    """Of a random state, which has values even where a step is traced on tensors that have none: no operator is run."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class AutocastState:
    """The autocast setting of one moment. Backward runs outside of the forward's autocast and has to enter it again."""

    def __init__(self, device_type: str):
        self._device_type = device_type
        self.enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def __call__(self):
        # No cache: a cast made under no_grad and cached would be reused by a run with a graph and lose its gradient.
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=self.enabled, cache_enabled=False)
