"""The planned allocator in real training steps on the CPU: addresses, memory, served requests and step time.

    python benchmarks/bench_allocator.py [--only token-0.5,layer] [--rounds 3] [--seconds 10]

Each case trains a small random model with AdamW. Addresses are those of the recorded step, planned in two levels and
flat. Memory and time are of sessions with the planned and with the stock allocator in turns, in one process; the peak
of the process is Linux's own, above what it was before the session, with glibc's free memory returned beforehand.
Appends a row per case to a CSV file, and prints each bar as kept or missed. With --whole-runs N, sessions of N steps
that plan for themselves, and at once, are timed from first to last step, beside sessions with the stock allocator.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import gc
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import memo_hf
from memo_hf import serving
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.planner.bilevel import plan_step
from memo_hf.planner.caching import reserved_bytes
from memo_hf.planner.trace import write_trace

VOCABULARY = 4096
SIZES = dict(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=344, head_dim=32)
# Family, what its configuration has beyond the common sizes, whether it is trained with LoRA, settings.
CASES = {
    "token-0": ("llama", {}, False, dict(swap_fraction=0.0)),
    "token-0.5": ("llama", {}, False, dict(swap_fraction=0.5)),
    "token-1": ("llama", {}, False, dict(swap_fraction=1.0)),
    "layer": ("llama", {}, False, dict(mode="layer", swap_fraction=0.0)),
    "lora": ("llama", {}, True, dict(swap_fraction=0.5)),
    "moe": ("qwen3_moe", EXPERTS, False, dict(swap_fraction=0.5)),
}
# Column, bar, and what it is.
BARS = [
    ("plan_over_live", 1.001, "planned peak / most bytes alive at once"),
    ("two_levels_over_flat", 1.005, "planned in two levels / flat"),
    ("arena_over_stock_live", 1.01, "arena / peak of live bytes under the stock allocator"),
    ("time_over_stock", 1.0, "step time, planned / stock"),
    ("unserved_share", 0.001, "requests not served from the plan"),
]


def make_model(family: str, changes: dict, lora: bool):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes))
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model.train()


class Training:
    """One model with its optimizer, and sessions on it that differ in the allocator."""

    def __init__(self, case: str, num_tokens: int, folder: str):
        family, changes, lora, settings = CASES[case]
        self.model = make_model(family, changes, lora)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.ids = torch.randint(0, VOCABULARY, (1, num_tokens))
        self.settings = dict(settings, unswapped_layers=1, plan_folder=folder)

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def session(self, allocator: str):
        return memo_hf.enable(self.model, memo_hf.MemoConfig(allocator=allocator, **self.settings))

    def plan(self):
        """The trace of a step, once it is recorded and a plan for it is saved."""
        session = self.session("planned")
        for _ in range(2):
            self.step()
        # Where the plan does not serve four steps well they are recorded again, and the recordings merged.
        session.serving.finish_planning(120)
        for _ in range(6):
            self.step()
        session.serving.finish_planning(120)
        self.step()
        (trace,) = session.serving.recorded_traces
        session.close()
        return trace

    def run(self, allocator: str, num_steps: int) -> dict:
        """Step times and memory of one session, after a step that makes what lasts and one that touches all memory."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        session = self.session(allocator)
        self.step()
        self.step()
        seconds = [self.step() for _ in range(num_steps)]
        found = {"seconds": seconds, "resident": resident_bytes("VmHWM") - before, "serving": session.stats.serving}
        session.close()
        return found

    def live_peak(self) -> int:
        """Peak of live bytes of one step under the stock allocator, above what is there before it."""
        session = self.session("stock")
        self.step()
        with AllocatorMeter() as meter:
            before = meter.live_bytes
            meter.reset_peak()
            self.step()
            peak = meter.peak_bytes - before
        session.close()
        return peak


