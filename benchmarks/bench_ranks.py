"""FSDP2 on several ranks: step time of memo_hf beside that of FSDP2 with its own activation checkpointing, interleaved.

    python benchmarks/bench_ranks.py --tokens 16384 --repeats 3              loss included
    python benchmarks/bench_ranks.py --tokens 16384 --repeats 3 --decoder    decoder alone

The model is that of `bench_step.py`, with 2 layers, each rank with `--tokens` tokens of its own and one thread. Every
layer is a unit of FSDP2, sharded again after forward; checkpointing is torch's wrapper around the layers, inside of
FSDP2, as accelerate applies it. memo_hf runs at swap fraction 0 and keeps one layer on the device, so that the other is
swapped. A step is a forward and a backward pass; its time is that of the slowest rank. A round runs both alternatives
once; ratios are medians over rounds. Prints a Markdown table and appends a row per alternative to a CSV file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_step import describe, make_model, step, write
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import memo_hf
from memo_hf.units import parse_count

ALTERNATIVES = ("FSDP2 with its activation checkpointing", "FSDP2 with memo_hf")


def make_sharded(name: str, arguments: argparse.Namespace):
    """One alternative's model on this rank."""
    model = make_model(arguments.layers, arguments.tokens, torch.device("cpu"))
    layers = model.model.layers
    if name == "FSDP2 with memo_hf":
        memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=0.0, unswapped_layers=1))
    else:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model.model if arguments.decoder else model)
    return model


def measure(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """What one rank does: every round, each alternative once. Rank 0 leaves the seconds of the slowest in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=arguments.ranks)
    models = {name: make_sharded(name, arguments) for name in ALTERNATIVES}
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 32_000, (1, arguments.tokens), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in ALTERNATIVES}
    for round_index in range(arguments.warmup + arguments.repeats):
        for name in ALTERNATIVES if round_index % 2 else reversed(ALTERNATIVES):
            models[name].zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            step(models[name], ids, arguments.decoder)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if round_index >= arguments.warmup:
                times[name].append(seconds.item())
            if rank == 0:
                print(f"# round {round_index}, {name}: {seconds.item():.2f} s", flush=True)
            models[name].zero_grad(set_to_none=True)
    memo_hf.disable(models["FSDP2 with memo_hf"])
    if rank == 0:
        torch.save(times, f"{folder}/times.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default=16384, help="of each rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that are")
    parser.add_argument("--decoder", action="store_true", help="without the head and the loss")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/ranks.csv"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (folder, arguments), nprocs=arguments.ranks)
        times = torch.load(f"{folder}/times.pt")

    base, what = ALTERNATIVES[0], "decoder alone" if arguments.decoder else "loss included"
    print(f"\n{arguments.ranks} ranks, {arguments.tokens:,} tokens each, {arguments.layers} layers, {what}\n")
    print("| | step s | / activation checkpointing |")
    print("| --- | --- | --- |")
    rows = []
    for name in ALTERNATIVES:
        ratio = statistics.median(ours / its for ours, its in zip(times[name], times[base], strict=True))
        median = statistics.median(times[name])
        print(f"| {name} | {median:.2f} | {ratio:.3f} |")
        run = {key: getattr(arguments, key) for key in ("ranks", "tokens", "layers", "repeats")}
        rows.append(
            {
                **describe(torch.device("cpu")),
                **run,
                "what": what,
                "alternative": name,
                "step_seconds_median": median,
                "time_over_checkpointing": ratio,
            }
        )
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
