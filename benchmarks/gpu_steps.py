"""The steps of `gpu_check.py`: a Llama of 8B width beside checkpointing, at lengths up to 256K tokens.

Hidden 4,096, 32 heads, 8 key/value heads, intermediate 14,336, vocabulary 128,256, bf16, 8 layers: 2.8 billion
parameters with embedding and head, of which weights and gradients take 11 GB. A step is a forward and a backward pass;
the decoder alone where it says so, since checkpointing does nothing about the logits, 67 GB in fp32 at 128K tokens.

memo_hf runs as `MemoConfig()` has it: the first step is measured at swap fraction 0, the later ones are as planned.
MFU is by `memo_hf.forecasting.speed.MFU_CONVENTION`, over the dense bf16 peak. An alternative that runs out of memory
is recorded as such. All steps of an alternative are listed; the last one is quoted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time

import torch
from alternatives import ALTERNATIVES
from bench_step import step, synchronize
from gpu_model import make_model

import memo_hf
from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.speed import model_flops

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}  # dense bf16
NUM_LAYERS = 8
CHECKPOINTING = ("activation checkpointing", "activation checkpointing with offload", "selective checkpointing")


def compare_steps(device: torch.device, budget_seconds: float = 300) -> dict:
    """`steps`, one row for each case, and `overlap`. No case is begun after `budget_seconds`."""
    begun, small = time.perf_counter(), device.type == "cpu"
    short, long, longest = (2048, 3072, 4096) if small else (2**15, 2**17, 2**18)
    model = make_model(device, small=small, num_layers=NUM_LAYERS, num_tokens=longest)
    rows = []

    def run(tokens: int, which: str, decoder_only: bool, repeats: int, around, session=None) -> None:
        if time.perf_counter() - begun > budget_seconds:
            print(f"{tokens} tokens, {which}: not begun, {budget_seconds:.0f} s are over")
            return
        row = {"tokens": tokens, "what": "decoder alone" if decoder_only else "loss included", "alternative": which}
        rows.append(row | run_steps(model, tokens, decoder_only, repeats, device, around, session))
        print(json.dumps(rows[-1]), flush=True)

    # One session: later lengths are planned from what is measured at the first.
    session = memo_hf.enable(model, memo_hf.MemoConfig())
    for tokens, decoder_only, repeats in ((short, False, 4), (long, False, 2), (long, True, 1), (longest, False, 1)):
        run(tokens, "memo_hf", decoder_only, repeats, contextlib.nullcontext(), session)
    memo_hf.disable(model)
    for tokens, which, decoder_only, repeats in (
        *((short, which, False, 2) for which in ("plain", *CHECKPOINTING)),
        *((long, which, True, 1) for which in CHECKPOINTING),
        (long, CHECKPOINTING[0], False, 1),
    ):
        with ALTERNATIVES[which](model) as around:
            run(tokens, which, decoder_only, repeats, around)
    found = {"steps": rows, "overlap": None if small else overlap(model, short, device)}
    with ALTERNATIVES[CHECKPOINTING[0]](model) as around:
        run(longest, CHECKPOINTING[0], True, 1, around)
    return found


def run_steps(model, tokens: int, decoder_only: bool, repeats: int, device: torch.device, around, session) -> dict:
    """`steps`: of each the seconds, the MFU, peak bytes in all and above what was there before, and reserved ones."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    flops, peak_flops = flops_of_step(model, tokens, decoder_only), peak_flops_of(device)
    steps, about = [], {}
    try:
        for _ in range(repeats):
            model.zero_grad(set_to_none=True)
            gc.collect()
            before = start_peak(device)
            synchronize(device)
            began = time.perf_counter()
            with around:
                step(model, ids, decoder_only)
            synchronize(device)
            figures = {"seconds": time.perf_counter() - began, **read_peak(device, before)}
            if peak_flops:
                figures["mfu"] = flops / figures["seconds"] / peak_flops
            if session is not None:
                stats = session.stats
                figures |= {name: getattr(stats, name) for name in ("swap_fraction", "qkv", "strategy", "chunk_size")}
                figures |= {"peak_host_bytes": stats.peak_host_bytes, "host_reserved_bytes": stats.host_reserved_bytes}
            steps.append(figures)
        if session is not None:
            compared = session.run_report(figures.get("peak_bytes")).compared
            about = {"binding_limit": stats.binding_limit, "host_budget_bytes": stats.host_budget_bytes}
            about |= {"forecast_and_measured": [list(row) for row in compared]}
            about |= {"measurement": repr(session.planners[0].measurement)}
    except torch.OutOfMemoryError as error:
        about = {"out_of_memory": str(error)[:200]}
    except Exception as error:  # of a peer in these versions; the others go on
        about = {"failed": f"{type(error).__name__}: {error}"[:500]}
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"steps": steps, **about}


def flops_of_step(model, tokens: int, decoder_only: bool) -> float:
    flops = model_flops(make_setup(model.config.to_dict(), tokens))
    return flops - 6.0 * tokens * model.config.vocab_size * model.config.hidden_size * decoder_only


def peak_flops_of(device: torch.device) -> float | None:
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def start_peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def read_peak(device: torch.device, before: int) -> dict:
    if device.type == "cpu":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    return {
        "peak_bytes": peak,
        "peak_above_bytes": peak - before,
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def overlap(model, num_tokens: int, device: torch.device) -> dict:
    """Seconds of copies each way in one step at swap fraction 1, and the share of them that runs beside a kernel."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device=device)
    memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=1.0))
    try:
        step(model, ids, False)
        model.zero_grad(set_to_none=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step(model, ids, False)
            torch.cuda.synchronize(device)
    finally:
        memo_hf.disable(model)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = merged([e for e in events if not e.name.startswith(("Memcpy", "Memset"))])
    result = {"tokens": num_tokens}
    for direction in ("DtoH", "HtoD"):
        copies = merged([e for e in events if e.name.startswith(f"Memcpy {direction}")])
        total = sum(stop - start for start, stop in copies)
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in copies for c, d in kernels)
        result[direction] = {"seconds": total / 1e6, "share_hidden": hidden / total if total else None}
    print(json.dumps(result), flush=True)
    return result


def merged(events) -> list[tuple[float, float]]:
    """Disjoint intervals in microseconds that the events cover."""
    intervals: list[tuple[float, float]] = []
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(stop, intervals[-1][1]))
        else:
            intervals.append((start, stop))
    return intervals
