"""How the tests of gradients compare memo_hf with a plain run, and with itself when it swaps and recomputes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

import memo_hf
from memo_hf import MemoConfig
from memo_hf.layers import token_mode, tokenwise
from memo_hf.session import Session

KEEP_ALL = 10**6  # more layers than any model has
# Worst relative error of any parameter's gradient in fp32; on a GPU sums over tokens are of other blocks.
TOLERANCE = 1e-5 if torch.get_default_device().type == "cpu" else 1e-4
# What is mathematically zero, such as the gradient of a key bias, is rounding noise in both runs.
_NOISE = 1e-7


@contextlib.contextmanager
def enabled(model: nn.Module, **settings) -> Iterator[Session]:
    """A session on `model` for the body. Two chunks of 16 tokens and a rest, and one unswapped layer, unless set."""
    session = memo_hf.enable(model, MemoConfig(**{"chunk_size": 32, "unswapped_layers": 1, **settings}))
    try:
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def nothing_swapped_or_recomputed(model: nn.Module, **settings) -> Iterator[Session]:
    """The same chunks as with these settings, but every graph is built once, in forward, and stays on the device."""

    def cut(*args):
        return [dataclasses.replace(chunk, swapped=True) for chunk in tokenwise.cut_into_chunks(*args)]

    kept = {**settings, "unswapped_layers": KEEP_ALL, "qkv": "swap"}
    with mock.patch.object(token_mode, "cut_into_chunks", cut), enabled(model, **kept) as session:
        yield session


def assert_nothing_on_host(session: Session) -> None:
    """All host memory is free, once the copies that still run are over."""
    deadline = time.monotonic() + 10
    while session.stats.host_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert session.stats.host_bytes == 0


def gradients_of(model: nn.Module, loss: Callable[[], Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Gradients by parameter name of `loss().backward()`, drawn with `seed`; and the random state after it."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert found, "nothing has a gradient"
    return {**found, "random state": torch.get_rng_state().double()}


def language_loss(model: nn.Module, ids: Tensor, **inputs) -> Callable[[], Tensor]:
    """The model's own loss on `ids`."""
    return lambda: model(input_ids=ids, labels=ids, **inputs).loss


def relative_errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """By name, the largest error relative to the largest entry of that gradient."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    names = [name for name in theirs if name != "random state"]
    noise = _NOISE * max(theirs[name].abs().max().item() for name in names)
    return {
        name: (ours[name].double() - theirs[name].double()).abs().max().item()
        / max(theirs[name].abs().max().item(), noise, 1e-30)
        for name in names
    }  # fmt: skip


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Every gradient is right to `tolerance`; the message names the worst."""
    errors = relative_errors(ours, theirs)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.2e}, allowed is {tolerance:.0e}"


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Every gradient, and the random state after the step, is equal to the bit."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"not equal to the bit: {different}"


def check_exact(
    model: nn.Module, loss: Callable[[], Tensor], settings: list[dict], tolerance: float | None = TOLERANCE
) -> None:
    """For each of `settings`: equal to the bit to the run that swaps and recomputes nothing, and close to a plain run.

    Afterwards nothing is on the host, and what was planned was swapped. No plain run where `tolerance` is None: chunks
    draw random numbers in another order.
    """
    stock = None if tolerance is None else gradients_of(model, loss)
    kept_by_chunks = {}
    for some in settings:
        fraction = some.get("swap_fraction", 0.0)
        chunks = (some.get("chunk_size"), some.get("mode"), fraction if 0 < fraction < 1 else "the same")
        if chunks not in kept_by_chunks:
            with nothing_swapped_or_recomputed(model, **some):
                kept_by_chunks[chunks] = gradients_of(model, loss)
        with enabled(model, **some) as session:
            ours = gradients_of(model, loss)
            assert_nothing_on_host(session)
            assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
        assert_equal(ours, kept_by_chunks[chunks])
        if stock is not None:
            assert_close(ours, stock, tolerance)
