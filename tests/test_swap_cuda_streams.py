"""The CUDA backend's waits, without CUDA: streams and events with vector clocks, and buffers that notice unordered use.

What this shows: that every two uses of one buffer, one of them a write, are ordered by the waits the backend makes, and
that each of those waits is needed. What it cannot show: that CUDA's streams, pinning and allocator behave as assumed.
"""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from memo_hf.errors import MemoError
from memo_hf.swap import SwapEngine
from memo_hf.swap.cuda_streams import CudaStreams


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.clock, self.ran, self.num_synchronized, self.is_timed = {}, False, 0, enable_timing

    def record(self, stream):
        self.clock = dict(stream.clock)

    def query(self):
        return self.ran

    def synchronize(self):
        self.ran = True
        self.num_synchronized += 1


class FakeStream:
    """`clock` maps each stream to how much of its work is known to be over before what comes next here."""

    def __init__(self, device):
        self.clock = {self: 0}
        self.log = []

    def step(self):
        self.clock[self] += 1
        return self.clock[self]

    def wait_event(self, event):
        self.log.append("wait_event")
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def wait_stream(self, stream):
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self):
        pass


class FakeCuda:
    """As much of `torch.cuda` as the backend uses."""

    Event = FakeEvent

    def __init__(self):
        self.device = torch.device("cuda", 0)
        self.current = FakeStream(self.device)
        self.register_error = 0
        self.registered = []

    def Stream(self, device):
        assert device == self.device
        return FakeStream(device)

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def cudart(self):
        return SimpleNamespace(
            cudaError=SimpleNamespace(success=0),
            cudaGetErrorString=lambda error: f"error {error}",
            cudaHostRegister=lambda address, size, flags: self.register_error or self.registered.append(address) or 0,
            cudaHostUnregister=self.registered.remove,
        )


class FakeBuffer:
    """Memory that notes a race when it is used in an order that no wait enforces."""

    def __init__(self, cuda, races):
        self._cuda, self._races = cuda, races
        self._write, self._reads = None, []
        self.recorded_streams = []

    def read(self):
        self._check([self._write], "read before it was written")
        self._reads.append((self._cuda.current, self._cuda.current.step()))

    def write(self):
        self._check([self._write, *self._reads], "written while in use")
        self._write, self._reads = (self._cuda.current, self._cuda.current.step()), []

    def copy_(self, source, non_blocking):
        assert non_blocking
        source.read()
        self.write()

    def record_stream(self, stream):
        self.recorded_streams.append(stream)

    def _check(self, uses, fault):
        clock = self._cuda.current.clock
        for stream, time in filter(None, uses):
            if clock.get(stream, 0) < time:
                self._races.append(fault)


def round_trip(cuda, backend, races):
    """Offloads a buffer, gives its memory to another tensor, fetches it into memory that was in use, and reads it."""
    device, host, target = (FakeBuffer(cuda, races) for _ in range(3))
    device.write()
    offload = backend.offload(device, host)
    target.write()
    backend.wait(offload)
    device.write()  # the memory's next owner
    fetch = backend.fetch(host, target, after=offload)
    backend.wait(fetch, target)
    target.read()
    target.write()  # and the next owner of this one
    return offload, fetch, target


def test_every_use_is_ordered():
    cuda, races = FakeCuda(), []
    offload, fetch, target = round_trip(cuda, CudaStreams(cuda.device, cuda), races)
    assert races == [] and offload.buffer is None and fetch.buffer is None and target.recorded_streams == []


@pytest.mark.parametrize("dropped", range(5))
def test_every_wait_is_needed(dropped, monkeypatch):
    """Not a test of the backend but of the waits: without any one of them, something races.

    The wait of a fetch for its offload is needed only where the compute stream has not waited for the offload itself.
    """
    cuda, races = FakeCuda(), []
    backend = CudaStreams(cuda.device, cuda)
    num_waits, wait_event = 0, FakeStream.wait_event

    def drop_one(stream, event):
        nonlocal num_waits
        num_waits += 1
        if num_waits != dropped + 1:
            wait_event(stream, event)

    monkeypatch.setattr(FakeStream, "wait_event", drop_one)
    round_trip(cuda, backend, races)
    assert num_waits == 5
    assert bool(races) == (dropped != 3)


@pytest.mark.parametrize("waits", [True, False])
def test_fetch_follows_its_offload(waits, monkeypatch):
    cuda, races = FakeCuda(), []
    backend = CudaStreams(cuda.device, cuda)
    device, host, target = (FakeBuffer(cuda, races) for _ in range(3))
    device.write()
    offload = backend.offload(device, host)
    if not waits:
        offload.event.clock = {}
    backend.fetch(host, target, after=offload)
    assert bool(races) != waits


def test_current_stream_is_looked_up_at_every_call():  # case 3
    cuda, races = FakeCuda(), []
    backend = CudaStreams(cuda.device, cuda)
    cuda.current = FakeStream(cuda.device)
    round_trip(cuda, backend, races)
    assert races == []


