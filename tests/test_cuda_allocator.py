"""The CUDA allocator as torch calls it, through ctypes, on a stand-in CUDA runtime. No GPU takes part."""

import ctypes
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size

from memo_hf.allocator import cuda, native
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.allocator.planned import PlannedAllocator
from memo_hf.errors import MemoError

CSRC = Path(__file__).resolve().parents[1] / "csrc"
KIB = 2**10
PLENTY = 2**40
MAIN, SIDE = 16, 32  # streams; any numbers


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The stand-in runtime, and the library opened on it: a copy, so that this process may also have the real one."""
    folder = tmp_path_factory.mktemp("cuda")
    path = folder / "stand_in_runtime.so"
    source = CSRC / "tests" / "fake_cudart.cpp"
    subprocess.run(["g++", "-std=c++20", "-O1", "-fPIC", "-shared", source, "-o", path], check=True)
    library_path = folder / "libmemo_cuda.so"
    shutil.copy(native.CUDA_LIBRARY, library_path)
    runtime = ctypes.CDLL(str(path))
    runtime.fake_configure.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    for name in ("fake_fill", "fake_expect"):
        getattr(runtime, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    runtime.fake_order.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for name in ("fake_count", "fake_corrupted", "fake_misuse"):
        getattr(runtime, name).restype = ctypes.c_long
    return runtime, native.load_cuda_library(library_path, path)


class Torch:
    """What torch does around a pluggable allocator, and a training that uses it."""

    def __init__(self, library, runtime, device=0):
        self.library, self.runtime, self.device = library, runtime, device
        self.blocks = {}  # torch's table: by address
        self.written = {}

    def malloc(self, num_bytes, stream=MAIN):
        error = ctypes.c_char_p()
        address = self.library.memo_cuda_try_malloc(num_bytes, self.device, stream, ctypes.byref(error))
        if error.value is not None:
            raise torch.OutOfMemoryError(error.value.decode())
        if address is None:
            return None
        assert address not in self.blocks, "two live tensors at one address"
        assert address % 512 == 0
        for other, (size, _) in self.blocks.items():
            assert address + num_bytes <= other or other + size <= address, "two live tensors overlap"
        self.blocks[address] = (num_bytes, stream)
        self.written[address] = value = random.randrange(256)
        self.runtime.fake_fill(stream, address, num_bytes, value)
        return address

    def read(self, address, stream):
        """A kernel or copy on this stream reads the block."""
        num_bytes, own = self.blocks[address]
        if stream != own:
            self.runtime.fake_order(stream, own)
            self.library.memo_cuda_record_stream(address, stream)
        self.runtime.fake_expect(stream, address, num_bytes, self.written[address])

    def free(self, address):
        num_bytes, stream = self.blocks.pop(address)
        self.library.memo_cuda_free(address, num_bytes, self.device, stream)


@pytest.fixture
def fake_torch(stand_in, monkeypatch):
    """torch with the library in charge of a fresh device."""
    runtime, library = stand_in
    fake_torch.device = getattr(fake_torch, "device", -1) + 1
    monkeypatch.setattr(cuda, "_installed", library)
    runtime.fake_configure(PLENTY, 0, 0, 0)
    corrupted = runtime.fake_corrupted()
    yield Torch(library, runtime, fake_torch.device)
    library.memo_core_clear_plans(library.memo_cuda_core(fake_torch.device))
    library.memo_cuda_empty_cache()
    assert runtime.fake_misuse() == 0 and runtime.fake_corrupted() == corrupted


def training_step(torch_, allocator, jitter=lambda: 0):
    """Forward that offloads on the side stream, backward, and gradients that live to the end."""
    allocator.begin_step("step")
    saved, gradients = [], []
    for layer in range(4):
        allocator.mark(f"forward {layer}")
        hidden, scratch = torch_.malloc(8 * KIB + layer), torch_.malloc(3000 + jitter())
        torch_.read(hidden, SIDE)  # a copy to the host
        torch_.free(scratch)
        saved.append((layer, torch_.malloc(2 * KIB)))
        torch_.free(hidden)
    for layer, activation in reversed(saved):
        allocator.mark(f"backward {layer}")
        fetched = torch_.malloc(8 * KIB, SIDE)
        torch_.read(fetched, MAIN)
        scratch = torch_.malloc(5000)
        gradients.append(torch_.malloc(1 * KIB))
        torch_.read(activation, MAIN)
        for one in (scratch, activation, fetched):
            torch_.free(one)
    allocator.mark("optimizer")
    for gradient in gradients:
        torch_.free(gradient)


def test_a_training_is_recorded_placed_and_served(fake_torch):
    lines = []
    allocator = PlannedAllocator(torch.device("cuda", fake_torch.device), "stand-in", report=lines.append)
    for _ in range(2):
        training_step(fake_torch, allocator)
    allocator.end_step()
    assert allocator.finish_planning(60)
    mallocs = fake_torch.runtime.fake_count(2)
    for _ in range(5):
        training_step(fake_torch, allocator)
        fake_torch.runtime.cudaDeviceSynchronize()
    plan = allocator.plan
    allocator.end_step()
    stats = allocator.stats
    assert (stats.num_planned, stats.num_missed, stats.num_conflicts) == (5 * 24, 0, 0), lines
    assert fake_torch.runtime.fake_count(2) == mallocs, "a planned step asks CUDA for nothing"
    held = native.Held()
    fake_torch.library.memo_cuda_held(fake_torch.device, ctypes.byref(held))
    assert held.bytes == stats.arena_bytes + 512, "what the steps before the plan left in CUDA's pool went back"
    ranges = {}
    for request in plan.requests:
        low, high = ranges.get(request.stream, (2**60, 0))
        ranges[request.stream] = (min(low, request.offset), max(high, request.offset + request.num_bytes))
    (first, second) = sorted(ranges.values())
    assert first[1] <= second[0], "memory of one stream is not given to another"
    # One unusual step costs what is unusual, and no more.
    training_step(fake_torch, allocator, jitter=lambda: random.choice([0, 0, 512]))
    training_step(fake_torch, allocator)
    allocator.end_step()
    after = allocator.stats
    assert after.num_missed <= 4 and after.num_planned >= stats.num_planned + 24 + 20
    # case 104: the plan goes before the tensors.
    allocator.begin_step("step")
    allocator.mark("forward 0")
    kept = fake_torch.malloc(8 * KIB)
    assert allocator.stats.planned_live_bytes == 8 * KIB
    allocator.close()
    fake_torch.free(kept)


def test_out_of_memory_is_what_accelerate_looks_for(fake_torch):
    """# case 100: the message, raised as the C++ raises it, makes accelerate try a smaller batch."""
    fake_torch.runtime.fake_configure(1000 * KIB, 0, 0, 0)
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        fake_torch.free(fake_torch.malloc(batch_size * 300 * KIB))
        return batch_size

    assert train() == 3 and tried[0] == 8 and tried[-2:] == [4, 3]
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 2\.93 MiB on device"):
        fake_torch.malloc(3000 * KIB)


