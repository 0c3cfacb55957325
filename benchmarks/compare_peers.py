"""memo_hf beside its peers in one command: the README's table, as CSV and, beside it, a picture.

    python benchmarks/compare_peers.py                            16,384 tokens, 8 layers: hours on a CPU
    python benchmarks/compare_peers.py --tokens 1024 --layers 2   to see that everything runs: minutes

Two cases of `bench_step.py`, interleaved in one process: the decoder alone, and with the loss. Beside memo_hf run
transformers (plain, activation checkpointing, and with its offload), accelerate (FSDP2's checkpointing), TRL (selective
checkpointing, activation offloading) and DeepSpeed from PyPI (tiled MLP, and tiled MLP and loss, over checkpointing).
What does not run on the device is listed with the reason. Below 2,048 tokens memo_hf steps aside and equals plain.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from alternatives import ALTERNATIVES
from bench_step import run_case, write
from matplotlib.figure import Figure

from memo_hf.units import parse_count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2, help="timed rounds; 0 times the metered step instead")
    parser.add_argument("--only", default=",".join(ALTERNATIVES), help="comma-separated alternatives")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/peers.csv"), help="the picture beside it"
    )
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",")
    rows = []
    for decoder_only in (True, False):
        rows += run_case(
            [name for name in names if not decoder_only or name != "tiled MLP and loss"],
            tokens=arguments.tokens,
            layers=arguments.layers,
            decoder_only=decoder_only,
            repeats=arguments.repeats,
            device=torch.device(arguments.device),
        )
    write(arguments.output, rows)
    plot(rows, arguments.output.with_suffix(".png"))


def plot(rows: list[dict], path: Path) -> None:
    """Write an image: peak bytes and step time of each alternative in each case, memo_hf in another colour."""
    cases = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(12, 1.2 + 2.6 * len(cases)), layout="constrained")
    grid = figure.subplots(len(cases), 2, squeeze=False)
    for line, what in zip(grid, cases, strict=True):
        shown = [row for row in rows if row["what"] == what and not row["not_run"]][::-1]
        names = [row["alternative"] for row in shown]
        colours = ["tab:orange" if name == "memo_hf" else "tab:gray" for name in names]
        figures = (("peak_bytes", 1e6, "peak MB above the weights"), ("step_seconds_median", 1, "seconds of a step"))
        for axes, (field, unit, label) in zip(line, figures, strict=True):
            bars = axes.barh(names, [(row[field] or 0) / unit for row in shown], color=colours)
            axes.bar_label(bars, fmt="%.3g", padding=3)
            axes.set(title=what, xlabel=label)
            axes.margins(x=0.12)
    about = rows[0]
    figure.suptitle(
        f"{about['tokens']:,} tokens, {about['layers']} layers; {about['hardware']}, torch {about['torch']}"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
