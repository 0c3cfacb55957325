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


def _work(rank: int, cases: Cases, folder: Path) -> None:
    # Or it would be compiled, for 20 seconds. Imported by name: DeepSpeed has another thing called torch there.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    found = {}
    for name, function in cases(rank, folder):
        try:
            found[name] = function()
        except Exception as error:  # which its own test shows; ranks fail alike
            found[name] = RuntimeError(f"{error}\n{traceback.format_exc()}")
            forget_states()
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
