"""What only a GPU can show, in under 8 minutes on one of 80 to 140 GB.

    python benchmarks/gpu_check.py                 on a CUDA device; writes benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu    the same code at toy sizes, so that it is known to run

1. Gradients on the device against the plain run, fp32 and bf16, full and LoRA, swap fractions 0, 0.5 and 1.
2. Peak bytes and step time of a Llama of 8B width (hidden 4,096, 32 heads, 8 key/value heads, intermediate 14,336,
   vocabulary 128,256, bf16) with 4 layers at 32K, 128K and 256K tokens: memo_hf beside activation checkpointing, the
   same with offload, and selective checkpointing.
3. MFU: 6 x parameters x tokens + 6 x layers x hidden x tokens^2 floating-point operations a step (attention counted
   causal, recomputation not counted, parameters without the embedding), over the device's dense bf16 peak.
4. How much of the copies runs while kernels run, from the profiler's device events.
5. QLoRA's gradients on bitsandbytes' 4-bit weights against the plain run, where bitsandbytes is installed.
6. What `memo-hf doctor` finds: link bandwidth each way, whether pinning works, a training step.

An alternative that runs out of memory is recorded as such. The model has 1.9 billion parameters with its embedding and
head, so that weights and gradients take 8 GB.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from bench_step import ALTERNATIVES, describe, measure, step
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memo_hf
from memo_hf.diagnosis import examine

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}  # dense bf16
COMPARED = [
    "activation checkpointing",
    "activation checkpointing with offload",
    "selective checkpointing",
    "memo_hf",
]


def make_model(device, dtype, *, small: bool, num_layers: int, num_tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = (
        dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
        if small
        else dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128_256,
        )
    )
    config = LlamaConfig(**sizes, num_hidden_layers=num_layers, max_position_embeddings=num_tokens)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        try:
            return LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(torch.float32)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare_gradients(model, ids, limit: float, **about) -> list[dict]:
    """Gradients at several swap fractions against the plain run's."""
    plain, rows = gradients(model, ids), []
    for fraction in (0.0, 0.5, 1.0):
        memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=fraction, chunk_size=500))
        ours = gradients(model, ids)
        memo_hf.disable(model)
        error = max(((ours[n] - plain[n]).norm() / plain[n].norm().clamp_min(1e-30)).item() for n in plain)
        passed = ours.keys() == plain.keys() and error <= limit
        rows.append(dict(**about, swap_fraction=fraction, error=error, passed=passed))
        print(f"gradients {about} fraction={fraction}: {error:.1e} {'ok' if passed else 'WRONG'}", flush=True)
    return rows


def check_gradients(device) -> list[dict]:
    """Worst relative error of any parameter's gradient. bf16 is held against the plain bf16 run, rounding included."""
    rows = []
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for lora in (False, True):
            model = make_model(device, dtype, small=True, num_layers=4, num_tokens=4096)
            if lora:
                model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
            ids = torch.randint(0, 1024, (1, 1024 if device.type == "cpu" else 4096), device=device)
            rows += compare_gradients(model, ids, limit, dtype=str(dtype), lora=lora)
    return rows


def check_qlora(device) -> list[dict]:
    """As `check_gradients`, on 4-bit weights as QLoRA has them."""
    try:
        import bitsandbytes
    except ImportError:
        print("QLoRA skipped: bitsandbytes is not installed (pip install bitsandbytes)")
        return []
    model = make_model(torch.device("cpu"), torch.bfloat16, small=True, num_layers=4, num_tokens=4096)
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                sizes = (module.in_features, module.out_features)
                made = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                weight = module.weight.detach()
                made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
                layer.set_submodule(name, made)
    model.to(device)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).train()
    ids = torch.randint(0, 1024, (1, 1024 if device.type == "cpu" else 4096), device=device)
    return compare_gradients(model, ids, 5e-2, dtype="4-bit", lora=True)


def model_flops(model, num_tokens: int) -> float:
    config = model.config
    counted = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * num_tokens**2
    return 6 * counted * num_tokens + 6 * attention


def compare(model, num_tokens: int, device, peak_flops: float | None, repeats: int) -> list[dict]:
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device=device)
    rows = []
    for name in COMPARED:
        row = {"tokens": num_tokens, "alternative": name}
        try:
            row["peak_bytes"], _ = measure(model, ids, False, name, memory=True)  # also the warm-up
            times = [measure(model, ids, False, name, memory=False)[1] for _ in range(repeats)]
            row["step_seconds"] = sorted(times)[len(times) // 2]
            if peak_flops:
                row["mfu"] = model_flops(model, num_tokens) / row["step_seconds"] / peak_flops
        except torch.OutOfMemoryError:
            row["out_of_memory"] = True
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def overlap(model, num_tokens: int, device) -> dict:
    """Seconds of copies each way in one step, and the share of them that runs while a kernel runs."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device=device)
    with ALTERNATIVES["memo_hf"](model):
        step(model, ids, False)
        model.zero_grad(set_to_none=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step(model, ids, False)
            torch.cuda.synchronize(device)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = merged([e for e in events if not e.name.startswith(("Memcpy", "Memset"))])
    result = {"tokens": num_tokens}
    for direction in ("DtoH", "HtoD"):
        copies = merged([e for e in events if e.name.startswith(f"Memcpy {direction}")])
        total = sum(stop - start for start, stop in copies)
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in copies for c, d in kernels)
        result[direction] = {"seconds": total / 1e6, "share_hidden": hidden / total if total else None}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_check.json"))
    parser.add_argument("--budget-seconds", type=float, default=420, help="no new measurement is begun after this")
    arguments = parser.parse_args()
    device, begun = torch.device(arguments.device), time.perf_counter()
    small = device.type == "cpu"
    name = "cpu" if small else torch.cuda.get_device_name(device)
    peak_flops = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)

    result = {"gradients": check_gradients(device) + check_qlora(device), "steps": [], "overlap": []}
    result["doctor"] = examine()
    lengths = [2048] if small else [2**15, 2**17, 2**18]
    dtype = torch.float32 if small else torch.bfloat16
    model = make_model(device, dtype, small=small, num_layers=4, num_tokens=max(lengths))
    for num_tokens in lengths:
        if time.perf_counter() - begun > arguments.budget_seconds:
            print(f"{num_tokens} tokens skipped: {arguments.budget_seconds:.0f} s are over")
            continue
        result["steps"] += compare(model, num_tokens, device, peak_flops, repeats=3 if num_tokens < 2**17 else 1)
        if not small:
            result["overlap"].append(overlap(model, num_tokens, device))
            print(json.dumps(result["overlap"][-1]), flush=True)
    result["about"] = {**describe(device), "seconds": time.perf_counter() - begun}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if not all(row["passed"] for row in result["gradients"]):
        raise SystemExit("gradients are wrong on this device")


if __name__ == "__main__":
    main()
