"""Training on a GPU under one allocator, in a process of its own: losses, peak and reserved bytes, step times.

    python benchmarks/gpu_allocator.py planned       memo_hf's planned allocator
    python benchmarks/gpu_allocator.py stock         torch's own
    python benchmarks/gpu_allocator.py expandable    torch's own with expandable_segments

A Llama of 8B width with 4 layers, AdamW, swap fraction 0.5, and batches of two lengths in turn, each planned by itself.
`--device cpu` runs toy sizes. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time

import torch

from memo_hf.allocator import cuda
from memo_hf.units import format_bytes

LENGTHS = {"cuda": (16384, 12288), "cpu": (512, 384)}
PLANNING_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("allocator", choices=("planned", "stock", "expandable"))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and arguments.allocator == "planned":
        cuda.install()  # before anything below is imported: bitsandbytes alone puts CUDA to use
    if device.type == "cuda" and arguments.allocator == "expandable":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(json.dumps(train(arguments.allocator == "planned", device)))


def train(is_planned: bool, device: torch.device) -> dict:
    from gpu_model import make_model

    import memo_hf

    on_cuda = device.type == "cuda"
    model = make_model(device, small=not on_cuda, num_layers=4, num_tokens=16384)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    words = model.config.vocab_size
    batches = [torch.randint(0, words, (1, length), device=device) for length in LENGTHS[device.type]]
    config = memo_hf.MemoConfig(
        allocator="planned" if is_planned else "stock",
        plan_folder=tempfile.mkdtemp(),
        swap_fraction=0.5,
        min_tokens=1,
    )
    session, losses, seconds = memo_hf.enable(model, config), [], []

    def run_steps(count: int) -> None:
        for number in range(count):
            began = time.perf_counter()
            optimizer.zero_grad()
            ids = batches[number % 2]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
            print(f"step {len(seconds)}: {seconds[-1]:.3f} s, loss {losses[-1]:.6f}", flush=True)

    for _ in range(3):  # until both lengths are watched, recorded and planned
        run_steps(4)
        session.serving.finish_planning(PLANNING_SECONDS)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    run_steps(10)
    found = {"step_seconds": statistics.median(seconds[-10:]), "losses": losses}
    found["serving"] = {name: getattr(session.stats.serving, name) for name in ("served_share", "arena_bytes")}
    if on_cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total - free,
            "out_of_memory": out_of_memory(device),
        }
        run_steps(2)  # it goes on after an error
        print(f"{format_bytes(found['peak_bytes'])} of {format_bytes(found['reserved_bytes'])} reserved")
    return found


def out_of_memory(device: torch.device) -> str:
    """What is said where more is asked for than there is; accelerate must know it for what it is."""
    from accelerate.utils.memory import should_reduce_batch_size

    try:
        torch.empty(2**40, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) or not should_reduce_batch_size(error):
            raise
        return str(error)
    raise AssertionError("a tebibyte was to be had")


if __name__ == "__main__":
    main()