def whole_runs(case: str, arguments) -> None:
    """Times whole sessions in turns: `allocator` not set, with nothing saved before, and stock."""
    seconds = {None: [], "stock": []}
    for number in range(arguments.rounds + 1):
        for allocator in [None, "stock"] if number % 2 else ["stock", None]:
            with tempfile.TemporaryDirectory() as folder:
                training = Training(case, arguments.tokens, folder)
                session = training.session(allocator)
                seconds[allocator].append(sum(training.step() for _ in range(arguments.whole_runs)))
                if allocator is None:
                    print(f"  {session.stats.serving.describe()}")
                session.close()
    # The first of each loads kernels.
    by_itself, stock = seconds[None][1:], seconds["stock"][1:]
    ratios = [ours / theirs for ours, theirs in zip(by_itself, stock, strict=True)]
    print(
        f"{case}, {arguments.tokens} tokens, {arguments.whole_runs} steps: {statistics.median(by_itself):.1f} s, "
        f"with the stock allocator {statistics.median(stock):.1f} s; median of {len(ratios)} ratios "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def resident_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux")


def measure(case: str, arguments, folder: str) -> dict:
    training = Training(case, arguments.tokens, folder)
    trace = training.plan()
    problem = trace.problem()
    flat = plan_step(trace, time_limit=arguments.seconds, two_levels=False)
    two = plan_step(trace, time_limit=arguments.seconds)
    rounds = []
    for number in range(arguments.rounds):
        order = ("planned", "stock") if number % 2 else ("stock", "planned")
        rounds.append({allocator: training.run(allocator, arguments.steps) for allocator in order})
    medians = {name: [statistics.median(each[name]["seconds"]) for each in rounds] for name in ("planned", "stock")}
    ratios = [ours / theirs for ours, theirs in zip(medians["planned"], medians["stock"], strict=True)]
    shares = [each["planned"]["serving"].served_share for each in rounds]
    arena = max(each["planned"]["serving"].arena_bytes for each in rounds)
    peak = training.live_peak()
    return {
        "case": case,
        "requests": len(problem.buffers),
        "live_bytes": problem.lower_bound,
        "plan_over_live": min(two.peak, flat.peak) / problem.lower_bound,
        "proved": min((two, flat), key=lambda plan: plan.peak).proved,
        "two_levels_over_flat": two.peak / flat.peak,
        "planning_seconds": two.seconds,
        "arena_bytes": arena,
        "stock_live_bytes": peak,
        "arena_over_stock_live": arena / peak,
        "resident_planned": min(each["planned"]["resident"] for each in rounds),
        "resident_stock": min(each["stock"]["resident"] for each in rounds),
        "caching_reserved": reserved_bytes(trace),
        "caching_over_live": reserved_bytes(trace) / problem.lower_bound,
        "step_seconds_planned": statistics.median(medians["planned"]),
        "step_seconds_stock": statistics.median(medians["stock"]),
        "time_over_stock": statistics.median(ratios),
        "served_share": statistics.mean(shares),
        "unserved_share": 1 - statistics.mean(shares),
    }


def print_row(row: dict) -> None:
    print(
        f"\n{row['case']}: {row['requests']} requests, {row['live_bytes'] / 1e6:.1f} MB alive at once (stock "
        f"allocator: {row['stock_live_bytes'] / 1e6:.1f}), planned in {row['planning_seconds']:.1f} s"
        f"{', proved' if row['proved'] else ''}"
    )
    for column, bar, what in BARS:
        print(f"  {what:<52}{row[column]:>9.4f}  at most {bar:<6} {'kept' if row[column] <= bar else 'MISSED'}")
    print(
        f"  resident peak of the process, planned and stock      {row['resident_planned'] / 1e6:>9.1f} and "
        f"{row['resident_stock'] / 1e6:.1f} MB\n"
        f"  step, planned and stock                              {row['step_seconds_planned']:>9.3f} and "
        f"{row['step_seconds_stock']:.3f} s\n"
        f"  PyTorch's caching allocator on CUDA, / alive at once {row['caching_over_live']:>9.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated cases")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each allocator")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a session")
    parser.add_argument("--seconds", type=float, default=3, help="for each of two plans")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/allocator.csv"))
    parser.add_argument("--whole-runs", type=int, metavar="STEPS", help="only time whole sessions of so many steps")
    parser.add_argument("--traces", type=Path, help="only write the recorded steps here, for bench_places.py --trace")
    arguments = parser.parse_args()
    serving.PLANNING_SECONDS = arguments.seconds
    if arguments.traces:
        arguments.traces.mkdir(parents=True, exist_ok=True)
        for case in arguments.only.split(","):
            with tempfile.TemporaryDirectory() as folder:
                trace = Training(case, arguments.tokens, folder).plan()
            write_trace(trace, arguments.traces / f"{case}-{arguments.tokens}.csv")
        return
    if arguments.whole_runs:
        serving.SECONDS_BEFORE_PLANNING = 0
        for case in arguments.only.split(","):
            whole_runs(case, arguments)
        return
    setting = dict(
        date=datetime.date.today().isoformat(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    rows = []
    for case in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, arguments, folder))
        print_row(rows[-1])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    is_new = not arguments.output.exists()
    with open(arguments.output, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*setting, *rows[0]], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(setting | row for row in rows)


if __name__ == "__main__":
    main()
