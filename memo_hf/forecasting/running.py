"""A model that is training, described as the forecast describes it. Called by `planning`; imports no torch itself.

So the run is planned and reported with the same bytes that `memo-hf plan` prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError
from memo_hf.forecasting.activations import Training
from memo_hf.forecasting.baselines import CHECKPOINTING, baseline
from memo_hf.forecasting.forecast import layer_costs
from memo_hf.forecasting.hardware import find_device, this_cpu
from memo_hf.forecasting.memory import static_parts
from memo_hf.forecasting.moments import layer_moments
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
class Run:
    """One shape of a running model."""

    setup: Setup

    def figures(self, qkv: str, num_kept: int, held: Held) -> tuple[float, float, str]:
        """Bytes that a forward pass swaps, the device's peak, and when that is, at the setup's fraction.

        Args:
            held: whatever the shape.
        """
        setup = self.setup.replace(num_kept=num_kept, qkv=qkv)
        fraction = setup.set_fraction or 0.0
        host = sum(
            costs.num_movable * (costs.whole_bytes(qkv) + fraction * costs.fraction_bytes(qkv))
            for costs in layer_costs(setup)
        )
        peaks = [peak for peak in _peaks(setup, held) if peak.treatment == qkv]
        highest = max(peaks, key=lambda peak: peak.bytes_at(fraction))
        return host, highest.bytes_at(fraction), highest.when


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
    moments = (moment for kind in setup.kinds for moment in layer_moments(setup, kind))
    peaks = (
        DevicePeak(
            when=moment.when,
            treatment=moment.treatment,
            fixed_bytes=held.static_bytes
            + (held.gradient_bytes if moment.has_gradients else 0.0)
            + sum(moment.parts.values()),
            bytes_per_fraction=sum(moment.per_fraction.values()),
        )
        for moment in moments
    )
    return tuple(dict.fromkeys(peaks))
