"""The swap engine on the CPU backend: values, identity, lifetimes, counters. Orders are in test_swap_races.py."""

import gc
import threading
import weakref

import pytest
import torch

from memo_hf.errors import ConfigError, HostMemoryError, MemoError
from memo_hf.swap import SwapEngine
from tests.harness.simulated_copies import GuardedPool, settle

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("memo_hf.swap.engine.HostPool", GuardedPool)
    engine = SwapEngine(CPU, 64 * MIB)
    yield engine
    engine.close()


def ramp(*size, dtype=torch.float32):
    count = torch.Size(size).numel()
    return (torch.arange(count) % 2 == 0 if dtype == torch.bool else torch.arange(count).to(dtype)).reshape(size)


VIEWS = {
    "whole": lambda: ramp(6, 8),
    "offset": lambda: ramp(6, 8)[1:],
    "offset int64": lambda: ramp(9, dtype=torch.int64)[1:],  # case 4
    "column": lambda: ramp(6, 8)[:, 1:7],
    "transpose": lambda: ramp(6, 8).t(),
    "channels last": lambda: ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expand": lambda: ramp(6, 1).expand(6, 8),
    "expand of a part": lambda: ramp(60, 8)[3:5, 2:3].expand(2, 7),
    "part": lambda: ramp(60, 8)[3:5],
    "part of columns": lambda: ramp(60, 8)[:, 5:7],
    "part, transposed": lambda: ramp(60, 8)[4:6].t(),
    "windows": lambda: ramp(10).unfold(0, 4, 1),
    "0-d": lambda: torch.tensor(3.5),
    "0-d part": lambda: ramp(6, 8)[2, 3],
    "empty": lambda: torch.empty(0),
    "empty of a large one": lambda: ramp(6, 8)[6:],
    "bool": lambda: ramp(5, 3, dtype=torch.bool),
    "bf16": lambda: ramp(7, dtype=torch.bfloat16),
    "complex": lambda: torch.complex(ramp(4), ramp(4)),
    "conjugate": lambda: torch.complex(ramp(4), ramp(4)).conj(),
    "NaN": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_as_they_were(engine, name, keep, settled):  # case 35
    tensor = VIEWS[name]()
    expected = tensor.clone()
    group = engine.open_group(keep=keep)
    handle = group.put(tensor)
    group.seal()
    stride, is_part = tensor.stride(), "part" in name
    del tensor
    if settled:
        settle(engine)
    got = handle.get()
    assert got.dtype == expected.dtype and got.size() == expected.size() and not got.requires_grad
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got.stride() == stride or not got.numel() or (is_part and not keep)


def test_offset_of_a_view_is_kept(engine):
    tensor = ramp(6, 8)
    handle = engine.open_group().put(tensor[2:])
    assert handle.get().storage_offset() == 16
    assert handle.nbytes == 6 * 8 * 4


def test_views_of_one_storage_move_once(engine):
    tensor = ramp(64, 64)
    group = engine.open_group()
    handles = [
        group.put(view) for view in (tensor, tensor.t(), tensor[1:], tensor[3], tensor.view(-1), tensor.detach())
    ]
    assert engine.stats.swapped_storages == 1 and engine.stats.swapped_bytes == 64 * 64 * 4
    del tensor
    settle(engine)
    storages = {handle.get().untyped_storage().data_ptr() for handle in handles}
    assert len(storages) == 1 and engine.stats.prefetched_bytes == 64 * 64 * 4


def test_each_group_moves_its_own_copy(engine):  # case 45
    tensor = ramp(8)
    handles = [engine.open_group().put(tensor) for _ in range(3)]
    assert engine.stats.swapped_storages == 3
    assert all(torch.equal(handle.get(), tensor) for handle in handles)


def test_small_part_does_not_drag_its_storage(engine):
    tensor = ramp(1000, 8)
    group = engine.open_group()
    first, second = group.put(tensor[:, :2]), group.put(tensor[:, :2])
    assert engine.stats.swapped_bytes == 1000 * 2 * 4 and engine.stats.swapped_storages == 1
    storage = weakref.ref(tensor.untyped_storage())
    expected = tensor[:, :2].clone()
    del tensor
    settle(engine)
    assert storage() is None
    assert torch.equal(first.get(), expected) and torch.equal(second.get(), expected)


def test_empty_view_moves_nothing_and_holds_nothing(engine):
    tensor = ramp(6, 8)
    handle = engine.open_group().put(tensor[6:])
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is None and handle.get().shape == (0, 8)
    assert engine.stats.swapped_storages == 0 and handle.nbytes == 0


def test_reused_address_is_another_storage(engine):  # case 33
    memory = bytearray(4096)
    group = engine.open_group()
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    tensor.fill_(1)
    address = tensor.data_ptr()
    first = group.put(tensor.requires_grad_(False))
    del tensor
    settle(engine)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    tensor.fill_(2)
    assert tensor.data_ptr() == address
    second = group.put(tensor)
    assert torch.all(first.get() == 1) and torch.all(second.get() == 2)
    assert engine.stats.swapped_storages == 2


def test_device_memory_goes_at_fixed_points(engine):
    """Not when the copy happens to be over: the end of work that began after it, or the next group but one."""
    handles, storages = [], []

    def put(group):
        tensor = ramp(1000)
        storages.append(weakref.ref(tensor.untyped_storage()))
        handles.append(group.put(tensor))

    def alive():
        return [storage() is not None for storage in storages]

    group = engine.open_group()
    put(group)
    engine._offloading[0][1].finished.wait()
    assert alive() == [True] and engine.stats.swapped_bytes == 4000
    with group.during_work():
        put(group)
        assert alive() == [True, True]
    assert alive() == [False, True]
    engine.open_group()
    assert alive() == [False, True]
    put(engine.open_group())
    assert alive() == [False, False, True]
    engine.let_go()
    assert alive() == [False] * 3
    assert all(torch.equal(handle.get(), ramp(1000)) for handle in handles)


def test_original_is_handed_back_while_its_offload_runs(engine, blocked_worker):
    tensor = ramp(1000)
    handle = engine.open_group().put(tensor)
    assert handle.get().data_ptr() == tensor.data_ptr()
    blocked_worker.set()
    settle(engine)
    del tensor
    assert torch.equal(handle.get(), ramp(1000)) and engine.stats.prefetched_bytes == 0


@pytest.fixture
def blocked_worker(monkeypatch):
    """The worker copies nothing until this event is set."""
    from memo_hf.swap import cpu_threads

    go, copy_bytes = threading.Event(), cpu_threads.copy_bytes

    def blocked(source, target):
        assert go.wait(20)
        copy_bytes(source, target)

    monkeypatch.setattr(cpu_threads, "copy_bytes", blocked)
    yield go
    go.set()


def test_keep_copies_nothing(engine):
    group = engine.open_group(keep=True)
    handle = group.put(ramp(100))
    group.seal()
    group.prefetch()
    group.release()
    assert torch.equal(handle.get(), ramp(100))
    assert engine.stats.swapped_bytes == engine.stats.prefetched_bytes == engine.stats.host_reserved_bytes == 0


def test_foreign_tensors_are_kept(engine):  # case 44
    class Wrapped(torch.Tensor):
        pass

    group = engine.open_group()
    meta, wrapped = torch.empty(4, device="meta"), ramp(4).as_subclass(Wrapped)
    with torch.inference_mode():
        inference = ramp(4)
    handles = [group.put(tensor) for tensor in (meta, wrapped, inference)]
    assert engine.stats.swapped_storages == 0
    assert handles[0].get().device.type == "meta" and type(handles[1].get()) is Wrapped
    assert torch.equal(handles[2].get(), ramp(4))
    assert [handle.nbytes for handle in handles] == [16, 16, 16]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("settled", [False, True])
def test_in_place_write_is_an_error(engine, keep, settled):  # cases 38 and 39
    tensor = ramp(100)
    handle = engine.open_group(keep=keep, label="layer 3").put(tensor)
    if settled:
        settle(engine)
    tensor.view(10, 10)[0].add_(1)
    with pytest.raises(MemoError, match="layer 3 was changed by an in-place operation.*version 1, saved was version 0"):
        handle.get()


def test_write_between_two_puts_makes_two_contents(engine):
    tensor = ramp(100)
    group = engine.open_group()
    before = group.put(tensor)
    settle(engine)
    tensor.add_(1)
    handle = group.put(tensor)
    assert engine.stats.swapped_storages == 2
    assert torch.equal(handle.get(), ramp(100) + 1)
    with pytest.raises(MemoError, match="in-place operation"):
        before.get()


def test_write_that_nobody_reads_back_is_no_error(engine):
    tensor = ramp(100)
    handle = engine.open_group().put(tensor)
    tensor.add_(1)
    del handle
    settle(engine)
    assert engine.stats.host_bytes == 0


def test_autograd_hooks_give_the_plain_gradient(engine):
    def run(put, get):
        x = ramp(32, 16).div(100).requires_grad_()
        weight = ramp(16, 16).div(50).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(put, get):
            y = torch.nn.functional.gelu(x @ weight).softmax(-1)
            loss = (y * y.exp()).sum()
        loss.backward()
        return x.grad, weight.grad

    group = engine.open_group()
    plain = run(lambda tensor: tensor, lambda tensor: tensor)
    swapped = run(group.put, lambda handle: handle.get())
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))
    assert engine.stats.swapped_bytes > 0


