"""Real processes that start in a moment: forked from one that has imported what they need, and has run nothing.

Called by the harness of DeepSpeed and by tests that start several sets of ranks. What is imported costs seconds of
each process that starts with nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing.forkserver
import os
from collections.abc import Callable
from unittest import mock

import torch

IMPORTED = (
    "accelerate datasets deepspeed.runtime.sequence_parallel.ulysses_sp memo_hf.integrations.trainer peft "
    "tokenizers torch.distributed.fsdp transformers.models.llama.modeling_llama"
).split()


def run_forked(function: Callable, *args, num_ranks: int) -> None:
    """`function(rank, *args)` in a process for each of `num_ranks`; waits for all of them.

    Raises what `torch.multiprocessing` does of a process that fails or is killed, and ends the others.
    """
    _start_server()
    torch.multiprocessing.start_processes(function, args, nprocs=num_ranks, start_method="forkserver")


@functools.cache
def _start_server() -> None:
    found = [name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0])]
    multiprocessing.set_forkserver_preload(found)
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):  # as they are imported
        multiprocessing.forkserver.ensure_running()
