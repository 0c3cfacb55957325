"""Real processes over gloo in which DeepSpeed runs, on its own: ZeRO-3 changes torch for the whole process.

A test module names what is to run; `run_with_deepspeed` returns what each case gave or raised.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness.forked import run_ranks
from harness.ranks import RANKS, forget_accelerate

Cases = Callable[[int, Path], Iterator[tuple[object, Callable[[], object]]]]


def run_with_deepspeed(cases: Cases, folder: Path, num_ranks: int = RANKS) -> list[dict]:
    """For each rank, by name of the case, what it returned, or the exception that it raised.

    Args:
        cases: of a module, asked in each process with its rank and `folder` for (name, function) of all that runs.
    """
    run_ranks(_work, cases, folder, num_ranks=num_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def forget_states() -> None:
    """As `forget_accelerate`; a trainer of before, not collected yet, would have models made in parts for ZeRO-3."""
    gc.collect()
    forget_accelerate()


def deepspeed_over_gloo() -> None:
    """Let DeepSpeed start at once on a CPU, and train in any pair of ranks there. In this process, for good.

    The gradient of torch's all-gather, which transformers' loss of a sequence goes through, is scattered over gloo from
    "rank 0" and "rank 1" of the world, who are not in the second pair. NCCL takes another way.
    """
    # Or it would be compiled, for 20 seconds. Imported by name: DeepSpeed has another thing called torch there.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    scatter = torch.distributed.scatter

    def from_rank_of_group(tensor, parts, source, group):
        scatter(tensor, parts, group=group, group_src=source)

    torch.distributed.scatter = from_rank_of_group


def _work(rank: int, cases: Cases, folder: Path) -> None:
    deepspeed_over_gloo()
    found = {}
    for name, function in cases(rank, folder):
        try:
            found[name] = function()
        except Exception as error:  # which its own test shows; ranks fail alike
            found[name] = RuntimeError(f"{error}\n{traceback.format_exc()}")
            forget_states()
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
