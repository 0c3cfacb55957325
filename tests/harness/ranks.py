"""Two real processes over gloo that run all cases of test modules once, and what they need to be what they claim.

A test module names its cases in `CASES`, functions of the rank; `run_on_ranks` returns what each returned or raised.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from harness.forked import SECONDS, run_ranks

RANKS = 2


def run_on_ranks(module: str, folder: Path) -> list[dict]:
    """For each rank, by name of the case in `module`, what it returned, or the exception that it raised.

    The processes stay for the next module; where one of them ends, others come.
    """
    processes, queues = _pair()
    for queue in queues:
        queue.put((module, str(folder)))
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    try:
        while not all(path.exists() for path in paths):
            processes.join(timeout=0.1)
    except Exception:
        _pair.cache_clear()
        raise
    found = [torch.load(path, weights_only=False) for path in paths]
    if len(found[0]) < len(importlib.import_module(module).CASES):  # They are apart since.
        _pair.cache_clear()
        for process in processes.processes:
            process.terminate()
    return found


@functools.cache
def _pair():
    queues = [torch.multiprocessing.get_context("forkserver").SimpleQueue() for _ in range(RANKS)]
    return run_ranks(_work, queues, num_ranks=RANKS, join=False), queues


def result(found: list[dict], name: str) -> list:
    """Of one case on each rank. Raises what a rank has raised."""
    for told in found:
        if name not in told:
            raise RuntimeError(f"not reached: an earlier case ended the process ({list(told)[-1]})")
        if isinstance(told[name], Exception):
            raise told[name]
    return [told[name] for told in found]


def _work(rank: int, queues: list) -> None:
    """One of the processes: runs modules as they are asked for, until the tests end."""
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    while True:
        module, folder = queues[rank].get()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        os.chdir(folder)
        cases = importlib.import_module(module).CASES
        gc.freeze()  # as all ranks do, and what the cases have imported since
        found = _outcomes(cases, rank)
        torch.save(found, f"{rank}.part")
        os.replace(f"{rank}.part", f"{rank}.pt")
        faulthandler.cancel_dump_traceback_later()


def _outcomes(cases: dict, rank: int) -> dict:
    found: dict = {}
    for name, case in cases.items():
        try:
            found[name] = case(rank)
        except Exception as error:  # of one case, which its own test shows
            found[name] = error
            traceback.print_exc()
        failed = [None] * RANKS
        dist.all_gather_object(failed, isinstance(found[name], Exception))
        if len(set(failed)) > 1:
            break  # The ranks are apart, and would stay so.
    return found


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter]:
    """How often each of torch's collectives is called within the body, by whom also, C++ included; there at its end."""
    counts: Counter = Counter()
    with torch.autograd.profiler.profile() as profile:
        yield counts
    # As they were recorded: making torch's tree of events of them takes a hundred times as long as a step.
    names = [event.name() for event in profile.kineto_results.events()]
    counts.update(name.removeprefix("c10d::").strip("_") for name in names if name.startswith("c10d::"))


@contextlib.contextmanager
def failing_check(layers: Collection[int]) -> Iterator[None]:
    """The check of a model that is enabled in the body says of these layers that they have to run whole."""
    from memo_hf.layers.check import StackVerdict, Verdict, check_stack

    def check(stack):
        found = check_stack(stack)
        failed = Verdict(None, "made to fail")
        return StackVerdict(
            [failed if index in layers else verdict for index, verdict in enumerate(found.layers)], found.after_layers
        )

    with mock.patch("memo_hf.session.check_stack", check):
        yield


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
