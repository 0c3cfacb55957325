"""Copies on CUDA: one stream for each direction, ordered against the compute stream by events.

Made by `engine` for device "cuda". It must not know groups or handles. Nothing here runs, or touches CUDA, at import.

The compute stream is looked up at every call and outside `with cuda.stream(...)`: the user may change it at any time,
and inside such a block it would be the copy stream itself, so that a wait would wait for nothing (cases 3 and 7).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from memo_hf.errors import MemoError
from memo_hf.swap.copy_backend import Copy


class _StreamCopy(Copy):
    """`stream` is the compute stream that submitted the copy, and to which its device memory belongs."""

    __slots__ = ("event", "stream")

    def __init__(self, buffer: Tensor, event, stream):
        super().__init__(buffer)
        self.event, self.stream = event, stream


class CudaStreams:
    """`CopyBackend` for one CUDA device.

    Args:
        device: with an index.
        cuda: the module that makes streams and events, `torch.cuda`; a test passes a recorder.
    """

    copies_are_short = False  # a link is slower than a chunk: they get a layer's time

    def __init__(self, device: torch.device, cuda=torch.cuda):
        self._device, self._cuda = device, cuda
        self.timings: list[tuple] | None = None
        self._offload_stream = cuda.Stream(device)
        self._fetch_stream = cuda.Stream(device)

    def offload(self, source: Tensor, target: Tensor) -> Copy:
        compute = self._cuda.current_stream(self._device)
        # Hazard: the kernel that writes `source` may still be queued.
        self._offload_stream.wait_stream(compute)
        return self._copy(source, target, source, self._offload_stream, compute)

    def fetch(self, source: Tensor, target: Tensor, after: Copy) -> Copy:
        compute = self._cuda.current_stream(self._device)
        # Hazard: `target` comes from the compute stream, where kernels on its last owner may still be queued.
        self._fetch_stream.wait_stream(compute)
        # Hazard: the offload that fills `source` may still be under way on the other copy stream.
        self._fetch_stream.wait_event(after.event)
        return self._copy(source, target, target, self._fetch_stream, compute)

    def wait(self, copy: Copy, buffer: Tensor | None = None) -> None:
        compute = self._cuda.current_stream(self._device)
        # Hazard: what the compute stream does next reads a fetched buffer, or is given the memory of an offloaded one.
        compute.wait_event(copy.event)
        if compute != copy.stream:
            # Hazard: the memory goes back to the stream that it came from, which has not waited.
            copy.stream.wait_event(copy.event)
            if buffer is not None:
                # Hazard: this stream reads memory that the allocator may hand out again in the order of the other.
                buffer.record_stream(compute)
        copy.buffer = None

    def finish(self, copy: Copy) -> None:
        copy.event.synchronize()
        copy.buffer = None

    def done(self, copy: Copy) -> bool:
        done = copy.event.query()
        if done:
            copy.buffer = None
        return done

    def pin(self, buffer: Tensor) -> bool:
        runtime = self._cuda.cudart()
        # Its pages are made first, by all threads: registering would make them one by one, 4 times slower in all.
        buffer.zero_()
        error = runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if error == runtime.cudaError.success:
            return True
        # The runtime keeps the code of a failed call and the next kernel launch reports it as its own: let one do so.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        raise MemoError(f"cudaHostRegister: {runtime.cudaGetErrorString(error)}")

    def unpin(self, buffer: Tensor) -> None:
        self._cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def close(self) -> None:
        # After a device fault synchronizing raises: then nothing runs any more, and that is all that is asked here.
        with contextlib.suppress(RuntimeError):
            self._offload_stream.synchronize()
            self._fetch_stream.synchronize()

    def _copy(self, source: Tensor, target: Tensor, device_side: Tensor, stream, compute) -> Copy:
        is_timed = {} if self.timings is None else {"enable_timing": True}
        with self._cuda.stream(stream):
            if is_timed:
                start = self._cuda.Event(**is_timed)
                start.record(stream)
            target.copy_(source, non_blocking=True)
            event = self._cuda.Event(**is_timed)
            event.record(stream)
        if is_timed:
            self.timings.append((device_side is source, source.numel(), start, event))
        return _StreamCopy(device_side, event, compute)
