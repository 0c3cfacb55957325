"""Plans that outlive a step: kept per shape, made for new lengths from one measurement, saved as JSON and reused.

Called by the session. A saved book carries a fingerprint of the model, the settings, the versions and the hardware;
where one field differs it is refused by name, never adapted. Knows no torch: the session fills in the fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from memo_hf.errors import PlanError
from memo_hf.planner.layer_costs import DevicePeak, KindPlan, LayerCosts
from memo_hf.planner.swap_fraction import SwapPlan

_FORMAT = 1
# Lengths within one part in eight share a plan: within it the fraction moves less than what a step's noise hides.
_PARTS = 8
_SMALLEST = 256


@dataclass(frozen=True, order=True)
class Shape:
    """What a batch looks like to the planner: sequences, and tokens of each."""

    batch: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq_len

    def bucket(self) -> Shape:
        """The shape whose plan this one uses: `seq_len` rounded up, so that no memory falls short."""
        step = max(_SMALLEST, 2 ** (max(1, self.seq_len - 1).bit_length() - 1) // _PARTS)
        return Shape(self.batch, math.ceil(self.seq_len / step) * step)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the profiled step found: the costs of each kind of layer at a shape, and bytes that do not grow with it.

    Attributes:
        windows: attention window of each kind, or None.
        static_bytes: of the device, held whatever the shape (weights, gradients, optimizer).
        rest_seconds: of the step outside the decoder layers.
        indices: of the layers of each kind, where they can be told apart.
        to_host_bytes_per_second, to_device_bytes_per_second: of copies beside computation.
    """

    shape: Shape
    layers: tuple[LayerCosts, ...]
    windows: tuple[int | None, ...]
    static_bytes: float
    rest_seconds: float
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    indices: tuple[tuple[int, ...], ...] = ()

    def layers_at(self, shape: Shape) -> tuple[LayerCosts, ...]:
        """The costs at another shape: token-wise parts and bytes grow with tokens, attention with its window too."""
        tokens = shape.batch * shape.seq_len / (self.shape.batch * self.shape.seq_len)
        return tuple(
            _scaled(costs, tokens, tokens * _reach(shape, window) / _reach(self.shape, window), self.static_bytes)
            for costs, window in zip(self.layers, self.windows, strict=True)
        )

    def rest_seconds_at(self, shape: Shape) -> float:
        """`rest_seconds` at another shape, all of it taken to grow with tokens."""
        return self.rest_seconds * shape.num_tokens / self.shape.num_tokens


def joint_measurement(found: list[Measurement]) -> Measurement:
    """What holds for all of several ranks that train one model: the slowest parts, the largest sizes, the least
    bandwidth, at the largest of their shapes.

    Where layers ran in other ways on some ranks, one having been short of host memory, only the profiles of those with
    the fewest layers in token mode count: the others could not do what a plan from theirs would ask for.
    """

    def ways(measured: Measurement) -> tuple:
        return tuple((c.num_layers, c.num_kept, c.token_wise) for c in measured.layers), measured.indices

    def num_token_wise(measured: Measurement) -> int:
        return sum(c.num_layers for c in measured.layers if c.token_wise)

    cautious = min(found, key=num_token_wise)
    found = [measured for measured in found if ways(measured) == ways(cautious)]
    largest = max((measured.shape for measured in found), key=lambda shape: (shape.batch * shape.seq_len, shape))
    alike = zip(*(measured.layers_at(largest) for measured in found), strict=True)
    return dataclasses.replace(
        cautious,
        shape=largest,
        layers=tuple(_slowest(costs) for costs in alike),
        static_bytes=max(measured.static_bytes for measured in found),
        rest_seconds=max(measured.rest_seconds_at(largest) for measured in found),
        to_host_bytes_per_second=min(measured.to_host_bytes_per_second for measured in found),
        to_device_bytes_per_second=min(measured.to_device_bytes_per_second for measured in found),
    )


def _slowest(costs: tuple[LayerCosts, ...]) -> LayerCosts:
    grown = [name for name in vars(costs[0]) if name.endswith(("_bytes", "_seconds"))]
    return dataclasses.replace(costs[0], **{name: max(getattr(c, name) for c in costs) for name in grown})


