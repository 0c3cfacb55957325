"""Traces, snapshots, planning a step in two levels, and the model of PyTorch's caching allocator."""

import os
import pickle
import sys
from pathlib import Path

import pytest

from memo_hf.errors import PlanError
from memo_hf.planner import bilevel
from memo_hf.planner.bilevel import _slabs, plan_step
from memo_hf.planner.caching import reserved_bytes
from memo_hf.planner.placement import place
from memo_hf.planner.problem import Buffer, Placement, Problem
from memo_hf.planner.snapshot import read_snapshot
from memo_hf.planner.trace import Event, Trace, is_trace, read_trace, write_trace
from memo_hf.planner.verify import verify

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from synthetic_step import llama_step  # noqa: E402

MIB = 2**20


def trace_of(*events, repeats=True):
    """From (op, id, size, phase) or (op, id, size, phase, stream)."""
    return Trace(tuple(Event(*event[:4], event[4] if len(event) > 4 else 0, 0) for event in events), repeats)


def test_requests_of_a_trace():
    trace = trace_of(
        ("free", 99, 0, "forward 0"),  # was there before
        ("malloc", 0, 100, "forward 0"),
        ("malloc", 1, 0, "forward 0"),  # no bytes
        ("malloc", 2, 513, "forward 0"),
        ("free", 0, 0, "forward 0"),
        ("free", 1, 0, "forward 0"),
    )
    first, second = trace.requests
    assert (first.id, first.lower, first.upper, first.size) == (0, 1, 4, 100)
    # Never freed, and the step runs again: alive from the start, so that nothing else gets its address.
    assert (second.id, second.lower, second.upper) == (2, 0, 6)
    assert Trace(trace.events, repeats=False).requests[1].lower == 3
    assert [buffer.size for buffer in trace.problem().buffers] == [512, 1024]


@pytest.mark.parametrize("op", ["malloc", "free"])
def test_an_id_is_used_once(op):
    with pytest.raises(PlanError, match="request 0 is .* twice"):
        trace_of(("malloc", 0, 1, ""), (op, 0, 1, ""), (op, 0, 1, "")).requests  # noqa: B018


def test_trace_files_round_trip(tmp_path):
    path = tmp_path / "step.csv"
    trace = llama_step(num_layers=1, tokens=64)
    write_trace(trace, path)
    assert path.read_text().splitlines()[:2] == ["op,id,size,phase,stream,thread", "malloc,0,524288,embedding,0,0"]
    assert is_trace(path)
    assert read_trace(path) == trace


@pytest.mark.parametrize(
    "text, message",
    [
        ("id,lower,upper,size\n", "a trace begins with"),
        ("op,id,size,phase,stream,thread\nmalloc,0,x,a,0,0\n", "line 2"),
        ("op,id,size,phase,stream,thread\nmalloc,0,1,a,0\n", "line 2"),
        ("op,id,size,phase,stream,thread\nrealloc,0,1,a,0,0\n", "line 2.*realloc"),
        ("op,id,size,phase,stream,thread\nmalloc,0,-1,a,0,0\n", "line 2.*-1"),
    ],
)
def test_broken_traces_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "step.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"step.csv.*{message}"):
        read_trace(path)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_two_levels_lose_nothing(tokens, recompute):
    trace = llama_step(num_layers=6, tokens=tokens, recompute=recompute)
    two, flat = plan_step(trace), plan_step(trace, two_levels=False)
    assert two.problem == flat.problem == trace.problem()
    assert two.peak <= 1.005 * flat.peak
    assert "2 kinds of layer phase" in two.method
    assert all(offset % 512 == 0 for offset in two.offsets)


def test_a_plan_is_cut_where_no_buffer_crosses():
    lives = [("a", 0, 4, 4), ("b", 2, 6, 2), ("c", 4, 8, 3), ("d", 0, 8, 1)]
    plan = Placement(Problem(tuple(Buffer(*life) for life in lives)), (0, 4, 0, 9), "by hand")
    assert _slabs(plan) == [(0, 4, [0, 2]), (4, 6, [1]), (9, 10, [3])]


