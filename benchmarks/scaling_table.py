"""The forecasts in docs/scaling.md and README.md: this prints them, and with `--write` puts them there.

    python benchmarks/scaling_table.py [--write]

Needs no device and takes a few seconds. Forecasts, not measurements: docs/forecast.md says how right they are.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.baselines import ALST, CHECKPOINTING, OFFLOAD, SELECTIVE, baseline
from memo_hf.forecasting.find import max_seq_len, with_gpus
from memo_hf.forecasting.forecast import Forecast, forecast_setup
from memo_hf.forecasting.setup import Setup

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
LENGTHS = ("128K", "256K", "512K", "1M", "2M", "4M")
GPUS = (1, 2, 4, 8, 16, 32, 64)
# Tried in this order; a mark in the table says which it took.
PLACES = {
    "": {},
    "o": {"optimizer_device": "host"},
    "w": {"optimizer_device": "host", "weights_device": "host"},
}
# The run, model, tokens, GPUs, published seconds of a step, its MFU counted as here (see docs/scaling.md).
PUBLISHED_SECONDS = (
    ("TRL guide", "qwen3-8b", "1M", 8, 380, 33.9),
    ("TRL", "qwen3-8b", "2M", 16, 696, 36.2),
    ("TRL", "qwen3-8b", "4M", 32, 1346, 37.0),
    ("TRL", "qwen3-32b", "1M", 8, 1295, 35.7),
)
# The longest sequence that ALST's recipes train, in millions of tokens, by model and GPUs.
PUBLISHED_LONGEST = {
    ("llama-3.1-8b", 1): 0.5,
    ("llama-3.1-8b", 8): 3.7,
    ("llama-3.1-8b", 16): 8.0,
    ("llama-3.1-8b", 32): 15.0,
    ("llama-3.1-70b", 8): 0.2,
    ("llama-3.1-70b", 16): 1.2,
    ("llama-3.1-70b", 32): 4.0,
    ("llama-3.1-70b", 64): 10.0,
}

# One GPU of each kind and its host's memory, for a LoRA adapter on Llama-3.1-8B.
ONE_GPU = {"4090": "256GiB", "h100": "1TiB"}
# Strategy, whether its loss is chunked, and its name in the table.
BESIDE = (
    (CHECKPOINTING, False, "activation checkpointing, transformers' own loss"),
    (CHECKPOINTING, True, "activation checkpointing, a chunked loss"),
    (SELECTIVE, True, "selective checkpointing, a chunked loss"),
    (OFFLOAD, True, "activation checkpointing, offloaded, a chunked loss"),
    (ALST, True, "the same with a tiled MLP (ALST)"),
)


def setup_on(model: str, length: str, gpus: int, **places) -> Setup:
    """`gpus` H100s, eight to a node, that share weights and sequence, each with 240 GiB of host memory."""
    setup = with_gpus(make_setup(model, length, device="h100", **places), gpus)
    return setup.replace(host_bytes=setup.assumed_host_bytes)


@cache
def forecast_on(model: str, length: str, gpus: int) -> tuple[str, Setup, Forecast]:
    """Where optimizer and weights live, the setup and its forecast: the first of `PLACES` that fits, or the last."""
    for mark, places in PLACES.items():
        setup = setup_on(model, length, gpus, **places)
        found = forecast_setup(setup)
        if found.fits:
            break
    return mark, setup, found


def longest(model: str, gpus: int) -> str:
    """The longest sequence that fits, in millions of tokens, with optimizer and weights where that is longest."""
    tokens = max(max_seq_len(setup_on(model, "1M", gpus, **places)) for places in PLACES.values())
    return f"{tokens / 1e6:.2f}" if tokens else "-"


def cell(model: str, length: str, gpus: int) -> str:
    mark, _, found = forecast_on(model, length, gpus)
    if not found.fits:
        return "-"
    return f"{found.step_seconds:,.0f} s, {100 * found.mfu:.0f} %{' ' + mark if mark else ''}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def length_table(model: str) -> str:
    """Step time and MFU by GPUs and length."""
    rows = [[str(gpus), *(cell(model, length, gpus) for length in LENGTHS)] for gpus in GPUS]
    return table(["H100s", *LENGTHS], rows)


def seconds_table() -> str:
    """Published step times beside the forecast of the same strategy, and of memo_hf."""
    rows = []
    for name, model, length, gpus, seconds, utilisation in PUBLISHED_SECONDS:
        _, setup, found = forecast_on(model, length, gpus)
        stock = baseline(setup, OFFLOAD)
        rows.append(
            [f"{name}, {model}, {length} on {gpus} H100", f"{seconds:,} s, {utilisation:.0f} %"]
            + [f"{stock.step_seconds:,.0f} s, {100 * stock.mfu:.0f} %", cell(model, length, gpus)]
        )
    return table(["run", "published", "forecast of that strategy", "forecast of memo_hf"], rows)


def longest_table() -> str:
    """The longest sequences that ALST publishes beside the forecast of memo_hf."""
    rows = [
        [model, str(gpus), f"{tokens:.1f}", longest(model, gpus)] for (model, gpus), tokens in PUBLISHED_LONGEST.items()
    ]
    return table(["model", "H100s", "ALST, published", "memo_hf, forecast"], rows)


def one_gpu_table() -> str:
    """The longest sequences that fit one GPU, in thousands of tokens, by strategy."""
    setups = [
        make_setup("llama-3.1-8b", 1024, device=device, train="lora", host_memory=host)
        for device, host in ONE_GPU.items()
    ]
    rows = []
    for strategy, is_chunked, name in BESIDE:

        def fits(now: Setup, strategy=strategy) -> bool:
            return baseline(now, strategy).fits

        found = [max_seq_len(setup.replace(chunked_loss=is_chunked), fits) for setup in setups]
        rows.append([name, *(f"{tokens / 1000:,.0f}" for tokens in found)])
    rows.append(["**memo_hf**", *(f"**{max_seq_len(setup) / 1000:,.0f}**" for setup in setups)])
    names = (f"{name.upper()}, {host} of host memory" for name, host in ONE_GPU.items())
    return table(["thousands of tokens", *names], rows)


@cache
def blocks() -> dict[str, dict[str, str]]:
    """The parts of each page that are made here, by name."""
    lengths = {model: length_table(model) for model in MODELS}
    return {
        "docs/scaling.md": {**lengths, "step times": seconds_table(), "longest": longest_table()},
        "README.md": {"longest on one GPU": one_gpu_table()},
    }


def filled(path: str) -> str:
    """The page with every block between its markers replaced by today's."""
    page = (ROOT / path).read_text()
    for name, text in blocks()[path].items():
        begin, end = f"<!-- {name}: benchmarks/scaling_table.py -->\n", "\n<!-- end -->"
        before, begins, rest = page.partition(begin)
        _, ends, after = rest.partition(end)
        if not (begins and ends):
            raise SystemExit(f"{path}: no marker {begin.strip()} with an end and a line between")
        page = before + begin + text + end + after
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in the pages")
    writes = parser.parse_args().write
    for path, parts in blocks().items():
        if writes:
            (ROOT / path).write_text(filled(path))
        else:
            print("\n\n".join(f"{path}: {name}\n\n{text}" for name, text in parts.items()), end="\n\n")


if __name__ == "__main__":
    main()
