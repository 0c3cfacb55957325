"""A model that is training, described as the forecast describes it. Called by `planning`; imports no torch itself.

So the run is planned and reported with the same bytes that `memo-hf plan` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError
from memo_hf.forecasting.activations import Training
from memo_hf.forecasting.baselines import CHECKPOINTING, PLAIN, Strategy, baseline
from memo_hf.forecasting.forecast import layer_costs
from memo_hf.forecasting.hardware import find_device, this_cpu
from memo_hf.forecasting.memory import static_parts
from memo_hf.forecasting.moments import Moment, layer_moments
from memo_hf.forecasting.setup import Setup
from memo_hf.forecasting.shapes import ModelShape
from memo_hf.planner.layer_costs import DevicePeak
from memo_hf.planner.plan import Shape


@dataclass(frozen=True)
class Held:
    """Bytes that the device holds whatever the shape, as measured: before forward, and gradients that backward adds."""

    static_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class RunForecast:
    """What a step of one shape will take.

    Attributes:
        host_parts: bytes that a forward pass swaps, by what they are.
        device_parts: bytes that the device holds at its peak, by what they are.
        moment: of the step, at which that is.
        step_seconds: of the step, or None where nothing was measured to tell it from.
        device_bytes_without: bytes at the device's peak by what would run instead, with whole logits, as transformers'
            own loss makes them, and with a chunked loss.
    """

    host_parts: dict[str, float]
    device_parts: dict[str, float]
    moment: str
    step_seconds: float | None = None
    device_bytes_without: dict[str, float] = field(default_factory=dict)

    @property
    def host_bytes(self) -> float:
        return sum(self.host_parts.values())

    @property
    def device_bytes(self) -> float:
        return sum(self.device_parts.values())


@dataclass(frozen=True)
class Run:
    """One shape of a running model."""

    setup: Setup

    def forecast(self, qkv: str, num_kept: int, held: Held) -> RunForecast:
        """Bytes that a forward pass swaps, and the device's peak, at the setup's fraction.

        Args:
            held: whatever the shape.
        """
        setup = self.setup.replace(num_kept=num_kept, qkv=qkv)
        fraction = setup.set_fraction or 0.0
        host = dict.fromkeys(("h", "o", "q, k, v", "others"), 0.0)
        for costs in layer_costs(setup):
            host["h"] += costs.num_movable * costs.input_bytes
            host["o"] += costs.num_movable * costs.output_bytes
            host["q, k, v"] += costs.num_movable * costs.qkv_bytes * (1.0 if qkv == "swap" else fraction)
            host["others"] += costs.num_movable * costs.others_bytes * fraction
        moments = [moment for moment in _moments(setup) if moment.treatment == qkv]
        parts = [_parts(moment, held, fraction) for moment in moments]
        highest = max(range(len(parts)), key=lambda index: sum(parts[index].values()))
        without = {
            f"{strategy.name} with {loss}": _peak_without(setup.replace(chunked_loss=is_chunked), strategy, held)
            for strategy in (PLAIN, CHECKPOINTING)
            for loss, is_chunked in (("whole logits", False), ("a chunked loss", True))
        }
        return RunForecast(host, parts[highest], moments[highest].when, device_bytes_without=without)


def describe_run(
    model, config: MemoConfig, shape: Shape, swap_fraction: float | None = None, sequence_parallel: int = 1
) -> Run | None:
    """`model` at `shape`, or None where it is not among what the forecast describes.

    Args:
        model: a transformers model, or a peft model around one.
        shape: of the batch of one rank.
        sequence_parallel: how many ranks share a sequence.
    """
    weight = next(iter(model.parameters()))
    on_cpu = weight.device.type == "cpu"
    adapters = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    try:
        values = model.config.to_dict()
        training = Training(
            element_bytes=weight.dtype.itemsize,
            lora_rank=getattr(adapters, "r", 0),
            lora_targets=frozenset(getattr(adapters, "target_modules", None) or ()),
            norm_statistic_bytes=weight.dtype.itemsize if on_cpu else 4,
        )
        setup = Setup(
            model=ModelShape.from_config(type(model).__name__, values),
            device=this_cpu(1.0) if on_cpu else find_device("h100"),  # its rates are not asked for
            seq_len=shape.seq_len * sequence_parallel,
            gpus=sequence_parallel,
            sequence_parallel=sequence_parallel,
            batch=shape.batch,
            training=training,
            chunk_tokens=config.chunk_size,
            num_kept=config.unswapped_layers,
            chunked_loss=config.chunked_loss,
            swap_fraction=swap_fraction,
        )
    except ConfigError:
        return None
    return Run(setup)


def _peak_without(setup: Setup, strategy: Strategy, held: Held) -> float:
    """Bytes at the device's peak under `strategy`."""
    parts = baseline(setup, strategy).device_peak_by_part
    described = static_parts(setup)
    activations = sum(size for name, size in parts.items() if name not in described)
    return held.static_bytes + (held.gradient_bytes if parts["gradients"] else 0.0) + activations


def run_peaks(run: Run, held: Held) -> tuple[tuple[DevicePeak, ...], float]:
    """What the device holds at worst, by moment, and at the peak of activation checkpointing.

    Args:
        held: whatever the shape.
    """
    stock = baseline(run.setup, CHECKPOINTING).device_peak_by_part
    described = static_parts(run.setup)
    activations = sum(size for name, size in stock.items() if name not in described)
    return _peaks(run.setup, held), held.static_bytes + held.gradient_bytes + activations


def _peaks(setup: Setup, held: Held) -> tuple[DevicePeak, ...]:
    peaks = (
        DevicePeak(
            when=moment.when,
            treatment=moment.treatment,
            fixed_bytes=sum(_parts(moment, held, 0.0).values()),
            bytes_per_fraction=sum(moment.per_fraction.values()),
        )
        for moment in _moments(setup)
    )
    return tuple(dict.fromkeys(peaks))


def _moments(setup: Setup) -> list[Moment]:
    return [moment for kind in setup.kinds for moment in layer_moments(setup, kind)]


def _parts(moment: Moment, held: Held, fraction: float) -> dict[str, float]:
    gradients = max(0.0, held.gradient_bytes - moment.late_gradients) if moment.has_gradients else 0.0
    return {"weights and states": held.static_bytes, "gradients": gradients, **moment.at(fraction)}
