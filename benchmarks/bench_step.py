"""Peak device bytes and step time of memo_hf beside its peers (`alternatives.py`), interleaved in one process.

    python benchmarks/bench_step.py --tokens 16384 --repeats 3            loss included
    python benchmarks/bench_step.py --tokens 32768 --decoder --repeats 3  decoder alone
    python benchmarks/bench_step.py --tokens 512 --only plain,memo_hf     where plain is best

The model is a Llama of random weights: hidden 512, 8 heads, 2 key/value heads, intermediate 1,408, vocabulary 32,000,
fp32, batch 1. Device bytes come from an allocator meter (on a CPU a c10 allocator that counts every tensor, on CUDA
torch's own statistics) and are the peak of one step above what is there before it, so gradients count and weights do
not. Times are medians; ratios are medians of the ratios within a round, each round running every alternative once.
memo_hf runs at swap fraction 0, which takes the least memory.
Appends a row per alternative to a CSV file and prints a Markdown table. `compare_peers.py` runs several such cases.
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
from pathlib import Path

import accelerate
import torch
import transformers
from alternatives import ALTERNATIVES, NotHere
from transformers import LlamaConfig, LlamaForCausalLM

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


def run_case(
    names: list[str],
    *,
    tokens: int,
    layers: int,
    decoder_only: bool,
    repeats: int,
    device: torch.device,
    memory: bool = True,
) -> list[dict]:
    """Measure the alternatives `names` on one model, print a Markdown table, and return a row of figures for each.

    Args:
        tokens, layers: of the sequence and the model.
        decoder_only: without the head and the loss.
        repeats: timed rounds, each of which runs every alternative once; 0 times the metered step instead.
        memory: measure peaks too.
    """
    model = make_model(layers, tokens, device)
    ids = torch.randint(0, 32_000, (1, tokens), device=device)
    peaks, times, not_here = {}, {name: [] for name in names}, {}
    for name in names:
        try:
            peak, seconds = measure(model, ids, decoder_only, name, memory=memory)
        except NotHere as reason:
            not_here[name] = str(reason)
            print(f"# {name}: not run, {reason}", flush=True)
            continue
        if memory:
            peaks[name] = peak
            print(f"# {name}: {peak / 1e6:.1f} MB, {seconds:.2f} s", flush=True)
        if not repeats:
            times[name].append(seconds)
    here = [name for name in names if name not in not_here]
    for index in range(repeats):
        for name in here[index % len(here) :] + here[: index % len(here)]:
            times[name].append(measure(model, ids, decoder_only, name, memory=False)[1])
            print(f"# round {index}, {name}: {times[name][-1]:.2f} s", flush=True)

    what = "decoder alone" if decoder_only else "loss included"
    case = {**describe(device), "tokens": tokens, "layers": layers, "what": what, "repeats": repeats}
    print(f"\n{tokens:,} tokens, {layers} layers, {what}\n")
    rows = [
        {**case, "alternative": name, **figures(name, peaks, times), "not_run": not_here.get(name)} for name in names
    ]
    print_table(rows)
    return rows


def figures(name: str, peaks: dict[str, int], times: dict[str, list[float]]) -> dict:
    """What one alternative took, alone and beside others; None where that was not measured."""
    base = "activation checkpointing"
    return {
        "peak_bytes": peaks.get(name),
        "peak_over_checkpointing": peaks[name] / peaks[base] if name in peaks and base in peaks else None,
        "step_seconds_median": statistics.median(times[name]) if times[name] else None,
        "time_over_checkpointing": median_ratio(times, name, base),
        "time_over_selective": median_ratio(times, name, "selective checkpointing"),
        "time_over_plain": median_ratio(times, name, "plain"),
    }


def print_table(rows: list[dict]) -> None:
    """The rows of one case as Markdown."""
    print("| | peak MB | / act. ckpt | step s | / act. ckpt | / selective | / plain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        peak, *others = list(row.values())[-7:-1]
        cells = [None if peak is None else peak / 1e6, *others]
        formats = (".1f", ".3f", ".2f", ".3f", ".3f", ".3f")
        shown = ["" if cell is None else f"{cell:{form}}" for cell, form in zip(cells, formats, strict=True)]
        if row["not_run"]:
            shown[0] = f"not run: {row['not_run']}"
        print(f"| {row['alternative']} | {' | '.join(shown)} |")


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
    rows = run_case(
        arguments.only.split(","),
        tokens=arguments.tokens,
        layers=arguments.layers,
        decoder_only=arguments.decoder,
        repeats=arguments.repeats,
        device=torch.device(arguments.device),
        memory=not arguments.no_memory,
    )
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