def test_stream_that_changes_between_put_and_get():  # cases 3 and 8
    cuda, races = FakeCuda(), []
    backend = CudaStreams(cuda.device, cuda)
    first, second = cuda.current, FakeStream(cuda.device)
    device, host, target = (FakeBuffer(cuda, races) for _ in range(3))
    device.write()
    offload = backend.offload(device, host)
    cuda.current = second
    backend.wait(offload)
    cuda.current = first
    device.write()  # its memory belongs to the first stream
    fetch = backend.fetch(host, target, after=offload)
    cuda.current = second
    backend.wait(fetch, target)
    target.read()
    assert races == [] and target.recorded_streams == [second]


def test_buffers_are_held_until_the_copy_cannot_touch_them():
    cuda, races = FakeCuda(), []
    backend = CudaStreams(cuda.device, cuda)
    device, host = FakeBuffer(cuda, races), FakeBuffer(cuda, races)
    copies = [backend.offload(device, host) for _ in range(3)]
    assert not backend.done(copies[0]) and copies[0].buffer is device
    copies[0].event.ran = True
    assert backend.done(copies[0]) and copies[0].buffer is None
    backend.wait(copies[1])
    assert copies[1].buffer is None and not backend.done(copies[1]) and copies[1].event.num_synchronized == 0
    backend.finish(copies[2])
    assert copies[2].buffer is None and copies[2].event.num_synchronized == 1


def test_engine_on_the_cuda_backend():
    """The engine's use of events that have not run yet: nothing is reused early, nothing blocks the host."""
    cuda = FakeCuda()
    engine = SwapEngine(torch.device("cpu"), 2**20, backend=CudaStreams(cuda.device, cuda))
    groups = [engine.open_group() for _ in range(3)]
    handles = [group.put(torch.full((100,), float(value))) for value, group in enumerate(groups)]
    events = [copy.event for _, copy in engine._offloading]
    engine.open_group()
    assert [handle._stored.offload.buffer is None for handle in handles] == [True, True, False]
    assert cuda.current.log == ["wait_event"] * 2
    with groups[2].during_work():
        pass
    assert cuda.current.log == ["wait_event"] * 2  # a chunk's time is too short to wait for a link
    groups[2].prefetch()
    assert handles[2]._stored.device is not None and handles[2]._stored.fetch is None  # it had not left yet
    groups[0].prefetch()
    fetch_event = handles[0]._stored.fetch.event
    assert [handle.get()[0].item() for handle in handles] == [0, 1, 2]
    assert engine.stats.prefetched_bytes == 800 and engine.stats.pinned
    del handles
    assert engine.stats.host_bytes == 1200
    for event in events:
        event.ran = True
    assert engine.stats.host_bytes == 800  # two blocks are still being read
    fetch_event.ran = True
    assert engine.stats.host_bytes == 400
    assert all(event.num_synchronized == 0 for event in (*events, fetch_event))
    engine.close()
    assert cuda.registered == []


def test_failing_pin_names_the_cause(monkeypatch):  # case 91
    cuda = FakeCuda()
    cuda.register_error = 2
    backend = CudaStreams(cuda.device, cuda)
    launched = []
    monkeypatch.setattr(
        "memo_hf.swap.cuda_streams.torch.zeros", lambda *args, **kwargs: launched.append(kwargs["device"])
    )
    with pytest.raises(MemoError, match="cudaHostRegister: error 2"):
        backend.pin(torch.empty(64, dtype=torch.uint8))
    assert launched == [cuda.device]


def test_import_leaves_cuda_alone():  # case 98
    script = "import torch, memo_hf.swap; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_round_trips_on_a_device():
    device = torch.device("cuda", torch.cuda.current_device())
    engine = SwapEngine(device, 2**28)
    for step in range(3):
        passes = []
        for layer in range(6):
            group = engine.open_group()
            tensors = [torch.randn(2**18, device=device) for _ in range(4)]
            passes.append((group, [(tensor.sum().item(), group.put(tensor)) for tensor in tensors]))
            del tensors
        for index in reversed(range(6)):
            group, saved = passes[index]
            if index:
                passes[index - 1][0].prefetch()
            assert all(handle.get().sum().item() == total for total, handle in saved)
            group.release()
        del passes, group, saved  # or their host memory is still in use when the next step begins
        if step == 0:
            made = engine.stats.host_allocations
    stats = engine.stats
    assert stats.pinned and stats.host_allocations == made and stats.swapped_bytes == 3 * 6 * 4 * 2**20
    engine.close()


def test_copies_are_timed_where_somebody_asks():
    cuda = FakeCuda()
    backend = CudaStreams(cuda.device, cuda)
    bytes_of = [torch.zeros(size, dtype=torch.uint8) for size in (64, 64, 64)]
    untimed = backend.offload(bytes_of[0], bytes_of[1])
    assert not untimed.event.is_timed
    backend.timings = timings = []
    offload = backend.offload(bytes_of[0], bytes_of[1])
    backend.fetch(bytes_of[1], bytes_of[2], after=offload)
    assert [(to_host, num_bytes) for to_host, num_bytes, _, _ in timings] == [(True, 64), (False, 64)]
    assert all(start.is_timed and end.is_timed for _, _, start, end in timings)
