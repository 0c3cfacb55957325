"""The forecast beside runs on this CPU, in bytes and seconds: `python benchmarks/bench_forecast_cpu.py`.

Twelve runs of small models, full and LoRA, at several lengths, fractions and chunks. Every byte is metered, weights and
gradients among them. Step times are forecast from one step of the same run that was measured at half of its length.
Prints a table. Exits with 1 where a peak is off by more than 5 %, a host byte is missed, or a time by more than 25 %.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import memo_hf
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.forecasting.running import Held, describe_run
from memo_hf.planner.layer_costs import Budgets, KindPlan, predict
from memo_hf.planner.plan import Shape

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = dict(
    hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=5,
    vocab_size=1024, head_dim=32, max_position_embeddings=16384, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run."""

    family: str
    tokens: int
    fraction: float
    chunk: int | None = None
    qkv: str = "swap"
    lora: tuple[str, ...] = ()
    batch: int = 1


CASES = [
    Case("llama", 2048, 0.0),
    Case("llama", 3072, 0.5),
    Case("llama", 2048, 1.0, chunk=256),
    Case("llama", 3072, 0.25, chunk=1024, qkv="rebuild"),
    Case("llama", 2048, 0.75, lora=("q_proj", "v_proj")),
    Case("llama", 2048, 0.0, lora=tuple(ALL_LINEAR)),
    Case("qwen3", 2048, 0.0, chunk=512),
    Case("qwen3", 3072, 1.0),
    Case("qwen3", 2048, 0.5, qkv="rebuild", lora=tuple(ALL_LINEAR)),
    Case("mistral", 1024, 0.5, batch=2),
    Case("qwen2", 2048, 0.0, qkv="rebuild"),
    Case("qwen2", 2048, 1.0, lora=tuple(ALL_LINEAR)),
]


@dataclass(frozen=True)
class Outcome:
    """Forecast and measured; bytes, and seconds (NaN where they were not asked for)."""

    forecast_peak: float
    measured_peak: int
    forecast_host: float
    measured_host: int
    forecast_seconds: float
    measured_seconds: float
    moment: str

    @property
    def peak_error(self) -> float:
        return self.forecast_peak / self.measured_peak - 1

    @property
    def seconds_error(self) -> float:
        return self.forecast_seconds / self.measured_seconds - 1


def make_model(case: Case):
    """A random model of the case in training mode, in fp32."""
    torch.manual_seed(0)
    sizes = {**SIZES, "sliding_window": None} if case.family == "mistral" else SIZES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **sizes))
    if case.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=list(case.lora), lora_dropout=0.0))
    return model.train()


def run(case: Case, *, timed: bool = True) -> Outcome:
    """Train a few steps and compare.

    Args:
        timed: also measure a step at half of the length and forecast the step's time from it.
    """
    gc.collect()
    with AllocatorMeter() as meter:
        model = make_model(case)
        ids = torch.randint(3, SIZES["vocab_size"], (case.batch, case.tokens))
        config = memo_hf.MemoConfig(swap_fraction=case.fraction, chunk_size=case.chunk, qkv=case.qkv)
        session = memo_hf.enable(model, config)
        seconds = []
        for number in range(4 if timed else 2):
            model.zero_grad(set_to_none=True)
            meter.reset_peak()
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            seconds += [time.perf_counter() - began] if number else []
        peak, host = meter.peak_bytes - meter.start_bytes, session.stats.swapped_bytes
        session.close()
    shape = Shape(case.batch, case.tokens)
    described = describe_run(model, config, shape, case.fraction)
    held = Held(sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.parameters() if p.requires_grad))
    model.zero_grad(set_to_none=True)
    forecast = described.forecast(case.qkv, config.unswapped_layers, held)
    # Medians: one step is as noisy as what it is held against.
    forecast_seconds = statistics.median(_from_half(case, model, ids) for _ in range(3)) if timed else float("nan")
    figures = (forecast.device_bytes, peak, forecast.host_bytes, host, forecast_seconds, statistics.median(seconds))
    return Outcome(*figures, forecast.moment)


def _from_half(case: Case, model, ids) -> float:
    """Seconds of a step, forecast from a profiled step of half the length."""
    # Only where the device is a limit is a step measured on a CPU.
    config = memo_hf.MemoConfig(chunk_size=case.chunk, qkv=case.qkv, min_tokens=0, device_memory="1TiB")
    session = memo_hf.enable(model, config)
    half = ids[:, : case.tokens // 2]
    for _ in range(2):
        model(input_ids=half, labels=half).loss.backward()
    measured = session.planners[0].measurement
    session.close()
    model.zero_grad(set_to_none=True)
    shape = Shape(case.batch, case.tokens)
    layers = measured.layers_at(shape)
    kinds = [
        KindPlan(
            name=costs.name,
            num_swapped=costs.num_movable,
            num_input_only=0,
            num_kept=costs.num_kept,
            swap_fraction=case.fraction,
        )
        for costs in layers
    ]
    rates = Budgets(
        host_bytes=float("inf"),
        to_host_bytes_per_second=measured.to_host_bytes_per_second,
        to_device_bytes_per_second=measured.to_device_bytes_per_second,
    )
    return predict(layers, rates, case.qkv, kinds, measured.rest_seconds_at(shape)).step_seconds


def main() -> int:
    """Print the table. Returns how many rows miss a bar, at most 1."""
    torch.set_num_threads(1)
    print("| run | device peak, MiB | error | moment | host, MiB | missed bytes | step, s | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    misses = 0
    for case in CASES:
        found = run(case)
        missed = round(found.forecast_host - found.measured_host)
        misses += abs(found.peak_error) > 0.05 or missed != 0 or abs(found.seconds_error) > 0.25
        kind = f"LoRA on {len(case.lora)}" if case.lora else "full"
        chunk = case.chunk or "default"
        what = f"{case.batch} x {case.tokens}, fraction {case.fraction}, chunk {chunk}, {case.qkv}, {kind}"
        print(
            f"| {case.family}, {what} "
            f"| {found.measured_peak / 2**20:.1f} | {found.peak_error:+.1%} | {found.moment} "
            f"| {found.measured_host / 2**20:.1f} | {missed} | {found.measured_seconds:.2f} "
            f"| {found.seconds_error:+.0%} |",
            flush=True,
        )
    return int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
