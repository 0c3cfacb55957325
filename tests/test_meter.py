"""`AllocatorMeter`: exact bytes, nesting, blocks that outlive it, threads, and what is put back."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from memo_hf.allocator import native
from memo_hf.allocator.meter import AllocatorMeter

MIB = 2**20


def tensor(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture
def base():
    """Bytes that earlier tests metered and still hold."""
    gc.collect()
    with AllocatorMeter() as meter:
        return meter.start_bytes


def test_counts_bytes_exactly(base):
    with AllocatorMeter() as meter:
        assert (meter.start_bytes, meter.live_bytes, meter.peak_bytes, meter.num_allocs) == (base, base, base, 0)
        kept = tensor(3 * MIB + 1)
        gone = tensor(2 * MIB)
        full = base + 5 * MIB + 1
        assert (meter.live_bytes, meter.peak_bytes, meter.num_allocs) == (full, full, 2)
        del gone
        assert (meter.live_bytes, meter.peak_bytes) == (full - 2 * MIB, full)
        meter.reset_peak()
        assert meter.peak_bytes == full - 2 * MIB
        tensor(7)
        assert (meter.live_bytes, meter.peak_bytes, meter.num_allocs) == (full - 2 * MIB, full - 2 * MIB + 7, 3)
    tensor(9 * MIB)
    assert (meter.live_bytes, meter.peak_bytes, meter.num_allocs) == (full - 2 * MIB, full - 2 * MIB + 7, 3)
    del kept


def test_views_and_empty_tensors_cost_nothing(base):
    with AllocatorMeter() as meter:
        whole = torch.zeros(1000)
        views = [whole[10:], whole.view(10, 100).t(), tensor(0), torch.empty(0, 5)]
        assert (meter.live_bytes - base, meter.num_allocs) == (4000, 1)
    del views, whole


def test_backward_on_the_autograd_thread_is_counted(base):
    weight = torch.randn(64, 64, requires_grad=True)
    with AllocatorMeter() as meter:
        (weight * weight).sum().backward()
        assert meter.live_bytes == base + weight.grad.nbytes
        assert meter.peak_bytes >= base + 2 * weight.grad.nbytes
        weight.grad = None
        assert meter.live_bytes == base


def test_blocks_live_across_on_and_off(base):
    before = tensor(MIB)
    before.fill_(1)
    with AllocatorMeter() as first:
        inside = tensor(2 * MIB).fill_(2)
        del before  # made before: not counted, freed by torch's own deleter
        assert first.live_bytes == base + 2 * MIB
    assert (inside == 2).all()
    with AllocatorMeter() as second:
        assert (second.live_bytes, second.peak_bytes) == (base + 2 * MIB, base + 2 * MIB)
        del inside
        assert (second.live_bytes, second.peak_bytes) == (base, base + 2 * MIB)
        late = tensor(MIB)
    del late  # freed while no meter is on, and counted all the same
    with AllocatorMeter() as third:
        assert third.live_bytes == base


def test_meters_nest_and_end_in_any_order(base):
    outer, inner = AllocatorMeter(), AllocatorMeter()
    outer.__enter__()
    tensor(10)
    inner.__enter__()
    tensor(5)
    outer.__exit__(None, None, None)
    tensor(20)
    inner.__exit__(None, None, None)
    assert (outer.peak_bytes, inner.peak_bytes) == (base + 10, base + 20)
    with outer:
        with inner:
            tensor(30)
        inner_peak = inner.peak_bytes
        tensor(8)
        outer.reset_peak()
        tensor(1)
        assert outer.peak_bytes == base + 1
    assert inner_peak == inner.peak_bytes == base + 30


def test_an_exception_ends_the_meter(base):
    meter = AllocatorMeter()
    with pytest.raises(KeyError), meter:
        tensor(100)
        raise KeyError
    assert meter.peak_bytes == base + 100
    with meter:  # may be used again
        assert meter.peak_bytes == base


def test_misuse_is_refused():
    meter = AllocatorMeter()
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        meter.reset_peak()
    with meter, pytest.raises(RuntimeError, match="running already"):
        meter.__enter__()
    with pytest.raises(ValueError, match="'meta'"):
        AllocatorMeter("meta")


def test_off_puts_back_what_was_there():
    """Torch's own allocator serves again: its blocks do not change the counts."""
    library = native.load_cpu_library()

    def count():
        statistics = native.Statistics()
        library.memo_core_statistics(library.memo_cpu_core(), statistics)
        return statistics.num_allocs

    with AllocatorMeter():
        pass
    before = count()
    kept = tensor(64)
    assert count() == before
    library.memo_cpu_uninstall()  # one too many changes nothing
    with AllocatorMeter() as meter:
        tensor(64)
        assert meter.num_allocs == 1
    del kept


