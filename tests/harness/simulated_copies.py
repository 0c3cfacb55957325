"""Copies that run late, in random legal orders, over poisoned memory: what only a GPU does by itself, done on a CPU.

Used by the tests of the swap engine and of the layers in place of a real backend. It knows nothing of groups or
handles.

- Each direction is a queue. A copy runs when somebody waits for it, or at a random later call, never before its turn.
- What has not been copied yet reads as poison, and so does host memory that was given back.
- A copy whose device memory was dropped too early reads poison, or is noted in `faults` where it would have been
  written.
"""

from __future__ import annotations

import random
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memo_hf.swap.copy_backend import Copy
from memo_hf.swap.host_pool import HostPool

DEVICE_POISON = 0xFF  # NaN in every floating dtype, -1 as an integer
HOST_POISON = 0x7E  # 8.5e37 in float32
CANARY = 0xCA
GUARD = 64


class _Job:
    """What a queue knows of a copy: weak on the device side, so that dropping `Copy.buffer` frees it, as on a GPU."""

    def __init__(self, device_side, host, is_fetch):
        self.device_side, self.host, self.is_fetch, self.ran = device_side, host, is_fetch, False


class _SimulatedCopy(Copy):
    __slots__ = ("job",)

    def __init__(self, buffer, host, is_fetch):
        super().__init__(buffer)
        self.job = _Job(StorageWeakRef(buffer.untyped_storage()), host, is_fetch)


class SimulatedCopies:
    """A `CopyBackend` for CPU tensors. `eagerness` is the chance that a call lets one more queued copy run."""

    def __init__(self, seed: int = 0, eagerness: float = 0.3, copies_are_short: bool = False):
        self.copies_are_short = copies_are_short
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._offloads: deque[_Job] = deque()
        self._fetches: deque[_Job] = deque()
        self.faults: list[str] = []
        self.num_waits = 0
        self.closed = False

    def offload(self, source, target):
        self._run_some()
        target.fill_(HOST_POISON)
        copy = _SimulatedCopy(source, target, is_fetch=False)
        self._offloads.append(copy.job)
        return copy

    def fetch(self, source, target, after):
        self._run_some()
        # The stream waits for the offload. Between the two queues nothing else is promised.
        self._run_until(after.job)
        target.fill_(DEVICE_POISON)
        copy = _SimulatedCopy(target, source, is_fetch=True)
        self._fetches.append(copy.job)
        return copy

    def wait(self, copy, buffer=None):
        self.num_waits += 1
        self._run_some()
        self._run_until(copy.job)
        copy.buffer = None

    def finish(self, copy):
        self._run_until(copy.job)
        copy.buffer = None

    def done(self, copy):
        self._run_some()
        if copy.job.ran:
            copy.buffer = None
        return copy.job.ran

    def pin(self, buffer):
        return False

    def unpin(self, buffer):
        raise AssertionError("nothing was pinned")

    def close(self):
        while self._offloads or self._fetches:
            self._run_next(self._offloads or self._fetches)
        self.closed = True

    @property
    def num_queued(self) -> int:
        return len(self._offloads) + len(self._fetches)

    def _run_some(self):
        while self.num_queued and self._random.random() < self._eagerness:
            self._run_next(self._random.choice([queue for queue in (self._offloads, self._fetches) if queue]))

    def _run_until(self, job):
        while not job.ran:
            self._run_next(self._fetches if job.is_fetch else self._offloads)

    def _run_next(self, queue):
        job = queue.popleft()
        job.ran = True
        storage = torch.UntypedStorage._new_with_weak_ptr(job.device_side.cdata)
        if storage is None:
            if job.is_fetch:
                self.faults.append(f"a fetch of {job.host.numel()} bytes wrote to device memory that was given back")
            else:
                job.host.fill_(DEVICE_POISON)
            return
        device_side = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if job.is_fetch:
            device_side.copy_(job.host)
        else:
            job.host.copy_(device_side)


class GuardedPool(HostPool):
    """A host pool that checks a canary behind every block and poisons what is given back.

    Put it in the engine's place for `HostPool` (`monkeypatch.setattr("memo_hf.swap.engine.HostPool", GuardedPool)`).
    The canaries count as reserved memory, not as payload.
    """

    def take(self, nbytes):
        block = super().take(nbytes + GUARD)
        if block is not None:
            block.bytes()[nbytes:].fill_(CANARY)
            block.nbytes = nbytes
            self.payload_bytes -= GUARD
            self.peak_payload_bytes = max(self.peak_payload_bytes - GUARD, self.payload_bytes)
        return block

    def make_room(self, nbytes):
        super().make_room(nbytes + GUARD)

    def give_back(self, block):
        if block.slab.bytes is not None:
            nbytes, block.nbytes = block.nbytes, block.nbytes + GUARD
            memory = block.bytes()
            if not bool((memory[nbytes:] == CANARY).all()):
                raise AssertionError(f"the canary behind a host block of {nbytes} bytes was overwritten")
            memory.fill_(HOST_POISON)
            self.payload_bytes += GUARD
        super().give_back(block)


def settle(engine):
    """Wait until every offload is over, so that only host copies are left, and count what died."""
    for _, copy in list(engine._offloading):
        engine._backend.finish(copy)
    engine.stats  # noqa: B018 (reaps)
    for _, copies in list(engine._dying):
        for copy in copies:
            engine._backend.finish(copy)
    engine.stats  # noqa: B018
