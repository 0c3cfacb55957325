"""The forecast beside published runs and our own, with the error of each: `python benchmarks/bench_forecast.py`.

Our own are in benchmarks/results/gpu_h200.json (by `gpu_check.py`). Every run is described by the switches that its
source names. Where a switch is not known the row says so; docs/forecast.md explains the misses. Needs no device and
takes about a second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.baselines import ALST, CHECKPOINTING, OFFLOAD, PLAIN, SELECTIVE, Strategy, baseline
from memo_hf.forecasting.forecast import forecast_setup, layer_costs

GIB = 2**30  # ALST and TRL both print GiB under the name of GB: their own examples divide by 2**30
LIGER = Strategy(name="Liger", fused=True, reentrant=True)
LIGER_OFFLOAD = Strategy(name="Liger, offloaded inputs", fused=True, offloads=True, reentrant=True)
ON_HOST = {"device": "h200", "optimizer_device": "host", "weights_device": "host", "host_memory": "2TiB"}
ON_NODE = {"device": "h100", "gpus": 8, "sequence_parallel": 8, "host_memory": "2TiB"}
PAPER = {"device": "a800", "gpus": 8, "sequence_parallel": 8, "host_memory": "2TiB"}
OWN = {"device": "h200", "optimizer": "sgd", "master_weights": False, "host_memory": "111GiB"}
EIGHT_LAYERS = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 2**18,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published or measured figure and its forecast."""

    run: str
    figure: str
    published: float
    forecast: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        """Forecast over published, less one."""
        return self.forecast / self.published - 1


def paper_rows() -> list[Row]:
    """The MEMO paper, 7B on 8 A800."""

    def costs(kilo_tokens):
        return layer_costs(make_setup("gpt-7b", 1024 * kilo_tokens, **PAPER))[0]

    rate = make_setup("gpt-7b", 1024, **PAPER).device.link_bytes_per_second
    kilos = range(64, 1025, 8)
    hidden = next(
        k
        for k in kilos
        if (costs(k).whole_bytes("rebuild") + costs(k).fraction_bytes("rebuild")) / rate <= costs(k).forward_seconds
    )
    share = next(k for k in kilos if costs(k).attend_forward_seconds >= 0.9 * costs(k).forward_seconds)
    headline = forecast_setup(make_setup("gpt-7b", "1M", **PAPER))
    run = "MEMO 7B, 8 x A800"
    return [
        Row(run, "full swapping hidden from", 192, hidden, "K tokens", "calibrated on"),
        Row(run, "attention above 90 % of forward from", 576, share, "K tokens", "calibrated on"),
        Row(run, "swap fraction at 1M, 2 TiB", 0.467, headline.swap_fraction, "", headline.binding_limit),
        Row(run, "MFU at 1M", 52.30, 100 * headline.mfu, "%", "attention rates chosen with it in view"),
    ]


