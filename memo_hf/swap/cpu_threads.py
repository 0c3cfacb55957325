"""Copies on a CPU: one worker thread takes them in order, so that they overlap with the computing threads.

Made by `engine` for device "cpu". It must not know groups or handles. The worker copies with `ctypes.memmove`, which
releases the GIL and runs in this one thread: a `Tensor.copy_` would start a second OpenMP team that fights the
computing one for cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from queue import SimpleQueue

from torch import Tensor

from memo_hf.errors import MemoError
from memo_hf.swap.copy_backend import Copy


class _ThreadCopy(Copy):
    __slots__ = ("finished",)

    def __init__(self, buffer: Tensor):
        super().__init__(buffer)
        self.finished = threading.Event()


class _Worker(threading.Thread):
    """Runs jobs (copy, source, target, timings) until it gets None. Holds no backend: it keeps nothing alive."""

    def __init__(self):
        super().__init__(name="memo-hf-copies", daemon=True)
        # SimpleQueue.put is safe in destructors and signal handlers, Queue.put is not.
        self.jobs: SimpleQueue = SimpleQueue()
        self.failure: Exception | None = None

    def run(self):
        while (job := self.jobs.get()) is not None:
            copy, source, target, timings = job
            start = time.perf_counter()
            try:
                # After a failure nothing is copied: what was to be read is not there. Waiters are still let go.
                if self.failure is None:
                    copy_bytes(source, target)
            except Exception as failure:  # of any kind: it is raised where somebody waits
                self.failure = failure
            if timings is not None:
                timings.append((copy.buffer is source, source.numel(), start, time.perf_counter()))
            # These references go before the copy counts as finished: who lets go of its buffer then frees the memory.
            del job, source, target, timings
            copy.finished.set()
            del copy


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy one flat uint8 CPU tensor to another. Raises ValueError where their lengths differ."""
    if source.numel() != target.numel():
        raise ValueError(f"copy of {source.numel()} bytes into a buffer of {target.numel()}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


class CpuThreads:
    """`CopyBackend` for the CPU. One queue for both directions, so a fetch always follows the offload of its block."""

    copies_are_short = True  # within one memory

    def __init__(self):
        self.timings: list[tuple] | None = None
        self._worker, self._process = _Worker(), os.getpid()
        self._worker.start()

    def offload(self, source: Tensor, target: Tensor) -> Copy:
        return self._submit(source, target, device_side=source)

    def fetch(self, source: Tensor, target: Tensor, after: Copy) -> Copy:
        return self._submit(source, target, device_side=target)

    def wait(self, copy: Copy, buffer: Tensor | None = None) -> None:
        copy.finished.wait()
        copy.buffer = None
        self._raise_failure()

    def finish(self, copy: Copy) -> None:
        self.wait(copy)

    def done(self, copy: Copy) -> bool:
        done = copy.finished.is_set()
        if done:
            copy.buffer = None
        return done

    def pin(self, buffer: Tensor) -> bool:
        return False

    def unpin(self, buffer: Tensor) -> None:
        pass

    def close(self) -> None:
        self._worker.jobs.put(None)
        # The garbage collector may end an engine on the worker itself, which cannot join itself and needs no joining.
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def _submit(self, source: Tensor, target: Tensor, device_side: Tensor) -> Copy:
        self._raise_failure()
        if os.getpid() != self._process:
            raise MemoError(
                "the process was forked while memo_hf was enabled, and its copy thread stayed in the parent. Call "
                "memo_hf.disable(model) and enable it in the child, or start the child with 'spawn'"
            )
        copy = _ThreadCopy(device_side)
        self._worker.jobs.put((copy, source, target, self.timings))
        return copy

    def _raise_failure(self) -> None:
        failure = self._worker.failure
        if failure is not None:
            raise MemoError(
                f"the copy thread of the swap engine failed: {failure!r}. Activations of this step are lost; close the "
                "engine and start the step again with a new one"
            ) from failure
