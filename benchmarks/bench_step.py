"""Peak device bytes and step time of memo_hf beside what transformers and TRL offer, interleaved in one process.

    python benchmarks/bench_step.py --tokens 16384 --repeats 3            loss included
    python benchmarks/bench_step.py --tokens 32768 --decoder --repeats 3  decoder alone
    python benchmarks/bench_step.py --tokens 512 --only plain,memo_hf     where plain is best

The model is a Llama of random weights: hidden 512, 8 heads, 2 key/value heads, intermediate 1,408, vocabulary 32,000,
fp32, batch 1. Device bytes come from an allocator meter (on a CPU a c10 allocator that counts every tensor, on CUDA
torch's own statistics) and are the peak of one step above what is there before it, so gradients count and weights do
not. Times are medians; ratios are medians of the ratios within a round, each round running every alternative once.
memo_hf runs at swap fraction 0, which takes the least memory.
Appends a row per alternative to a CSV file and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

import accelerate
import numpy
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from trl.models import enable_selective_activation_checkpointing

import memo_hf
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.units import parse_count


def make_model(num_layers: int, num_tokens: int, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32_000,
        max_position_embeddings=num_tokens,
    )
    return LlamaForCausalLM(config).to(device).train()


@contextlib.contextmanager
def plain(model):
    yield contextlib.nullcontext()


def switch_checkpointing(model, on: bool) -> None:
    """By the older name of the switch, which TRL wraps too; newer transformers warn of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()


@contextlib.contextmanager
def checkpointing(model):
    switch_checkpointing(model, on=True)
    try:
        yield contextlib.nullcontext()
    finally:
        switch_checkpointing(model, on=False)


@contextlib.contextmanager
def checkpointing_with_offload(model):
    """What checkpointing saves is copied to the host and back, on the compute thread or stream, as save_on_cpu does."""
    with checkpointing(model):
        if next(model.parameters()).is_cuda:
            yield torch.autograd.graph.save_on_cpu(pin_memory=True)
        else:  # save_on_cpu leaves a CPU tensor where it is: copy it to memory that the meter does not count.
            yield torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: numpy.array(tensor.detach().numpy(), copy=True),
                lambda array: torch.from_numpy(array).clone(),
            )


@contextlib.contextmanager
def selective_checkpointing(model):
    """TRL's own: attention outputs are kept on the device and everything else is recomputed."""
    enable_selective_activation_checkpointing(model)  # Wraps the switch, on this model.
    switch_checkpointing(model, on=True)
    try:
        yield contextlib.nullcontext()
    finally:
        switch_checkpointing(model, on=False)
        del model.gradient_checkpointing_enable


@contextlib.contextmanager
def with_memo(model):
    memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=0.0, min_tokens=2048))
    try:
        yield contextlib.nullcontext()
    finally:
        memo_hf.disable(model)


ALTERNATIVES = {
    "plain": plain,
    "activation checkpointing": checkpointing,
    "activation checkpointing with offload": checkpointing_with_offload,
    "selective checkpointing": selective_checkpointing,
    "memo_hf": with_memo,
}


def step(model, ids, decoder_only: bool) -> None:
    """One forward and backward pass; gradients are left for the caller to clear."""
    if decoder_only:
        model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    else:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model, ids, decoder_only: bool, name: str, *, memory: bool) -> tuple[int | None, float]:
    """Peak bytes above what was there (None without `memory`), and seconds, of one step of one alternative."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    device = ids.device
    with ALTERNATIVES[name](model) as around, AllocatorMeter(device) if memory else contextlib.nullcontext() as meter:
        before = meter.live_bytes if memory else 0
        synchronize(device)
        start = time.perf_counter()
        with around:
            step(model, ids, decoder_only)
        synchronize(device)
        return meter.peak_bytes - before if memory else None, time.perf_counter() - start


def median_ratio(times: dict[str, list[float]], name: str, other: str) -> float | None:
    if not times.get(name) or not times.get(other):
        return None
    return statistics.median(ours / theirs for ours, theirs in zip(times[name], times[other], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds; 0 times the metered step instead")
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    parser.add_argument("--decoder", action="store_true", help="without the head and the loss")
    parser.add_argument("--only", default=",".join(ALTERNATIVES), help="comma-separated alternatives")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/step.csv"))
    arguments = parser.parse_args()

    names, device = arguments.only.split(","), torch.device(arguments.device)
    model = make_model(arguments.layers, arguments.tokens, device)
    ids = torch.randint(0, 32_000, (1, arguments.tokens), device=device)
    peaks, times = {}, {name: [] for name in names}
    for name in names if not arguments.no_memory else ():
        peaks[name], seconds = measure(model, ids, arguments.decoder, name, memory=True)
        if not arguments.repeats:
            times[name].append(seconds)
        print(f"# {name}: {peaks[name] / 1e6:.1f} MB, {seconds:.2f} s", flush=True)
    for round_index in range(arguments.repeats):
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            times[name].append(measure(model, ids, arguments.decoder, name, memory=False)[1])
            print(f"# round {round_index}, {name}: {times[name][-1]:.2f} s", flush=True)

    base = "activation checkpointing"
    what = "decoder alone" if arguments.decoder else "loss included"
    print(f"\n{arguments.tokens:,} tokens, {arguments.layers} layers, {what}\n")
    print("| | peak MB | / act. ckpt | step s | / act. ckpt | / selective | / plain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for name in names:
        median = statistics.median(times[name]) if times[name] else None
        row = {
            "peak_bytes": peaks.get(name),
            "peak_over_checkpointing": peaks[name] / peaks[base] if name in peaks and base in peaks else None,
            "step_seconds_median": median,
            "time_over_checkpointing": median_ratio(times, name, base),
            "time_over_selective": median_ratio(times, name, "selective checkpointing"),
            "time_over_plain": median_ratio(times, name, "plain"),
        }
        cells = [peaks[name] / 1e6 if name in peaks else None, *list(row.values())[1:]]
        formats = (".1f", ".3f", ".2f", ".3f", ".3f", ".3f")
        print(
            f"| {name} | "
            + " | ".join("" if c is None else f"{c:{f}}" for c, f in zip(cells, formats, strict=True))
            + " |"
        )
        run = dict(tokens=arguments.tokens, layers=arguments.layers, what=what, repeats=arguments.repeats)
        rows.append({**describe(device), **run, "alternative": name, **row})
    write(arguments.output, rows)


def describe(device: torch.device) -> dict:
    """Date, hardware and versions, for every result that is kept."""
    hardware = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    )
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "memo_hf": memo_hf.__version__,
    }


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