def test_several_gets_share_one_device_copy_until_release(engine):  # case 30
    handle = (group := engine.open_group()).put(ramp(100))
    settle(engine)
    first, second = handle.get(), handle.get()
    assert first.data_ptr() == second.data_ptr() and engine.stats.prefetched_bytes == 400
    group.release()
    device = weakref.ref(first.untyped_storage())
    del first, second
    assert device() is None
    for _ in range(2):
        group.prefetch()
        group.prefetch()
        assert torch.equal(handle.get(), ramp(100))
        group.release()
    assert engine.stats.prefetched_bytes == 3 * 400


def test_prefetch_leaves_out_the_dead(engine):
    group = engine.open_group()
    kept, dead = group.put(ramp(100)), group.put(ramp(50))
    settle(engine)
    del dead
    group.prefetch()
    assert engine.stats.prefetched_bytes == 400 and torch.equal(kept.get(), ramp(100))


def test_host_block_returns_with_the_last_handle(engine):  # cases 16 and 19
    tensor = ramp(100)
    group = engine.open_group()
    first, second = group.put(tensor), group.put(tensor.view(10, 10))
    del first
    settle(engine)
    assert engine.stats.host_bytes == 400
    del second
    assert engine.stats.host_bytes == 0 and engine.stats.peak_host_bytes == 400
    assert group.put(tensor).nbytes == 400  # the group forgot the dead copy


