"""The allocator's log made into a trace: which requests are planned, and how long each lives."""

import pytest

from memo_hf.allocator import native
from memo_hf.allocator.recording import PhaseLabel, RecordedRequest, Recording, to_recording
from memo_hf.allocator.serving_plan import ServingPlan
from memo_hf.errors import PlanError
from memo_hf.planner.bilevel import plan_step

PHASES = [PhaseLabel("forward 0"), PhaseLabel("forward 1"), PhaseLabel("forward 0", 1)]
MAIN, COPIES = 0, 1


def log(*events):
    """("mark", phase), ("malloc", request, bytes) or ("free", request), each with a thread last."""
    made, phase = [], native.NO_PHASE
    kinds = {"malloc": native.EVENT_ALLOC, "free": native.EVENT_FREE, "mark": native.EVENT_MARK}
    for kind, number, *rest, thread in events:
        if kind == "mark":
            phase = number
        event = native.Event(request=number, kind=kinds[kind], phase=phase, thread=thread)
        event.bytes = rest[0] if rest else 0
        made.append(event)
    return made


def ends(recording):
    return [request.end for request in recording.requests]


def test_requests_end_by_the_number_of_requests():
    recording = to_recording(
        log(
            ("malloc", 0, 7, MAIN),  # before the first mark: not planned
            ("mark", 0, MAIN),
            ("malloc", 1, 100, MAIN),
            ("malloc", 2, 200, COPIES),  # of a thread that marks nothing: not planned
            ("free", 0, MAIN),
            ("malloc", 3, 300, MAIN),
            ("free", 1, MAIN),
            ("mark", 2, MAIN),
            ("malloc", 4, 400, MAIN),
            ("free", 3, MAIN),
            ("free", 2, COPIES),
        ),
        PHASES,
    )
    assert recording.requests == (
        RecordedRequest(PHASES[0], 0, 100, MAIN, end=2),
        RecordedRequest(PHASES[0], 0, 300, MAIN, end=3),
        RecordedRequest(PHASES[2], 0, 400, MAIN, end=None),
    )
    requests = recording.trace.requests
    assert [request.size for request in requests] == [100, 300, 400]
    assert [(request.lower, request.upper) for request in requests] == [(0, 2), (1, 4), (0, 5)]
    assert [event.op for event in recording.trace.events] == ["malloc", "malloc", "free", "malloc", "free"]


def test_what_a_copy_thread_frees_lives_three_phases_longer():
    def freed_by(thread):
        return to_recording(
            log(
                ("mark", 0, MAIN),
                ("malloc", 0, 100, MAIN),
                ("free", 0, thread),
                ("malloc", 1, 100, MAIN),
                ("mark", 1, MAIN),
                ("malloc", 2, 100, MAIN),
                ("mark", 2, MAIN),
                ("malloc", 3, 100, MAIN),
                ("mark", 0, MAIN),
                ("malloc", 4, 100, MAIN),
                ("mark", 1, MAIN),
                ("malloc", 5, 100, MAIN),
            ),
            PHASES,
        )

    assert ends(freed_by(MAIN)) == [1, *[None] * 5]
    assert ends(freed_by(COPIES)) == [5, *[None] * 5]
    last = to_recording(log(("mark", 0, MAIN), ("malloc", 0, 9, MAIN), ("free", 0, COPIES)), PHASES)
    assert ends(last) == [1]


def requests(*ends_, num_bytes=512):
    return Recording(tuple(RecordedRequest(PHASES[0], 0, num_bytes, MAIN, end) for end in ends_))


def test_recordings_of_like_steps_are_merged():
    assert requests(1, 3, None).merged(requests(2, 2, 3)) == requests(2, 3, None)
    assert requests(1, 3).merged(requests(2, 2, 3)) == requests(1, 3)  # other steps
    assert requests(1, 3).merged(requests(2, 2, num_bytes=1024)) == requests(1, 3)


def test_a_table_follows_its_recording():
    recording = requests(1, 2, 3)
    plan = ServingPlan.of(recording, plan_step(recording.trace), "a")
    assert [request.offset for request in plan.requests] == [0, 0, 0] and plan.arena_bytes == 512 and plan.proved
    with pytest.raises(PlanError, match="another trace"):
        ServingPlan.of(requests(2, 2, 3), plan_step(recording.trace), "a")