def test_zero_bytes(fake_torch):
    assert fake_torch.malloc(0) is None
    fake_torch.library.memo_cuda_free(None, 0, fake_torch.device, MAIN)


@pytest.fixture
def installed(fake_torch, monkeypatch):
    """`cuda.install()` against a torch.cuda that notes what it is given."""
    noted = {}

    class Hooks:
        def set_record_stream_fn(self, address):
            noted["record_stream"] = address

        def set_reset_fn(self, address):
            noted["empty_cache"] = address

    class Pluggable:
        def __init__(self, path, malloc, free):
            noted["functions"] = [getattr(ctypes.CDLL(path), name) for name in (malloc, free)]

        def allocator(self):
            return Hooks()

    monkeypatch.setattr(cuda, "_installed", None)
    monkeypatch.setattr(cuda, "_allocator", None)
    monkeypatch.setattr(native, "load_cuda_library", lambda: fake_torch.library)
    for name in ("memory_stats_as_nested_dict", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda.memory, name, getattr(torch.cuda.memory, name))
        if hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "change_current_allocator", lambda made: noted.update(current=made), raising=False
    )
    return noted


def test_install_gives_torch_every_function(installed, fake_torch):
    cuda.install()
    cuda.install()
    assert len(installed["functions"]) == 2 and "current" in installed
    for name in ("record_stream", "empty_cache"):
        function = getattr(fake_torch.library, f"memo_cuda_{name}")
        assert installed[name] == ctypes.cast(function, ctypes.c_void_p).value
    assert cuda.installed_library() is fake_torch.library


