"""The swap engine: which storages leave the device, when they come back, and when memory may be used again.

Called by `layers` and `session`, and by the groups it makes (`group`). It must not know models, layers or how a copy is
made. All ordering rules are here:

- a storage is copied to the host once per group; its device memory is held until that copy is over (section 4.1 of the
  paper);
- at most `max_in_flight` groups hold device memory that is being offloaded: the paper's rounding buffers;
- that memory goes back at fixed points of the step, after a wait, and never as soon as a copy happens to be over: then
  every step has the same requests and frees in the same order, and its addresses can be planned;
- a host block is used again only when its last handle has died and every copy on it has run;
- a fetched buffer is used only after a wait for its copy, and dropped only after that wait or the end of the copy;
- handles may die at any time, on any thread and under any lock, so their death only appends to a deque.

An operator that saves a tensor and writes it afterwards without raising its version (RReLU's noise in training) cannot
be swapped: the copy starts at `put`, before the write (case 40).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from memo_hf.errors import ConfigError, MemoError
from memo_hf.swap.copy_backend import Copy, CopyBackend
from memo_hf.swap.cpu_threads import CpuThreads
from memo_hf.swap.cuda_streams import CudaStreams
from memo_hf.swap.group import Stored, SwapGroup
from memo_hf.swap.host_pool import Block, HostPool
from memo_hf.swap.storage import storage_bytes


@dataclass(frozen=True)
class SwapStats:
    """What an engine has moved and holds. Bytes are payload, that is bytes of storages, unless said otherwise."""

    swapped_bytes: int  # copied to the host since the last reset
    prefetched_bytes: int  # copied back since the last reset
    swapped_storages: int  # storages copied to the host since the last reset
    host_bytes: int  # on the host now
    peak_host_bytes: int  # the most on the host since the last reset
    host_reserved_bytes: int  # of the slabs, payload or not
    host_allocations: int  # slabs ever made
    pinned: bool  # whether all slabs are locked in memory


class SwapEngine:
    """Swaps storages between one device and host memory.

    Args:
        device: where the tensors live, "cpu" or "cuda".
        host_budget_bytes: upper bound of the host memory reserved.
        backend: makes the copies. None: a worker thread on "cpu", copy streams on "cuda".
        max_in_flight: how many groups may hold device memory that is being offloaded at once.
        tensor_types: what is swapped; all else stays on the device.

    Raises:
        MemoError: there is no backend for this device.
        ConfigError: `max_in_flight` below 1.
    """

    def __init__(
        self,
        device: torch.device,
        host_budget_bytes: int,
        *,
        backend: CopyBackend | None = None,
        max_in_flight: int = 2,
        tensor_types: tuple[type, ...] = (Tensor, torch.nn.Parameter),
    ):
        if max_in_flight < 1:
            raise ConfigError(
                f"max_in_flight is {max_in_flight}; at least one group must be able to hold device memory"
            )
        self.device = _with_index(torch.device(device))
        self._backend = backend or _backend_for(self.device)
        self._pool = HostPool(host_budget_bytes, self._backend.pin, self._backend.unpin)
        self._max_in_flight = max_in_flight
        self.tensor_types = tensor_types
        # Re-entrant, since a destructor that the garbage collector runs in here may use the engine.
        self._lock = threading.RLock()
        self._num_groups = 0
        self._offloading: deque[tuple[int, Copy]] = deque()  # group serial, copy; in order of submission
        self._retired: deque[tuple[Block | None, list[Copy]]] = deque()  # filled without the lock, by destructors
        self._dying: deque[tuple[Block | None, list[Copy]]] = deque()  # retired, seen under the lock
        self._swapped_bytes = self._prefetched_bytes = self._swapped_storages = 0
        self._shut_down = weakref.finalize(self, _shut_down, self._backend, self._pool)

    def open_group(self, *, keep: bool = False, label: str = "") -> SwapGroup:
        """A group for what one layer's forward saves.

        Waits until of the older groups only the last `max_in_flight - 1` are still being offloaded. One that keeps
        everything counts among these, since it holds device memory too.

        Args:
            keep: leave everything on the device.
            label: names the layer in errors.
        """
        with self._lock:
            self._require_open()
            self._reap()
            last_to_end = self._num_groups + 1 - self._max_in_flight
            self._let_go([copy for serial, copy in self._offloading if serial <= last_to_end])
            self._num_groups += 1
            return SwapGroup(self, self._num_groups, keep, label)

    @contextmanager
    def during_work(self):
        """Around work on a chunk of tokens: what is being offloaded as it begins leaves the device as it ends.

        Only where copies are short beside such work; elsewhere they have the time that `open_group` gives them.
        """
        with self._lock:
            copies = [copy for _, copy in self._offloading] if self._backend.copies_are_short else []
        yield
        if copies:
            with self._lock:
                self._require_open()
                self._let_go(copies)

    def reserve(self, nbytes: int) -> None:
        """Have host memory for `nbytes` ready, where the budget has it and having it ready takes time.

        Pinning takes several times longer than copying: between two layers the device would wait for it, and a step
        that is measured would be measured with it.
        """
        if self.device.type == "cuda":
            with self._lock:
                self._require_open()
                self._pool.reserve(nbytes)

    def let_go(self) -> None:
        """Wait for all that is being offloaded, and let its device memory go."""
        with self._lock:
            self._require_open()
            self._let_go([copy for _, copy in self._offloading])

    @property
    def stats(self) -> SwapStats:
        """Counters now. Can be read after `close`."""
        with self._lock:
            if self._shut_down.alive:
                self._reap()
            pool = self._pool
            return SwapStats(
                swapped_bytes=self._swapped_bytes,
                prefetched_bytes=self._prefetched_bytes,
                swapped_storages=self._swapped_storages,
                host_bytes=pool.payload_bytes,
                peak_host_bytes=pool.peak_payload_bytes,
                host_reserved_bytes=pool.reserved_bytes,
                host_allocations=pool.num_slabs_made,
                pinned=pool.pinned,
            )

    def reset_stats(self) -> None:
        """Set the traffic counters to 0 and the peak to what is on the host now."""
        with self._lock:
            self._require_open()
            self._reap()
            self._swapped_bytes = self._prefetched_bytes = self._swapped_storages = 0
            self._pool.peak_payload_bytes = self._pool.payload_bytes

    def time_copies(self, timings: list[tuple] | None) -> None:
        """From now on each copy appends to `timings`: whether to the host, bytes, start and end (`CopyBackend`)."""
        with self._lock:
            self._backend.timings = timings

    def close(self) -> None:
        """Let running copies end and give all host memory back, with what is on it. May be called twice."""
        with self._lock:
            self._shut_down()
            self._offloading.clear()
            self._dying.clear()
            self._retired.clear()

    def _require_open(self) -> None:
        if not self._shut_down.alive:
            raise MemoError("the swap engine is closed, and what it held is gone; make a new one")

    def _let_go(self, copies: list[Copy]) -> None:
        for copy in copies:
            self._backend.wait(copy)
        self._offloading = deque(item for item in self._offloading if item[1].buffer is not None)

    def _reap(self) -> None:
        """Take back the host blocks that nothing needs any more."""
        while self._retired:
            self._dying.append(self._retired.popleft())
        # In any order: handles often die last put first, while copies end first put first.
        for _ in range(len(self._dying)):
            block, copies = self._dying.popleft()
            if not all(self._backend.done(copy) for copy in copies):
                self._dying.append((block, copies))
            elif block is not None:
                self._pool.give_back(block)

    def _host_block(self, nbytes: int) -> Block:
        block = self._pool.take(nbytes)
        if block is None:
            # Blocks on their way back come before new memory, or timing would decide how much is reserved.
            self._reap()
            for _, copies in self._dying:
                for copy in copies:
                    self._backend.finish(copy)
            self._reap()
            block = self._pool.take(nbytes)
        if block is None:
            self._pool.make_room(nbytes)
            block = self._pool.take(nbytes)
        return block

    def _offload(self, tensor: Tensor, serial: int) -> Stored:
        """Start the copy of the whole storage of `tensor` to the host."""
        source = storage_bytes(tensor)
        block = self._host_block(source.numel())
        try:
            copy = self._backend.offload(source, block.bytes())
        except BaseException:
            self._pool.give_back(block)
            raise
        self._offloading.append((serial, copy))
        self._swapped_bytes += block.nbytes
        self._swapped_storages += 1
        return Stored(block, copy, self._retired)

    def _start_fetch(self, stored: Stored) -> None:
        """See to it that `stored.device` is there or on its way."""
        if stored.device is not None:
            return
        stored.device = stored.offload.buffer  # the original, until it is let go
        if stored.device is None:
            # Allocated on the compute stream, where it will be read and where its memory returns (case 8).
            target = torch.empty(stored.nbytes, dtype=torch.uint8, device=self.device)
            stored.fetch = self._backend.fetch(stored.block.bytes(), target, after=stored.offload)
            stored.device = target
            self._prefetched_bytes += stored.nbytes

    def _on_device(self, stored: Stored) -> Tensor:
        with self._lock:
            self._require_open()
            self._start_fetch(stored)
            buffer, fetch = stored.device, stored.fetch
        # Outside the lock: another thread may go on meanwhile.
        if fetch is not None:
            self._backend.wait(fetch, buffer)
        return buffer


def _backend_for(device: torch.device) -> CopyBackend:
    if device.type == "cpu":
        return CpuThreads()
    if device.type == "cuda":
        return CudaStreams(device)
    raise MemoError(f"swapping is not supported on device {device}; it is on 'cpu' and 'cuda'")


def _with_index(device: torch.device) -> torch.device:
    """As tensors report it, since devices are compared."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _shut_down(backend: CopyBackend, pool: HostPool) -> None:
    backend.close()
    pool.close()