def peer_rows() -> list[Row]:
    """ALST's steps on one H200, and TRL on 8 H100."""
    rows = []
    for tokens, strategy, published, chunked in (
        (65_000, CHECKPOINTING, 137.36, False),
        (300_000, LIGER, 134.96, True),
        (650_000, LIGER_OFFLOAD, 126.8, True),
        (1_200_000, ALST, 136.15, True),
    ):
        setup = make_setup("llama-3.1-8b", tokens, chunked_loss=chunked, **ON_HOST)
        run = f"ALST Llama-8B, H200, {strategy.name}"
        peak = baseline(setup, strategy).device_peak_bytes / GIB
        note = "DeepSpeed's buckets are not described" if chunked else "what its loss held is not described"
        rows.append(Row(run, f"peak at {tokens:,}", published, peak, "GiB", note))
        longest_tokens = longest(setup, strategy) / 1e3
        rows.append(
            Row(run, "longest sequence", tokens / 1e3, longest_tokens, "thousand tokens", "" if chunked else note)
        )
    one = {"device": "h100", "master_weights": False}
    rings = "ring attention's fp32 sums are not described"
    unknown = "memory switches not published"
    for model, length, options, strategy, memory, seconds, note in (
        ("qwen3-4b", "96K", one, CHECKPOINTING, 59.9, None, ""),
        ("qwen3-4b", "96K", one, OFFLOAD, 48.8, None, ""),
        ("qwen3-4b", "1M", {**ON_NODE, "gpus": 4, "sequence_parallel": 4}, OFFLOAD, 63.6, None, ""),
        ("qwen3-8b", "1M", ON_NODE, OFFLOAD, 56.2, 380, ""),
        ("qwen3-0.6b", "1M", ON_NODE, CHECKPOINTING, 27.9, 137, rings),
        ("qwen3-0.6b", "1M", ON_NODE, OFFLOAD, 20.8, None, rings),
        ("qwen3-30b-a3b", "1M", ON_NODE, OFFLOAD, 46.0, 483, unknown),
        ("qwen3-32b", "1M", ON_NODE, OFFLOAD, 60.8, 1295, unknown),
    ):
        setup = make_setup(model, length, **options)
        row = baseline(setup, strategy)
        run = f"TRL {model}, {setup.gpus} x H100" + (", offloaded" if strategy.offloads else "")
        rows.append(Row(run, f"peak at {length}", memory, row.device_peak_bytes / GIB, "GiB", note))
        if seconds:
            note = "calibrated on" if model == "qwen3-8b" else ""
            rows.append(Row(run, f"step at {length}", seconds, row.step_seconds, "s", note))
    return rows


def own_rows() -> list[Row]:
    """Steps on one H200 of 8 layers of Llama-3.1-8B, without an optimizer."""
    results = json.loads((Path(__file__).parent / "results/gpu_h200.json").read_text())
    strategies = {
        "plain": PLAIN,
        "activation checkpointing": CHECKPOINTING,
        "activation checkpointing with offload": OFFLOAD,
        "selective checkpointing": SELECTIVE,
    }
    rows = []
    for case in results["steps"]:
        tokens, alternative = case["tokens"], case["alternative"]
        if case["what"] != "loss included":
            continue  # a forecast counts the loss
        first, last = case["steps"][0], case["steps"][-1]
        if first.get("swap_fraction") != last.get("swap_fraction"):
            setup = make_setup(
                EIGHT_LAYERS, tokens, **OWN, swap_fraction=0.0, qkv=first["qkv"], chunk_size=first["chunk_size"]
            )
            peak = forecast_setup(setup).device_peak_bytes / GIB
            rows.append(
                Row(
                    "H200, 8 layers, memo_hf, fraction 0", f"peak at {tokens:,}", first["peak_bytes"] / GIB, peak, "GiB"
                )
            )
        options = {**OWN, "chunked_loss": alternative == "memo_hf"}
        if alternative == "memo_hf":
            options |= {"swap_fraction": last["swap_fraction"], "qkv": last["qkv"], "chunk_size": last["chunk_size"]}
        setup = make_setup(EIGHT_LAYERS, tokens, **options)
        found = forecast_setup(setup) if alternative == "memo_hf" else baseline(setup, strategies[alternative])
        run = f"H200, 8 layers, {alternative}"
        rows.append(Row(run, f"peak at {tokens:,}", last["peak_bytes"] / GIB, found.device_peak_bytes / GIB, "GiB"))
        note = "flash kernel; the forecast is for cuDNN's" if alternative == "memo_hf" else ""
        rows.append(Row(run, f"step at {tokens:,}", last["seconds"], found.step_seconds, "s", note))
    return rows


def longest(setup, strategy: Strategy) -> int:
    """The longest sequence that fits under `strategy`, to a thousandth."""
    low, high = 1, 2**24
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        if baseline(setup.replace(seq_len=middle), strategy).fits:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Print the table."""
    print(f"{'run':<52}{'figure':<37}{'published':>10}{'forecast':>10}{'error':>9}  note")
    for row in paper_rows() + peer_rows() + own_rows():
        print(
            f"{row.run:<52}{row.figure:<37}{row.published:>10.4g}{row.forecast:>10.4g}{100 * row.error:>+8.1f} %"
            f"  {row.unit}{', ' if row.unit and row.note else ''}{row.note}"
        )


if __name__ == "__main__":
    main()
