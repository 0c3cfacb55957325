"""What the tests of whole sessions share: sessions on simulated copies, and what gradients and memory must be.

Knows `memo_hf.enable` and the tiny models; not how layers run.
"""

from __future__ import annotations

import gc

import torch

import memo_hf
from memo_hf import MemoConfig
from memo_hf.swap import SwapEngine
from tests.harness.simulated_copies import GuardedPool, SimulatedCopies, settle
from tests.tiny_models import gradients, random_ids, tiny

IDS = random_ids(2, 13)
TOKEN = dict(swap_fraction=0.5, chunk_size=12, unswapped_layers=1)
REBUILD = dict(swap_fraction=0.3, chunk_size=20, unswapped_layers=1, qkv="rebuild")
WHOLE = dict(mode="layer", swap_fraction=0.0, unswapped_layers=1)
SETTINGS = {"token": TOKEN, "rebuild": REBUILD, "layer": WHOLE}


def simulate(monkeypatch, seed: int = 0, eagerness: float = 0.3, copies_are_short=False) -> list[SimulatedCopies]:
    """Sessions enabled from now on copy in random legal orders, over poison. Returns their backends as they come."""
    backends = []

    def make_engine(device, host_budget_bytes):
        backends.append(SimulatedCopies(seed + len(backends), eagerness, copies_are_short))
        return SwapEngine(device, host_budget_bytes, backend=backends[-1])

    monkeypatch.setattr("memo_hf.session.SwapEngine", make_engine)
    monkeypatch.setattr("memo_hf.swap.engine.HostPool", GuardedPool)
    return backends


def small(family: str = "llama", *, layers: int = 3, **changes):
    """A tiny model of a few layers."""
    return tiny(family, num_hidden_layers=layers, **changes)


def enabled(model, **settings):
    """The session of `model` under `settings`."""
    return memo_hf.enable(model, MemoConfig(**settings))


def kept(model, ids=IDS, /, *, settings: dict, **inputs) -> dict[str, torch.Tensor]:
    """The gradients of the same chunks with all of their activations kept on the device."""
    memo_hf.enable(model, MemoConfig(**{**settings, "unswapped_layers": 99}))
    found = gradients(model, ids, **inputs)
    memo_hf.disable(model)
    return found


def assert_same_bits(ours: dict, theirs: dict) -> None:
    """Gradients by name are equal to the bit."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(theirs)} gradients differ: {different[:4]}"


def assert_nothing_left(session) -> None:
    """No activation of `session` is on the host, once what nobody holds is collected."""
    gc.collect()
    if session._engine is not None:
        settle(session._engine)
    assert session.stats.host_bytes == 0