def test_the_better_of_two_levels_and_flat_is_taken(monkeypatch):
    """Stand-ins plan with the peaks that are given, and note what they may stop at."""
    trace = llama_step(num_layers=1, tokens=64)
    problem, goals = trace.problem(), []
    bound = problem.lower_bound

    def plan(peak, method):
        return Placement(problem, (0,) * (len(problem) - 1) + (peak - problem.buffers[-1].size,), method)

    def peak(two, flat, **options):
        monkeypatch.setattr(bilevel, "verify", lambda placement: placement)
        monkeypatch.setattr(bilevel, "_two_levels", lambda *given: goals.append(given[-1]) or plan(two, "two"))
        monkeypatch.setattr(bilevel, "place", lambda _, goal, *rest: goals.append(goal) or plan(flat, "flat"))
        placement = plan_step(trace, **options)
        return placement.peak, placement.method

    assert peak(bound, 0) == (bound, "two")  # good enough, flat is not tried
    assert peak(2 * bound, bound) == (bound, "two; flat: flat")
    assert peak(2 * bound, 3 * bound) == (2 * bound, "two")
    assert goals == [None] * 5
    assert peak(2 * bound, bound, capacity=2 * bound) == (2 * bound, "two")
    assert peak(2 * bound, 3 * bound, two_levels=False) == (3 * bound, "flat")
    assert peak(2 * bound, 3 * bound, method="tree") == (3 * bound, "flat")
    assert goals[5:] == [2 * bound, None, None]


def test_streams_share_a_capacity_as_they_need_it(monkeypatch):
    goals = []
    monkeypatch.setattr(bilevel, "place", lambda problem, goal, *rest: goals.append(goal) or place(problem))
    events = [("malloc", 0, 1024, "", 0), ("malloc", 1, 3072, "", 7)]
    assert plan_step(trace_of(*events), capacity=8192).peak == 4096
    assert goals == [2048, 6144]


def test_an_exact_flat_plan_is_a_proof():
    """The peak is above the lower bound, and no plan has a lower one."""
    lives = [(0, 3, 3), (0, 4, 5), (3, 5, 1), (4, 5, 3), (3, 6, 2), (4, 6, 2), (5, 7, 4), (6, 8, 4), (7, 8, 4)]
    events = []
    for now in range(9):
        events += [("free", i, 0, "") for i, (_, upper, _) in enumerate(lives) if upper == now]
        events += [("malloc", i, 512 * size, "") for i, (lower, _, size) in enumerate(lives) if lower == now]
    plan = plan_step(trace_of(*events))
    assert (plan.peak, plan.lower_bound, plan.proved) == (9 * 512, 8 * 512, True)


def test_layers_alike_get_the_same_inner_addresses():
    trace = llama_step(num_layers=4, tokens=4096)
    plan = plan_step(trace)
    table = trace.serving_table(plan)
    assert [(phase, size) for phase, _, size, _ in table] == [
        (event.phase, event.size) for event in trace.events if event.op == "malloc"
    ]
    ends = {event.id: event.phase for event in trace.events if event.op == "free"}
    inner = {}
    for request, offset in zip(trace.requests, plan.offsets, strict=True):
        if request.phase == ends[request.id] and request.phase.startswith("forward"):
            inner.setdefault(request.phase, []).append(offset)
    spans = {tuple(offset - min(offsets) for offset in offsets) for offsets in inner.values()}
    assert len(inner) == 4
    assert len(spans) <= 2  # slabs may be stacked in another order, but there are few ways


def test_streams_share_no_bytes():
    events = []
    for stream in (0, 7):
        for i in range(3):
            request = 10 * stream + i
            events += [("malloc", request, 1000, "forward 0", stream), ("free", request, 0, "forward 0", stream)]
    trace = trace_of(*events)
    plan = plan_step(trace)
    assert plan.offsets == (0, 0, 0, 1024, 1024, 1024)
    assert [stream for _, stream, _, _ in trace.serving_table(plan)] == [0, 0, 0, 7, 7, 7]


def test_a_plan_of_another_trace_is_refused():
    plan = plan_step(trace_of(("malloc", 0, 1000, ""), ("free", 0, 0, "")))
    with pytest.raises(PlanError, match="another trace"):
        trace_of(("malloc", 0, 9000, ""), ("free", 0, 0, "")).serving_table(plan)


def test_an_empty_step():
    assert plan_step(Trace(())).peak == 0


# --- The caching allocator's rules, each with the segments it must make ---


@pytest.mark.parametrize(
    "sizes, segments",
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),  # one segment holds both
        ([9 * MIB, 12 * MIB], 32 * MIB),  # 12 MiB do not fit in the 11 that are left
        ([10 * MIB], 10 * MIB),
        ([11 * MIB], 12 * MIB),
    ],
)
def test_segments(sizes, segments):
    assert reserved_bytes(trace_of(*(("malloc", i, size, "") for i, size in enumerate(sizes)))) == segments


