"""`AllocatorMeter`: live and peak bytes of the tensors of one device, exact on the CPU too.

Called by the profiler, benchmarks and tests. Knows nothing of what is being measured.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from memo_hf.allocator import native


class _CpuCounts:
    """The counters of the CPU allocator in csrc/, which is installed while someone measures."""

    def start(self):
        native.load_cpu_library().memo_cpu_install()

    def stop(self):
        native.load_cpu_library().memo_cpu_uninstall()

    def _read(self) -> native.Statistics:
        statistics, library = native.Statistics(), native.load_cpu_library()
        library.memo_core_statistics(library.memo_cpu_core(), ctypes.byref(statistics))
        return statistics

    def live_bytes(self) -> int:
        return self._read().live_bytes

    def num_allocs(self) -> int:
        return self._read().num_allocs

    def take_peak(self) -> int:
        library = native.load_cpu_library()
        return library.memo_core_take_peak(library.memo_cpu_core())


class _CudaCounts:
    """torch's own statistics of one CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device

    def start(self):
        pass

    def stop(self):
        pass

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def num_allocs(self) -> int:
        return torch.cuda.memory_stats(self._device).get("allocation.all.allocated", 0)

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class _Gauge:
    """Shares one device's single peak counter among any number of meters, which may end in any order."""

    def __init__(self, counts):
        self.counts = counts
        self._lock = threading.Lock()
        self._peaks: dict[AllocatorMeter, int] = {}

    def _fold(self):
        peak = self.counts.take_peak()
        for meter, seen in self._peaks.items():
            self._peaks[meter] = max(seen, peak)

    def start(self, meter: AllocatorMeter):
        with self._lock:
            self.counts.start()
            self._fold()
            self._peaks[meter] = self.counts.live_bytes()

    def stop(self, meter: AllocatorMeter) -> int:
        with self._lock:
            self._fold()
            self.counts.stop()
            return self._peaks.pop(meter)

    def peak(self, meter: AllocatorMeter) -> int:
        with self._lock:
            self._fold()
            return self._peaks[meter]

    def reset(self, meter: AllocatorMeter):
        with self._lock:
            self._fold()
            self._peaks[meter] = self.counts.live_bytes()


_gauges: dict[torch.device, _Gauge] = {}
_gauges_lock = threading.Lock()


def _gauge(device: torch.device) -> _Gauge:
    with _gauges_lock:
        if device not in _gauges:
            _gauges[device] = _Gauge(_CpuCounts() if device.type == "cpu" else _CudaCounts(device))
        return _gauges[device]


class AllocatorMeter:
    """Measures the bytes of the tensors on one device while the `with` block runs.

        with AllocatorMeter() as meter:
            loss.backward()
        print(meter.peak_bytes - meter.start_bytes)

    On the CPU a counting allocator is put in place for the time of the outermost block, and the one that was there put
    back after it. It counts the bytes that are requested, without rounding. It knows the tensors that were made while
    some meter was on, and follows each to its end, wherever that falls; tensors made at other times it does not see.
    So the weights count if they were made under a meter, and do not if they were not; `start_bytes` is what counted
    when the block began. On CUDA the numbers are torch's
    own, of all tensors; measuring resets torch's peak statistics of that device.

    Meters nest, and may begin and end on different threads and in any order. A meter can be used again after it ended.

    Args:
        device: what to measure, "cpu" or a CUDA device.

    Raises:
        NativeLibraryError: on entering, where the C++ allocator is not built.
        ValueError: the device is neither.
    """

    def __init__(self, device: str | torch.device = "cpu"):
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"AllocatorMeter measures 'cpu' or 'cuda', not {str(device)!r}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._gauge = _gauge(device)
        self._active = False
        self._final = (0, 0, 0)
        self._first_alloc = 0
        self.start_bytes = 0

    def __enter__(self) -> AllocatorMeter:
        if self._active:
            raise RuntimeError("this AllocatorMeter is running already; make another one to nest")
        self._gauge.start(self)
        self._active = True
        self.start_bytes = self._gauge.counts.live_bytes()
        self._first_alloc = self._gauge.counts.num_allocs()
        return self

    def __exit__(self, *exc_info):
        live, allocs = self.live_bytes, self.num_allocs
        self._active = False
        self._final = (live, self._gauge.stop(self), allocs)

    @property
    def live_bytes(self) -> int:
        """Bytes of counted tensors that are alive now; after the block, those that were alive at its end."""
        return self._gauge.counts.live_bytes() if self._active else self._final[0]

    @property
    def peak_bytes(self) -> int:
        """The highest `live_bytes` since the block began or `reset_peak` was called, until its end."""
        return self._gauge.peak(self) if self._active else self._final[1]

    def peak_with(self, model: torch.nn.Module) -> int:
        """`peak_bytes` of a block that `model` was made before, with its parameters and buffers, which the meter does
        not see there on a CPU. Nor does it see weights that transformers has mapped from a file: load a model before
        the block. What else was there before, such as an optimizer's states, is left out.
        """
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors_of(model)}
        return self.peak_bytes - self.start_bytes + sum(held.values())

    @property
    def num_allocs(self) -> int:
        """How many tensor allocations, of at least one byte, there were since the block began, until its end."""
        return self._gauge.counts.num_allocs() - self._first_alloc if self._active else self._final[2]

    def reset_peak(self):
        """Lets `peak_bytes` start again from what is alive now. Other meters keep theirs."""
        if not self._active:
            raise RuntimeError("this AllocatorMeter is not running; reset_peak belongs inside its `with` block")
        self._gauge.reset(self)


def _tensors_of(model: torch.nn.Module):
    yield from model.parameters()
    yield from model.buffers()