def _reach(shape: Shape, window: int | None) -> float:
    """Mean number of tokens that a token attends to, causally."""
    reach = min(window or shape.seq_len, shape.seq_len)
    return reach * (1 - reach / (2 * shape.seq_len))


def _scaled(costs: LayerCosts, tokens: float, attention: float, static_bytes: float) -> LayerCosts:
    scaled = {name: getattr(costs, name) * tokens for name in vars(costs) if name.endswith("_bytes")}
    for name in vars(costs):
        if name.endswith("_seconds"):
            scaled[name] = getattr(costs, name) * (attention if name.startswith("attend") else tokens)
    peaks = tuple(
        dataclasses.replace(
            peak,
            fixed_bytes=static_bytes + (peak.fixed_bytes - static_bytes) * tokens,
            bytes_per_fraction=peak.bytes_per_fraction * tokens,
        )
        for peak in costs.device_peaks
    )
    return dataclasses.replace(costs, **scaled, device_peaks=peaks)


class PlanBook:
    """The plans of one model on one machine, by shape bucket.

    Args:
        fingerprint: names and plain values; what a plan depends on.
        measurement: of the profiled step, or None before it.
    """

    def __init__(self, fingerprint: dict, measurement: Measurement | None = None):
        self.fingerprint = dict(fingerprint)
        self.measurement = measurement
        self._plans: dict[Shape, SwapPlan] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, shape: Shape) -> SwapPlan | None:
        """The plan for `shape`, or None where none is made yet."""
        return self._plans.get(shape.bucket())

    def put(self, shape: Shape, plan: SwapPlan) -> None:
        self._plans[shape.bucket()] = plan

    def save(self, path: str | Path) -> None:
        """Write the book as JSON; a reader sees the old file or the new one, never a part."""
        content = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "measurement": None if self.measurement is None else dataclasses.asdict(self.measurement),
            "plans": [
                {"batch": shape.batch, "seq_len": shape.seq_len, "plan": dataclasses.asdict(plan)}
                for shape, plan in sorted(self._plans.items(), key=lambda item: item[0])
            ],
        }
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | Path, fingerprint: dict) -> PlanBook:
        """Read a saved book for use under `fingerprint`.

        Raises:
            PlanError: unreadable, of another format, or made for something else; the message names the field.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise PlanError(
                    f"plan {path}: its format is {content['format']} and this version reads {_FORMAT}; delete it"
                )
            _refuse_stale(path, content["fingerprint"], fingerprint)
            book = cls(fingerprint, _measurement(content["measurement"]))
            for entry in content["plans"]:
                kinds = tuple(KindPlan(**kind) for kind in entry["plan"].pop("kinds"))
                book._plans[Shape(entry["batch"], entry["seq_len"])] = SwapPlan(kinds=kinds, **entry["plan"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"plan {path}: cannot be read ({type(error).__name__}: {error}); delete it") from None
        return book


def _refuse_stale(path: Path, saved: dict, now: dict) -> None:
    now = json.loads(json.dumps(now))  # as a saved one comes back: tuples are lists
    for name in sorted(set(saved) | set(now)):
        if saved.get(name) != now.get(name):
            raise PlanError(
                f"plan {path} is refused: {name} was {saved.get(name)!r} when it was made and is {now.get(name)!r} now;"
                " plan again, or put that back"
            )


def _measurement(content: dict | None) -> Measurement | None:
    if content is None:
        return None
    layers = tuple(
        LayerCosts(**{**costs, "device_peaks": tuple(DevicePeak(**peak) for peak in costs["device_peaks"])})
        for costs in content["layers"]
    )
    return Measurement(
        shape=Shape(**content["shape"]),
        layers=layers,
        windows=tuple(content["windows"]),
        static_bytes=content["static_bytes"],
        rest_seconds=content["rest_seconds"],
        to_host_bytes_per_second=content["to_host_bytes_per_second"],
        to_device_bytes_per_second=content["to_device_bytes_per_second"],
        indices=tuple(tuple(indices) for indices in content["indices"]),
    )