def test_threads_lose_no_count(base):
    def work():
        for _ in range(300):
            held = [tensor(size) for size in (1, 1000, 70_000)]
            del held

    with AllocatorMeter() as meter:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (meter.live_bytes, meter.num_allocs) == (base, 4 * 300 * 3)
        assert 71_001 <= meter.peak_bytes - base <= 4 * 71_001


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_torch_features_that_look_at_the_allocator():
    with AllocatorMeter() as meter:
        before = meter.live_bytes
        whole = torch.arange(1000.0)
        lazy = torch._lazy_clone(whole)  # copy-on-write wants a simple data pointer
        assert meter.live_bytes - before == whole.nbytes
        lazy += 1
        assert meter.live_bytes - before == 2 * whole.nbytes and whole[1] == 1 and lazy[1] == 2
        grown = torch.empty(10).resize_(2000)
        assert meter.live_bytes - before == 4 * whole.nbytes
        assert whole.data_ptr() % 64 == lazy.data_ptr() % 64 == grown.data_ptr() % 64 == 0
        with pytest.raises(RuntimeError, match="can't allocate memory"):  # accelerate looks for these words
            tensor(2**62)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            made = torch.ones(5000)
        assert any(event.cpu_memory_usage >= made.nbytes for event in profile.events())
    del whole, lazy, grown, made


def test_a_forked_child_can_allocate():
    """The lock may be held by another thread at the fork, as when a data loader starts its workers."""
    code = """
import os, signal, threading, torch
from memo_hf.allocator.meter import AllocatorMeter
stop, warm = False, threading.Event()
def work():
    while not stop:
        torch.empty(100)
        warm.set()  # a fork during torch's own first-time set-up hangs with any allocator
with AllocatorMeter():
    thread = threading.Thread(target=work, daemon=True); thread.start()
    warm.wait()
    for _ in range(100):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.empty(100)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop = True
    thread.join()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=200)


@pytest.mark.parametrize(
    "replaced, message",
    [
        ({"memo_abi_version": "7"}, "interface number 7"),
        ({"memo_torch_version": '"1.13.0"'}, "was built with torch 1.13.0"),
    ],
)
def test_a_library_of_another_release_is_refused(tmp_path, replaced, message):
    answers = {"memo_abi_version": str(native.ABI_VERSION), "memo_torch_version": f'"{torch.__version__}"'} | replaced
    source, path = tmp_path / "old.c", tmp_path / "libmemo_cpu.so"
    source.write_text(
        "\n".join(f"const void *{name}(void) {{ return (void *){value}; }}" for name, value in answers.items())
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(native.NativeLibraryError, match=message) as error:
        native.load_cpu_library(path)
    assert "pip install --no-build-isolation" in str(error.value)


def test_a_missing_or_broken_library_says_how_to_build_it(tmp_path):
    with pytest.raises(native.NativeLibraryError, match="not built.*pip install --no-build-isolation"):
        native.load_cpu_library(tmp_path / "libmemo_cpu.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF, cut short")
    with pytest.raises(native.NativeLibraryError, match="cannot be loaded.*pip install --no-build-isolation"):
        native.load_cpu_library(broken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_reads_torchs_own_statistics():
    with AllocatorMeter("cuda") as meter:
        before = meter.live_bytes
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with AllocatorMeter("cuda") as inner:
            torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        assert meter.live_bytes - before == MIB
    assert meter.peak_bytes == inner.peak_bytes == before + 3 * MIB
    del kept
