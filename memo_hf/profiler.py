"""Measures one training step at fraction 0: seconds of each part of a layer, bytes, and the bandwidth of copies.

Made by `planning` for one forward pass; told by the layers as their `Observer`. Whoever holds the graph of that pass
holds the profile, so one whose graph is gone before backward ended, as after an exception, ends with it and is never
used. Knows no model and no plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memo_hf.planner.layer_costs import LayerCosts
from memo_hf.swap import SwapEngine

# Parts of a layer, each from one moment to the next.
_FORWARD = {
    "project_forward": ("forward project", "forward attend"),
    "attend_forward": ("forward attend", "forward finish"),
    "finish_forward": ("forward finish", "forward end"),
}
_BACKWARD = {
    "finish_backward": ("backward finish", "backward attend"),
    "attend_backward": ("backward attend", "backward attended"),
    "project_backward": ("backward project", "backward end"),
}


@dataclass
class _Kind:
    """Layers that are alike, and what the first of them to swap has told."""

    indices: list[int] = field(default_factory=list)
    input_bytes: int = 0
    qkv_bytes: int = 0
    output_bytes: int = 0
    swapped_bytes: int | None = None
    counted: set[str] = field(default_factory=set)
    saved: dict[str, float] = field(default_factory=dict)  # bytes per token by part


class Profile:
    """One step, measured. An `Observer` of the layers.

    Args:
        engine: whose copies are timed.
        num_tokens: of the batch.
        rebuilds_qkv: queries, keys and values are computed again, within the backward of attend.
        on_end: called with this when backward has passed every layer.
    """

    def __init__(self, engine: SwapEngine, num_tokens: int, *, rebuilds_qkv: bool, on_end: Callable[[Profile], None]):
        self._engine, self._num_tokens = engine, num_tokens
        self._rebuilds_qkv, self._on_end = rebuilds_qkv, on_end
        self._on_cuda = engine.device.type == "cuda"
        self._marks: dict[tuple[int, str], object] = {}
        self._kinds: dict[tuple, _Kind] = {}
        self._open: set[int] = set()
        self._copies: list[tuple] = []
        self.is_complete = False
        engine.time_copies(self._copies)

    def mark(self, index: int, moment: str) -> None:
        """Layer `index` has come to `moment`: see `Step.watchers`."""
        if self.is_complete:
            return
        self._marks.setdefault((index, moment), self._now())
        if moment == "backward end":
            self._open.discard(index)
            if not self._open:
                self.is_complete = True
                self._engine.time_copies(None)
                self._on_end(self)

    def count(self, record, part: str) -> Callable[[int, int], None] | None:
        """See `Observer`. Asked of the first layer of each kind alone."""
        kind = self._kinds.setdefault(record.alike[1:], _Kind())
        if part in kind.counted:
            return None
        kind.counted.add(part)

        def counted(num_tokens: int, num_bytes: int):
            kind.saved[part] = num_bytes / num_tokens

        return counted

    def sizes(self, record, input_bytes: int, swapped_bytes: int | None) -> None:
        """See `Observer`. Layers that run in layer mode by plan are of the kind of those that do not."""
        kind = self._kinds.setdefault(record.alike[1:], _Kind())
        kind.indices.append(record.index)
        kind.input_bytes = input_bytes
        if record.qkv_bytes:
            kind.qkv_bytes, kind.output_bytes = record.qkv_bytes, record.output_bytes
            if kind.swapped_bytes is None:
                kind.swapped_bytes = swapped_bytes
        self._open.add(record.index)

    @property
    def kinds(self) -> list[list[int]]:
        """The indices of the layers of each kind, in the order of `costs`."""
        return [kind.indices for kind in self._kinds.values() if kind.indices]

    def costs(self, first_kept: int) -> tuple[LayerCosts, ...]:
        """What a layer of each kind costs, without what the device holds. Waits for a GPU to come to the step's end.

        Args:
            first_kept: layers from this index on keep their activations on the device.
        """
        return tuple(
            self._costs(f"layers {_ranges(k.indices)}", k, first_kept) for k in self._kinds.values() if k.indices
        )

    def rates(self) -> tuple[float, float]:
        """Bytes per second to the host and to the device; one that was not seen is taken to be the other's."""
        rates: dict[bool, float] = {}
        for to_host in (True, False):
            copies = [copy for copy in self._copies if copy[0] is to_host]
            seconds = sum(self._seconds(start, end) for _, _, start, end in copies)
            if seconds > 0:
                rates[to_host] = sum(num_bytes for _, num_bytes, _, _ in copies) / seconds
        if not rates:
            return 1e9, 1e9
        return rates.get(True, rates.get(False)), rates.get(False, rates.get(True))

    def layers_seconds(self) -> float:
        """Seconds that all layers took in this step, as it ran."""
        # Layer mode does not tell when its backward ends: it is the forward once more, and a backward of twice that.
        parts = (("forward project", 1), ("backward finish", 1), ("forward whole", 4))
        return sum(
            times * (self._lasted(index, start, f"{start.split()[0]} end") or 0.0)
            for kind in self._kinds.values()
            for index in kind.indices
            for start, times in parts
        )

    def _costs(self, name: str, kind: _Kind, first_kept: int) -> LayerCosts:
        shared = dict(
            name=name,
            num_layers=len(kind.indices),
            num_kept=sum(index >= first_kept for index in kind.indices),
            input_bytes=float(kind.input_bytes),
        )
        whole = self._usual(kind, "forward whole", "forward end")
        if whole is not None and not kind.qkv_bytes:
            # Layer mode does not tell when its backward ends; taken to be twice its forward, as of matrix products.
            parts = {f"{part}_seconds": 0.0 for part in (*_FORWARD, *_BACKWARD)}
            parts |= {"finish_forward_seconds": whole, "finish_backward_seconds": 2 * whole}
            return LayerCosts(token_wise=False, output_bytes=0.0, qkv_bytes=0.0, others_bytes=0.0, **shared, **parts)
        parts = {part: self._usual(kind, *moments) or 0.0 for part, moments in (_FORWARD | _BACKWARD).items()}
        # At fraction 0 backward runs each forward again (finish without its last product, which is taken for a part).
        again = {
            "finish_backward": parts["finish_forward"],
            "project_backward": parts["project_forward"],
            "attend_backward": parts["project_forward"] if self._rebuilds_qkv else 0.0,
        }
        parts = {f"{part}_seconds": max(seconds - again.get(part, 0.0), 0.0) for part, seconds in parts.items()}
        waiting = kind.input_bytes + (0 if self._rebuilds_qkv else kind.qkv_bytes)
        # With the logsumexp, where a layer of this kind has swapped it.
        output = kind.output_bytes if kind.swapped_bytes is None else kind.swapped_bytes - waiting
        return LayerCosts(
            output_bytes=float(max(0, output)),
            qkv_bytes=float(kind.qkv_bytes),
            others_bytes=sum(kind.saved.values()) * self._num_tokens,
            **shared,
            **parts,
        )

    def _usual(self, kind: _Kind, start: str, end: str) -> float | None:
        """The lower quartile over layers: the first step also loads kernels and maps host memory, in some of them."""
        found = sorted(s for index in kind.indices if (s := self._lasted(index, start, end)) is not None)
        return found[len(found) // 4] if found else None

    def _lasted(self, index: int, start: str, end: str) -> float | None:
        marks = self._marks.get((index, start)), self._marks.get((index, end))
        return None if None in marks else self._seconds(*marks)

    def _now(self):
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start, end) -> float:
        if not self._on_cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _ranges(indices: list[int]) -> str:
    """`0, 2 to 5` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
