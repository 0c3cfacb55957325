"""Orders that only a GPU shows: late copies, dropped memory, reuse, threads. Simulated, and on the worker thread."""

import random
import subprocess
import sys
import threading

import pytest
import torch

from memo_hf.errors import HostMemoryError
from memo_hf.swap import SwapEngine
from tests.harness.simulated_copies import GuardedPool, SimulatedCopies, settle

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    monkeypatch.setattr("memo_hf.swap.engine.HostPool", GuardedPool)


def simulated(seed=0, eagerness=0.3, **options):
    backend = SimulatedCopies(seed, eagerness)
    return SwapEngine(CPU, 64 * MIB, backend=backend, **options), backend


def train(engine, *, steps=3, layers=4, drop=0.2, retain=False, seed=0):
    """Forward and backward passes of random layers; returns how many tensors came back other than they went.

    Some handles die early, as those of unused branches do, and some are fetched and not read. One group ahead is
    prefetched, and `retain` runs each backward twice.
    """
    rng = random.Random(seed)
    num_wrong = 0
    for _ in range(steps):
        passes = []
        for layer in range(layers):
            group, saved = engine.open_group(label=f"layer {layer}"), []
            shared = torch.empty(32).fill_(rng.random())
            for tensor in [torch.empty(rng.choice([16, 64, 100])).fill_(rng.random()) for _ in range(4)] + [shared]:
                saved.append((tensor[0].item(), group.put(tensor)))
            saved.append((shared[0].item(), group.put(shared[8:])))
            group.seal()
            saved = [item for item in saved if rng.random() > drop]
            passes.append((group, saved))
        for _ in range(1 + retain):
            passes[-1][0].prefetch()
            for layer in reversed(range(layers)):
                group, saved = passes[layer]
                if layer:
                    passes[layer - 1][0].prefetch()
                for value, handle in reversed(saved):
                    if rng.random() < drop / 2:
                        continue
                    num_wrong += not bool((handle.get() == value).all())
                group.release()
        del passes, saved, handle, group
    return num_wrong


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_any_legal_order_gives_the_same_tensors(seed, eagerness, max_in_flight):  # cases 1, 7 and 8
    engine, backend = simulated(seed, eagerness, max_in_flight=max_in_flight)
    assert train(engine, seed=seed, retain=seed % 2) == 0
    engine.close()
    assert backend.closed and not backend.faults and engine.stats.host_bytes == 0


def waits_for_nothing(backend):
    backend.wait = lambda copy, buffer=None: setattr(copy, "buffer", None)


def everything_is_done(backend):
    def done(copy):
        copy.buffer = None
        return True

    backend.done = done


def fetch_ignores_its_offload(backend):
    backend._run_until, run_until = lambda job: job.is_fetch and run_until(job), backend._run_until


@pytest.mark.parametrize("fault", [waits_for_nothing, everything_is_done, fetch_ignores_its_offload])
def test_a_missing_wait_is_seen(fault):
    """Not a test of the engine but of these tests: with one rule broken, they go red."""
    engine, backend = simulated(eagerness=0.2)
    fault(backend)
    try:
        num_wrong = train(engine, drop=0.5)
    except AssertionError as error:
        assert "canary" in str(error)
    else:
        assert num_wrong > 0 or backend.faults


def test_release_before_the_fetch_has_run():
    engine, backend = simulated(eagerness=0)
    group = engine.open_group()
    handle = group.put(torch.ones(100))
    for _ in range(2):
        engine.open_group().put(torch.zeros(1))  # pushes the offload out
    for _ in range(2):
        group.prefetch()
        assert handle._stored.fetch.buffer is not None and backend.num_queued > 0
        group.release()
    assert not backend.faults
    backend.finish(handle._stored.fetch)
    assert not backend.faults and handle._stored.fetch.buffer is None
    assert torch.all(handle.get() == 1)
    engine.close()


def test_handles_die_before_their_fetch_has_run():
    engine, backend = simulated(eagerness=0)
    group = engine.open_group()
    handle = group.put(torch.ones(100))
    for _ in range(2):
        engine.open_group().put(torch.zeros(1))
    group.prefetch()
    del handle
    assert engine.stats.host_bytes == 400  # the fetch still reads the block
    engine.close()
    assert not backend.faults