def test_install_too_late_names_the_line_to_move(installed, monkeypatch):
    """# case 98"""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(MemoError, match=r"Move the line memo_hf\.allocator\.cuda\.install\(\) up, before the first"):
        cuda.install()
    assert "current" not in installed
    with pytest.raises(MemoError, match="before CUDA is first used"):
        cuda.installed_library()


def test_install_behind_bitsandbytes_names_the_imports(installed, monkeypatch):
    """# case 98: it is peft, or transformers' Trainer, that imports it, and it that uses CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    with pytest.raises(MemoError, match=r"^bitsandbytes, .* before importing peft or transformers\.Trainer"):
        cuda.install()
    assert "current" not in installed


def test_install_says_that_expandable_segments_have_no_effect(installed, monkeypatch):
    """# case 106"""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments : True")
    with pytest.warns(UserWarning, match="has no effect with memo_hf's planned allocator"):
        cuda.install()


def test_torchs_statistics_are_answered(installed, fake_torch, monkeypatch):
    """# case 99: torch's own raise under a pluggable allocator, and Trainer, accelerate and DeepSpeed call them."""
    assert torch.cuda.memory_allocated() == 0  # CUDA not used yet
    cuda.install()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake_torch.device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake_torch.device, raising=False)
    kept, gone = fake_torch.malloc(5000), fake_torch.malloc(3000)
    fake_torch.free(gone)
    device = torch.device("cuda", fake_torch.device)
    # Reserved is what CUDA's pool holds: blocks of whole 512 bytes, and those that are freed.
    assert (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) == (5000, 5120 + 3072)
    assert (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) == (8000, 5120 + 3072)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_accumulated_memory_stats(device)
    assert (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) == (5000, 5120 + 3072)
    fake_torch.library.memo_cuda_empty_cache()
    assert (torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)) == (5120, 5120 + 3072)
    torch.cuda.reset_peak_memory_stats(device)
    assert torch.cuda.max_memory_reserved(device) == 5120
    stats = torch.cuda.memory_stats(device)
    assert (stats["allocation.all.allocated"], stats["allocation.all.current"], stats["num_ooms"]) == (2, 1, 0)
    assert stats["allocated_bytes.all.freed"] == 3000
    assert "5000 B" in torch.cuda.memory_summary(device)
    with AllocatorMeter(device) as meter:
        fake_torch.free(fake_torch.malloc(700))
        assert (meter.start_bytes, meter.peak_bytes, meter.num_allocs) == (5000, 5700, 1)
    fake_torch.free(kept)


def test_without_a_cuda_runtime_the_error_says_so():
    if torch.version.cuda is not None:
        pytest.skip("this torch has a CUDA runtime")
    with pytest.raises(native.NativeLibraryError, match="torch has loaded no CUDA runtime"):
        native.load_cuda_library()
    with pytest.raises(native.NativeLibraryError, match="cannot be used: .*/no/such/runtime"):
        native.load_cuda_library(native.CUDA_LIBRARY, Path("/no/such/runtime.so"))