def test_no_garbage_collector_is_needed(engine):  # case 22
    gc.collect()
    gc.disable()
    try:
        tensor = ramp(1000)
        storage = weakref.ref(tensor.untyped_storage())
        group = engine.open_group()
        handle = group.put(tensor)
        settle(engine)
        group.prefetch()
        handle.get()
        references = [weakref.ref(group), weakref.ref(handle._stored)]
        del tensor, group, handle
        assert storage() is None and all(reference() is None for reference in references)
        assert engine.stats.host_bytes == 0
    finally:
        gc.enable()


def test_handles_die_while_their_offload_waits(engine, blocked_worker):
    group = engine.open_group()
    for _ in range(3):
        group.put(ramp(100))
    assert engine.stats.host_bytes == 1200
    blocked_worker.set()
    settle(engine)
    assert engine.stats.host_bytes == 0


def test_at_most_two_groups_hold_device_memory(engine, blocked_worker):
    old = engine.open_group()
    handles = [old.put(ramp(100)), engine.open_group().put(ramp(100))]
    threading.Timer(0.05, blocked_worker.set).start()
    engine.open_group()
    assert blocked_worker.is_set() and handles[0]._stored.offload.buffer is None


def test_stats_and_reset(engine):
    handle = engine.open_group().put(ramp(100))
    other = engine.open_group().put(ramp(50))
    del other
    settle(engine)
    handle.get()
    engine.reset_stats()
    stats = engine.stats
    assert (stats.swapped_bytes, stats.prefetched_bytes, stats.swapped_storages) == (0, 0, 0)
    assert stats.host_bytes == stats.peak_host_bytes == 400 and not stats.pinned


def test_put_after_seal(engine):
    group = engine.open_group(label="layer 7")
    group.seal()
    with pytest.raises(MemoError, match="sealed group 'layer 7'"):
        group.put(ramp(4))


def test_close_with_live_handles(engine):  # case 23
    group = engine.open_group()
    handle, kept = group.put(ramp(100)), engine.open_group(keep=True).put(ramp(4))
    mapping = weakref.ref(handle._stored.block.slab.bytes.untyped_storage())
    engine.close()
    engine.close()
    assert mapping() is None
    assert engine.stats.host_reserved_bytes == engine.stats.host_bytes == 0
    uses = (
        handle.get,
        kept.get,
        group.prefetch,
        group.release,
        engine.open_group,
        engine.reset_stats,
        lambda: group.put(ramp(1)),
    )
    for use in uses:
        with pytest.raises(MemoError, match="closed"):
            use()
    del handle, kept
    assert engine.stats.host_bytes == 0


def test_engine_that_is_never_closed_ends_its_thread():
    engine = SwapEngine(CPU, MIB)
    worker = engine._backend._worker
    handle = engine.open_group().put(ramp(100))
    del engine, handle
    worker.join(10)
    assert not worker.is_alive()


def test_worker_failure_reaches_whoever_waits_or_puts(engine, monkeypatch):
    from memo_hf.swap import cpu_threads

    def broken(source, target):
        raise OSError("bus fault")

    monkeypatch.setattr(cpu_threads, "copy_bytes", broken)
    group = engine.open_group()
    handle = group.put(ramp(100))
    with pytest.raises(MemoError, match="copy thread of the swap engine failed.*bus fault"):
        engine.let_go()
    for use in (handle.get, lambda: group.put(ramp(100))):
        with pytest.raises(MemoError, match="copy thread of the swap engine failed.*bus fault"):
            use()
    del handle
    assert engine.stats.host_bytes == 0


def test_over_the_budget():
    engine = SwapEngine(CPU, 8192)
    group = engine.open_group()
    handle = group.put(ramp(1500))
    expected = "for 7.81 KiB.*over the budget. In use 5.86 KiB, reserved 8.00 KiB, budget 8.00 KiB. Raise host_mem"
    with pytest.raises(HostMemoryError, match=expected):
        group.put(ramp(2000))
    assert torch.equal(handle.get(), ramp(1500)) and engine.stats.swapped_storages == 1
    del handle
    assert torch.equal(group.put(ramp(2000)).get(), ramp(2000))
    engine.close()


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_device_without_backend(device):
    with pytest.raises(MemoError, match=f"not supported on device {device}"):
        SwapEngine(torch.device(device), MIB)


def test_max_in_flight_below_one():
    with pytest.raises(ConfigError, match="max_in_flight is 0"):
        SwapEngine(CPU, MIB, max_in_flight=0)
