"""What only a GPU can show, part by part, each in a process of its own: what one loses leaves the others alone.

    python benchmarks/gpu_check.py                               all parts, on a GPU of 80 to 140 GB, in 8 minutes
    python benchmarks/gpu_check.py --parts gradients,steps       some of them
    python benchmarks/gpu_check.py --device cpu                  the same code at toy sizes, so that it is known to run

gradients     against the plain run, fp32 and bf16, full and LoRA, several families, swap fractions 0, 0.5 and 1
qlora         the same on bitsandbytes' 4-bit weights, where bitsandbytes is installed
doctor        what `memo-hf doctor` finds: link bandwidth each way, whether pinning works, a training step
steps         peak bytes, step time and MFU of a Llama of 8B width beside checkpointing (`gpu_steps.py`), the share of
              copies that runs while kernels run, and the forecast beside what was measured

Writes benchmarks/results/gpu_check.json, each part as soon as it ends. Exits with 1 where a part failed.
`gpu_allocator.py` compares allocators, each in a process of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from bench_step import describe
from gpu_steps import compare_steps
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import memo_hf
from memo_hf.diagnosis import examine

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1024, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": dict(head_dim=64),
    "mistral": dict(sliding_window=300),
    "gemma2": dict(head_dim=64, sliding_window=300),
    "qwen3_moe": dict(head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
}


def small_model(family: str, dtype: torch.dtype, device: torch.device):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()


def gradients(model, inputs: dict) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare_gradients(model, inputs: dict, limit: float, **about) -> list[dict]:
    """Worst relative error of any parameter's gradient at several swap fractions, beside a second plain run's."""
    plain, again = gradients(model, inputs), gradients(model, inputs)
    rows = [dict(**about, swap_fraction="plain again", error=worst(again, plain), passed=True)]
    for fraction in (0.0, 0.5, 1.0, None):
        memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=fraction, chunk_size=500, unswapped_layers=1))
        for _ in range(2):  # with None the first pass is measured and the second planned
            ours = gradients(model, inputs)
        memo_hf.disable(model)
        error = worst(ours, plain)
        rows.append(dict(**about, swap_fraction=fraction, error=error, passed=error <= limit))
    for row in rows:
        print("gradients", *row.values(), flush=True)
    return rows


def worst(ours: dict, theirs: dict) -> float:
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-30)).item() for n in theirs)


def small_inputs(device: torch.device, **more) -> dict:
    return {"input_ids": torch.randint(3, 1024, (1, 1024 if device.type == "cpu" else 4096), device=device), **more}


def check_gradients(device: torch.device) -> list[dict]:
    """bf16 is held against the plain bf16 run, rounding of both included."""
    rows = []
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for family in FAMILIES:
            inputs = small_inputs(device)
            rows += compare_gradients(small_model(family, dtype, device), inputs, limit, dtype=str(dtype), what=family)
        model = small_model("llama", dtype, device)
        length = inputs["input_ids"].shape[1]
        documents = torch.cat([torch.arange(end) for end in (length // 4, length // 2, length // 4)]).to(device)[None]
        inputs = small_inputs(device, position_ids=documents)
        rows += compare_gradients(model, inputs, limit, dtype=str(dtype), what="llama, packed documents")
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
        rows += compare_gradients(model, small_inputs(device), limit, dtype=str(dtype), what="llama, LoRA")
    return rows


def check_qlora(device: torch.device) -> list[dict]:
    """As `check_gradients`, on 4-bit weights as QLoRA has them."""
    try:
        import bitsandbytes
    except ImportError:
        print("QLoRA skipped: bitsandbytes is not installed (pip install bitsandbytes)")
        return []
    model = small_model("llama", torch.bfloat16, torch.device("cpu"))
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
    return compare_gradients(model, small_inputs(device), 5e-2, dtype="4-bit", what="llama, QLoRA")


def check_doctor(device: torch.device) -> dict:
    found = examine()
    print(json.dumps(found, indent=1))
    return found


PARTS = {
    "gradients": (check_gradients, 90),
    "qlora": (check_qlora, 40),
    "doctor": (check_doctor, 40),
    "steps": (compare_steps, 360),
}


def run_part(name: str, device: torch.device, output: Path, steps_seconds: float) -> None:
    began = time.perf_counter()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    faulthandler.dump_traceback_later(PARTS[name][1] - 2)  # where it hangs
    try:
        result = {"found": PARTS[name][0](device, *([steps_seconds] if name == "steps" else []))}
    except Exception:
        result = {"error": traceback.format_exc()}
        traceback.print_exc()
    output.write_text(json.dumps({**result, "seconds": time.perf_counter() - began}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_check.json"))
    parser.add_argument("--seconds", type=float, default=260, help="no case of `steps` is begun after these")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the part that this process runs
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.one:
        run_part(arguments.one, device, arguments.output, arguments.seconds)
        return
    result: dict = {"parts": {}}
    for name in arguments.parts.split(","):
        print(f"\n=== {name}", flush=True)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, "--one", name, "--device", arguments.device, "--output", file.name]
            command += ["--seconds", str(arguments.seconds)]
            try:
                code = subprocess.run(command, timeout=PARTS[name][1]).returncode
            except subprocess.TimeoutExpired:
                code = f"{PARTS[name][1]} s are over"
            text = Path(file.name).read_text()
        result["parts"][name] = json.loads(text) if text else {"error": f"the process ended with {code}"}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    result["about"] = describe(device)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    failed = [name for name, part in result["parts"].items() if "error" in part]
    rows = [row for name in ("gradients", "qlora") for row in result["parts"].get(name, {}).get("found", [])]
    failed += [f"gradients: {row}" for row in rows if not row["passed"]]
    print("\n" + ("\n".join(["FAILED:", *failed]) if failed else "all parts ran, all gradients are right"))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