def test_host_block_is_not_reused_under_a_running_copy():
    engine, backend = simulated(eagerness=0)
    group = engine.open_group()
    group.put(torch.ones(100))  # dies at once, its offload queued
    handle = group.put(torch.full((100,), 2.0))
    backend._eagerness = 0.5
    del group
    for _ in range(2):
        engine.open_group().put(torch.zeros(100))
    assert torch.all(handle.get() == 2)
    engine.close()


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_groups_in_flight_are_bounded(max_in_flight):
    engine, backend = simulated(eagerness=0, max_in_flight=max_in_flight)
    handles = []
    for layer in range(8):
        group = engine.open_group()
        handles += [group.put(torch.ones(10)) for _ in range(3)]
        assert backend.num_queued == 3 * min(layer + 1, max_in_flight)
        assert sum(handle._stored.offload.buffer is not None for handle in handles) == backend.num_queued
    assert backend.num_waits == 3 * (8 - max_in_flight)
    engine.close()


def test_a_group_that_keeps_everything_holds_a_rounding_buffer():
    engine, backend = simulated(eagerness=0)
    handle = engine.open_group().put(torch.ones(10))
    engine.open_group(keep=True).put(torch.ones(10))
    assert backend.num_waits == 0 and handle._stored.offload.buffer is not None
    engine.open_group(keep=True)
    assert backend.num_waits == 1 and handle._stored.offload.buffer is None
    engine.close()


def test_put_into_an_older_group_counts():  # case 6
    engine, backend = simulated(eagerness=0)
    first, second = engine.open_group(), engine.open_group()
    handles = [second.put(torch.ones(10)), first.put(torch.ones(10)), second.put(torch.ones(10))]
    engine.open_group()
    assert [handle._stored.offload.buffer is None for handle in handles] == [False, True, False]
    assert all(torch.all(handle.get() == 1) for handle in handles)
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_worker_thread_under_random_traffic(seed):
    engine = SwapEngine(CPU, 64 * MIB)
    assert train(engine, seed=seed, steps=10, retain=True) == 0
    engine.close()


def test_threads_share_an_engine():
    """Random sizes, handles that die on other threads than they were made on, a budget that is hit now and then."""
    engine = SwapEngine(CPU, MIB // 2)
    failures, passed_on, num_full = [], [], [0] * 4

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                group, saved = engine.open_group(), []
                for _ in range(rng.randrange(5)):
                    value, count = rng.random(), rng.randrange(1, 9000)
                    try:
                        saved.append((torch.tensor(value).item(), group.put(torch.full((count,), value))))
                    except HostMemoryError:
                        num_full[seed] += 1
                group.seal()
                if rng.random() < 0.7:
                    group.prefetch()
                for value, handle in saved:
                    if rng.random() < 0.7 and not torch.all(handle.get() == value):
                        failures.append(f"thread {seed}: {handle.get()[:3]} is not {value}")
                passed_on.append(saved)
                if len(passed_on) > 6:
                    passed_on.pop(0)
                if rng.random() < 0.5:
                    group.release()
        except Exception as failure:  # a thread's exception would be lost
            failures.append(repr(failure))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures and sum(num_full) < 4 * 60
    passed_on.clear()
    settle(engine)
    assert engine.stats.host_bytes == 0 and engine.stats.host_reserved_bytes <= MIB // 2
    engine.close()


def test_destructor_that_uses_the_engine_does_not_deadlock(monkeypatch):
    engine = SwapEngine(CPU, MIB)
    other = engine.open_group()

    class Saved:
        def __del__(self):
            other.put(torch.ones(3))

    handle_with_user = {"saved": Saved()}
    take = engine._pool.take

    def collecting(nbytes):
        handle_with_user.clear()  # as the garbage collector might, under the engine's lock
        return take(nbytes)

    monkeypatch.setattr(engine._pool, "take", collecting)
    assert torch.all(engine.open_group().put(torch.ones(5)).get() == 1)
    assert engine.stats.swapped_storages == 2
    engine.close()


@pytest.mark.parametrize("ending", ["", "cycle = [group]; cycle.append(cycle)"])
def test_interpreter_exit_with_copies_under_way(ending):
    script = f"""
import torch
from memo_hf.swap import SwapEngine
engine = SwapEngine(torch.device("cpu"), 2**30)
group = engine.open_group()
handle = [group.put(torch.ones(2**22)) for _ in range(8)]
{ending}
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr, run.stderr
