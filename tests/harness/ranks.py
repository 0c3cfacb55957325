"""Two real processes over gloo that run all cases of a test module once, and what they need to be what they claim.

A test module names its cases in `CASES`, functions of the rank; `run_on_ranks` returns what each returned or raised.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2


def run_on_ranks(module: str, folder: Path) -> list[dict]:
    """For each rank, by name of the case, what it returned, or the exception that it raised."""
    torch.multiprocessing.spawn(_work, (module, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def result(found: list[dict], name: str) -> list:
    """Of one case on each rank. Raises what a rank has raised."""
    for told in found:
        if name not in told:
            raise RuntimeError(f"not reached: an earlier case ended the process ({list(told)[-1]})")
        if isinstance(told[name], Exception):
            raise told[name]
    return [told[name] for told in found]


def _work(rank: int, module: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, never used: the group is there
    os.chdir(folder)
    faulthandler.dump_traceback_later(150, exit=True)  # Nobody waits for ranks that wait for each other.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    warnings.simplefilter("ignore")
    found: dict = {}
    for name, case in importlib.import_module(module).CASES.items():
        try:
            found[name] = case(rank)
        except Exception as error:  # of one case, which its own test shows
            found[name] = error
            traceback.print_exc()
        outcomes = [None] * RANKS
        dist.all_gather_object(outcomes, isinstance(found[name], Exception))
        if len(set(outcomes)) > 1:  # The ranks are apart, and would stay so.
            break
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter]:
    """How often each of torch's collectives is called within the body, by whom also, C++ included; there at its end."""
    counts: Counter = Counter()
    with torch.autograd.profiler.profile() as profile:
        yield counts
    # As they were recorded: making torch's tree of events of them takes a hundred times as long as a step.
    names = [event.name() for event in profile.kineto_results.events()]
    counts.update(name.removeprefix("c10d::").strip("_") for name in names if name.startswith("c10d::"))


def fsdp_on_cpu() -> None:
    """Let accelerate run FSDP2 on a CPU, where it would run DDP instead and say nothing. In this process, for good."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    own_init = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        own_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def forget_accelerate() -> None:
    """Accelerate's states and switches are shared by a process; a case that follows another starts with none."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
