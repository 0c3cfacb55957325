"""Host memory of the swap engine: reserved bytes, reuse, budget, pinning."""

import random
import weakref

import pytest
import torch

from memo_hf.errors import HostMemoryError, MemoError
from memo_hf.swap import SwapEngine
from memo_hf.swap.copy_backend import Copy
from memo_hf.swap.cpu_threads import CpuThreads
from memo_hf.swap.host_pool import ALIGNMENT, HostPool
from tests.harness.simulated_copies import SimulatedCopies, settle

GIB = 2**30
PAGE = 4096


def pool_of(budget=GIB, pin=lambda buffer: False, unpin=None):
    return HostPool(budget, pin, unpin)


def allocate(pool, nbytes):
    block = pool.take(nbytes)
    if block is None:
        pool.make_room(nbytes)
        block = pool.take(nbytes)
    return block


# Sizes of one layer in bytes: a Llama-like one, one with odd sizes, and one large among small.
LAYERS = {
    "even": [1 << 20, 1 << 20, 1 << 18, 1 << 18, 1 << 20, 1 << 14],
    "odd": [1_000_003, 77_777, 333_331, 640_001, 99_999],
    "mixed": [8 << 20] + [40_000] * 12,
}


def run_steps(engine, sizes, num_early_deaths):
    """Twenty steps of six layers; returns `host_allocations` after each."""
    made = []
    for _ in range(20):
        handles = []
        for _ in range(6):
            group = engine.open_group()
            layer = [group.put(torch.empty(nbytes, dtype=torch.uint8)) for nbytes in sizes]
            handles += layer[num_early_deaths:]  # backward never asks for the others
            del layer
        made.append(engine.stats.host_allocations)
        handles.clear()
    return made


@pytest.mark.parametrize("name", LAYERS)
def test_twenty_equal_steps(name):  # cases 13, 89 and 90
    engine = SwapEngine(torch.device("cpu"), GIB)
    made = run_steps(engine, LAYERS[name], num_early_deaths=0)
    settle(engine)
    stats = engine.stats
    assert made == made[:1] * 20
    assert stats.peak_host_bytes == 6 * sum(LAYERS[name]) and stats.host_bytes == 0
    assert stats.host_reserved_bytes <= 1.05 * stats.peak_host_bytes
    engine.close()
    assert engine.stats.host_reserved_bytes == 0


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("name", LAYERS)
def test_twenty_equal_steps_with_handles_that_die_early(name, eagerness):  # case 19
    engine = SwapEngine(torch.device("cpu"), GIB, backend=SimulatedCopies(0, eagerness))
    made = run_steps(engine, LAYERS[name], num_early_deaths=1)
    assert made[1:] == made[1:2] * 19
    engine.close()


def test_equal_steps_map_nothing_after_the_first():
    pool = pool_of()
    sizes = LAYERS["odd"] * 30
    for step in range(3):
        blocks = [allocate(pool, nbytes) for nbytes in sizes]
        if step == 0:
            num_slabs, reserved = pool.num_slabs_made, pool.reserved_bytes
        random.Random(step).shuffle(blocks)
        for block in blocks:
            pool.give_back(block)
    assert (pool.num_slabs_made, pool.reserved_bytes) == (num_slabs, reserved)
    assert reserved <= 1.05 * sum(sizes)
    assert num_slabs < len(sizes)


def test_blocks_are_apart_aligned_and_whole():
    pool = pool_of()
    rng = random.Random(0)
    live = []
    for index in range(400):
        if live and rng.random() < 0.45:
            value, block = live.pop(rng.randrange(len(live)))
            assert torch.all(block.bytes() == value) and block.bytes().numel() == block.nbytes
            pool.give_back(block)
        else:
            block = allocate(pool, rng.randrange(1, 20_000))
            assert block.bytes().data_ptr() % ALIGNMENT == 0
            block.bytes().fill_(index % 251)
            live.append((index % 251, block))
    assert pool.payload_bytes == sum(block.nbytes for _, block in live)
    for value, block in live:
        assert torch.all(block.bytes() == value)


def test_neighbours_are_joined_when_nothing_fits():
    pool = pool_of()
    pool.make_room(8 * PAGE)
    blocks = [pool.take(PAGE) for _ in range(8)]
    for block in blocks[::2] + blocks[1::2]:
        pool.give_back(block)
    assert pool.take(8 * PAGE) is None
    assert allocate(pool, 8 * PAGE).size == 8 * PAGE
    assert pool.num_slabs_made == 1


def test_slabs_of_other_lengths_make_way_under_the_budget():  # case 109
    pool = pool_of(budget=10 * PAGE)
    for block in [allocate(pool, 2 * PAGE) for _ in range(5)]:
        pool.give_back(block)
    assert pool.reserved_bytes == 10 * PAGE
    block = allocate(pool, 9 * PAGE)
    assert pool.reserved_bytes <= 10 * PAGE and block.nbytes == 9 * PAGE


