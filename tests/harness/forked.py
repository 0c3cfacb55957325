"""Ranks that start in a moment: real processes, forked from one that has imported what they need and has run nothing.

Called by the other harnesses, and by tests that start several sets of ranks. To import it all costs seconds of each
process that starts with nothing.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import multiprocessing.forkserver
import os
import socket
from collections.abc import Callable
from unittest import mock

import torch

SECONDS = 280  # that ranks have, a little less than a test: then all that they do is wait for each other
IMPORTED = (
    "accelerate datasets deepspeed.runtime.sequence_parallel.ulysses_sp memo_hf.integrations.trainer peft tokenizers "
    "torch.distributed.fsdp transformers.models.llama.modeling_llama"
).split()


def run_ranks(function: Callable, *args, num_ranks: int, join: bool = True):
    """`function(rank, *args)` in `num_ranks` processes, which have the environment that a launcher gives.

    Args:
        join: wait for their end, `SECONDS` at most. Else what `torch.multiprocessing` returns of them, which end with
            this process.

    Raises what `torch.multiprocessing` does where a process fails or is killed, and ends the others.
    """
    _start_server()
    return torch.multiprocessing.start_processes(
        _as_rank, (num_ranks, _free_port(), join, function, args), num_ranks, join, True, "forkserver"
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _as_rank(rank: int, num_ranks: int, port: int, limited: bool, function: Callable, args: tuple) -> None:
    os.environ |= dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="localhost", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # Trainer collects garbage at every end, and would go through all that was imported.
    if limited:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
    function(rank, *args)


@functools.cache
def _start_server() -> None:
    found = [name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0])]
    multiprocessing.set_forkserver_preload(found)
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):  # as they are imported
        multiprocessing.forkserver.ensure_running()