def test_freed_neighbours_merge_and_are_used_again():
    events = [("malloc", i, 5 * MIB, "") for i in range(4)]  # one segment of 20 MiB, full
    events += [("free", i, 0, "") for i in (0, 2, 1)]
    events += [("malloc", 9, 15 * MIB, "")]
    assert reserved_bytes(trace_of(*events)) == 20 * MIB


def test_a_large_block_is_not_split_for_a_small_rest():
    events = [("malloc", 0, 12 * MIB, ""), ("free", 0, 0, ""), ("malloc", 1, 11 * MIB, ""), ("malloc", 2, MIB + 1, "")]
    assert reserved_bytes(trace_of(*events)) == 32 * MIB  # the rest of 1 MiB stays with the 11, a new segment of 20


def test_streams_have_blocks_of_their_own():
    events = [("malloc", 0, 12 * MIB, "", 0), ("free", 0, 0, "", 0), ("malloc", 1, 12 * MIB, "", 1)]
    assert reserved_bytes(trace_of(*events)) == 24 * MIB


# --- Snapshots ---


def entry(action, addr, size):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": []}


def snapshot(history, blocks):
    segment = {"device": 0, "stream": 0, "address": 0, "total_size": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [[], history]}


def dump(tmp_path, data):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data))
    return path


def test_snapshot_with_what_was_there_before(tmp_path):
    history = [
        entry("alloc", 1000, 512),
        entry("free_requested", 5000, 2048),
        entry("free_completed", 5000, 2048),  # allocated before the recording
        entry("alloc", 5000, 1024),  # address used again
        entry("free_completed", 1000, 512),
        entry("alloc", 1000, 512),
    ]
    data = snapshot(history, [])
    data["segments"][0].update(
        device=1,
        blocks=[
            {"size": 4096, "address": 9000, "state": "active_allocated"},  # before, and still there
            {"size": 1024, "address": 5000, "state": "active_allocated"},
            {"size": 512, "address": 1000, "state": "active_allocated"},
            {"size": 512, "address": 2000, "state": "inactive"},
        ],
    )
    trace, _ = read_snapshot(dump(tmp_path, data))
    lives = [(request.size, request.lower, request.upper) for request in trace.requests]
    assert lives == [(2048, 0, 3), (4096, 1, 7), (512, 2, 5), (1024, 4, 7), (512, 6, 7)]
    placement = verify(place(trace.problem()))
    assert placement.proved and placement.peak == 4096 + 2048 + 512


def test_what_pytorch_had_reserved_at_most(tmp_path):
    """It began with 20 MiB, went up to 64, and ended with 4."""
    made = [("segment_alloc", 1, 22), ("segment_alloc", 2, 2), ("segment_free", 1, 22), ("segment_free", 3, 18)]
    history = [entry(action, address * MIB, size * MIB) for action, address, size in made]
    history[1:1] = [entry("alloc", MIB, 512), entry("segment_map", 9 * MIB, 20 * MIB)]
    history.append(entry("segment_unmap", 9 * MIB, 20 * MIB))
    data = snapshot(history, [])
    data["segments"][0]["total_size"] = 4 * MIB
    data["segments"].append({"device": 0, "stream": 0, "total_size": 99 * MIB, "blocks": []})  # of another device
    data["segments"][0]["device"] = 1
    assert read_snapshot(dump(tmp_path, data))[1] == 64 * MIB


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("where", ["whole", "inside"])
def test_a_hostile_snapshot_is_refused_and_named(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    path = dump(tmp_path, Hostile() if where == "whole" else snapshot([entry("alloc", 0, Hostile())], []))
    with pytest.raises(PlanError, match=r"snapshot\.pickle: .*(posix|nt)\.mkdir"):
        read_snapshot(path)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("data", [[], {"segments": []}, {"segments": [], "device_traces": []}, 5, snapshot([5], [])])
def test_other_pickles_are_refused(tmp_path, data):
    with pytest.raises(PlanError, match="is not a memory snapshot"):
        read_snapshot(dump(tmp_path, data))


def test_broken_files_are_refused(tmp_path):
    path = tmp_path / "snapshot.pickle"
    for content in (b"", b"no pickle", pickle.dumps(snapshot([entry("alloc", 0, 1)], []))[:-20]):
        path.write_bytes(content)
        with pytest.raises(PlanError, match="snapshot.pickle"):
            read_snapshot(path)


def test_a_snapshot_without_history(tmp_path):
    with pytest.raises(PlanError, match="_record_memory_history"):
        read_snapshot(dump(tmp_path, {"segments": [], "device_traces": [[]]}))