def test_budget_bounds_what_is_reserved():  # case 90
    pool = pool_of(budget=3 * PAGE)
    allocate(pool, 2 * PAGE + 1)
    with pytest.raises(HostMemoryError, match="for 4.00 KiB.*over the budget.*reserved 12.00 KiB, budget 12.00 KiB"):
        allocate(pool, PAGE)
    assert pool.reserved_bytes == 3 * PAGE


def test_system_refuses(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("memo_hf.swap.host_pool.mmap.mmap", refuse)
    with pytest.raises(HostMemoryError, match="refused to map it .*Cannot allocate memory"):
        allocate(pool_of(), 100)


def test_memory_goes_back_to_the_system():  # case 23
    pool = pool_of()
    block = allocate(pool, 100 * PAGE)
    address = f"{block.bytes().data_ptr():x}-"
    storage = weakref.ref(block.slab.bytes.untyped_storage())
    with open("/proc/self/maps") as maps:
        assert any(line.startswith(address) for line in maps)
    pool.close()
    assert storage() is None
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(address) for line in maps)
    pool.give_back(block)
    assert pool.payload_bytes == pool.reserved_bytes == 0


def test_view_in_use_keeps_its_slab():
    pool = pool_of()
    memory = allocate(pool, PAGE).bytes()
    memory.fill_(3)
    pool.close()
    assert torch.all(memory == 3)


def test_pinning_is_undone():
    pinned = []
    pool = pool_of(pin=lambda buffer: not pinned.append(buffer.data_ptr()), unpin=lambda b: pinned.remove(b.data_ptr()))
    assert not pool.pinned
    allocate(pool, PAGE)
    allocate(pool, 3 * PAGE)
    assert len(pinned) == 2 and pool.pinned
    pool.close()
    assert not pinned


class PinFails(CpuThreads):
    """Pins up to a limit, as a driver does that is short of locked memory while memory is free."""

    def __init__(self, limit):
        super().__init__()
        self.pinned, self.limit, self.num_tries = [], limit, 0

    def pin(self, buffer):
        self.num_tries += 1
        if sum(self.pinned) + buffer.numel() > self.limit:
            raise MemoError("cudaHostRegister: out of memory")
        self.pinned.append(buffer.numel())
        return True

    def unpin(self, buffer):
        self.pinned.remove(buffer.numel())


def test_failing_pin_falls_back_and_says_so_once():  # case 91
    backend = PinFails(limit=2 * PAGE)
    engine = SwapEngine(torch.device("cpu"), GIB, backend=backend)
    group = engine.open_group()
    handles = [group.put(torch.full((2 * PAGE,), 1, dtype=torch.uint8))]
    assert engine.stats.pinned
    with pytest.warns(
        UserWarning, match="host memory could not be pinned.*out of memory.*pageable host memory"
    ) as caught:
        handles += [group.put(torch.full((2 * PAGE,), value, dtype=torch.uint8)) for value in (2, 3, 4)]
    assert len(caught) == 1 and backend.num_tries == 2 and not engine.stats.pinned
    assert [handle.get()[5].item() for handle in handles] == [1, 2, 3, 4]
    engine.close()
    assert backend.pinned == []


class FailsToStart(CpuThreads):
    def offload(self, source, target) -> Copy:
        raise MemoError("no more copies")


def test_block_of_an_offload_that_never_began_is_free():
    engine = SwapEngine(torch.device("cpu"), GIB, backend=FailsToStart())
    with pytest.raises(MemoError, match="no more copies"):
        engine.open_group().put(torch.ones(10))
    assert engine.stats.host_bytes == engine.stats.swapped_bytes == 0
    engine.close()


def test_memory_that_is_reserved_is_there_in_one_piece():
    pinned = []
    pool = pool_of(16 * PAGE, lambda buffer: pinned.append(buffer.numel()) or True, lambda buffer: None)
    pool.reserve(8 * PAGE)
    assert pinned == [8 * PAGE] and (pool.reserved_bytes, pool.payload_bytes) == (8 * PAGE, 0)
    blocks = [allocate(pool, 2 * PAGE) for _ in range(4)]
    assert pinned == [8 * PAGE] and pool.payload_bytes == 8 * PAGE
    pool.reserve(8 * PAGE)  # it is there
    pool.reserve(17 * PAGE)  # more than the budget: whoever takes it is told
    assert pinned == [8 * PAGE]
    pool.reserve(10 * PAGE)
    assert pinned == [8 * PAGE, 2 * PAGE]
    for block in blocks:
        pool.give_back(block)
    pool.close()
    assert pool.reserved_bytes == 0


def test_reserving_what_the_system_refuses_leaves_it_to_whoever_needs_it(monkeypatch):
    pool = pool_of()

    def refuse(*args):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("memo_hf.swap.host_pool._Slab", refuse)
    pool.reserve(PAGE)
    assert pool.reserved_bytes == 0
    with pytest.raises(HostMemoryError, match="refused to map it"):
        pool.make_room(PAGE)
