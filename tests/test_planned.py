"""The planned allocator on the CPU: recorded, placed and served steps of a real model, and all that can go wrong."""

import gc
import json
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from memo_hf.allocator.memory import DeviceMemory
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.allocator.planned import PlannedAllocator
from memo_hf.allocator.recording import PhaseLabel
from memo_hf.allocator.serving_plan import PlannedRequest, ServingPlan
from memo_hf.allocator.solver import Solver
from memo_hf.errors import MemoError, PlanError
from memo_hf.planner.trace import Event, Trace

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.silu(self.inner(x)))


class Model(nn.Module):
    def __init__(self, width=24, layers=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x, mark):
        for number, block in enumerate(self.blocks):
            mark(f"forward {number}")
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda grad, number=number: mark(f"backward {number}"))
        mark("loss")
        return x.pow(2).mean()


class Training:
    """A model, an optimizer, and steps that report to a planned allocator or to none."""

    def __init__(self, allocator=None):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.allocator = allocator
        self.generator = torch.Generator().manual_seed(1)

    def mark(self, phase):
        if self.allocator:
            self.allocator.mark(phase)

    def step(self, tokens=50, extra=None):
        if self.allocator:
            self.allocator.begin_step(f"{tokens} tokens")
        x = torch.randn(tokens, 24, generator=self.generator)
        loss = self.model(x, self.mark)
        if extra:
            extra()
        loss.backward()
        self.mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def parameters(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def make():
    """Makes planned allocators and closes them."""
    made = []

    def allocator(**kwargs):
        lines = []
        made.append(PlannedAllocator("cpu", kwargs.pop("fingerprint", "tiny"), report=lines.append, **kwargs))
        made[-1].lines = lines
        return made[-1]

    yield allocator
    for one in made:
        one.close()


def served(training, tokens=50):
    """Trains until the steps of this shape are served."""
    for _ in range(2):
        training.step(tokens)
    training.allocator.end_step()
    assert training.allocator.finish_planning(60)


def counts_of(allocator, run):
    before = allocator.stats
    run()
    allocator.end_step()
    after = allocator.stats
    names = ("num_planned", "num_missed", "num_conflicts")
    return [getattr(after, name) - getattr(before, name) for name in names]


def test_training_is_bit_equal_and_served_from_the_plan(make):
    plain, allocator = Training(), make()
    training = Training(allocator)
    losses = [plain.step() for _ in range(8)]
    served(training)
    again = []
    planned, missed, conflicts = counts_of(allocator, lambda: again.extend(training.step() for _ in range(6)))
    assert planned > 6 * 100
    assert missed + conflicts <= 0.001 * planned
    assert again == losses[2:]
    for left, right in zip(plain.parameters(), training.parameters(), strict=True):
        assert torch.equal(left, right)
    assert "least possible" in allocator.lines[1] and "1.0000 of what is alive" in allocator.lines[1]


def test_the_arena_is_what_is_alive(make):
    """Planned requests fill the arena at its fullest: the peak of what is planned equals its size, up to alignment."""
    allocator = make()
    training = Training(allocator)
    served(training)
    training.step()
    plan = allocator.plan
    assert plan.arena_bytes == plan.lower_bound and plan.proved
    allocator.end_step()
    assert allocator.stats.arena_bytes == plan.arena_bytes


def test_gradients_of_every_step_are_equal(make):
    plain, allocator = Training(), make()
    training = Training(allocator)
    served(training)
    plain.step(), plain.step()
    x = torch.randn(50, 24)
    for one in (plain, training):
        if one.allocator:
            one.allocator.begin_step("50 tokens")
        one.model(x, one.mark).backward()
    for left, right in zip(plain.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    allocator.end_step()


def test_requests_that_outlive_the_step_and_the_allocator(make):
    allocator = make()
    training = Training(allocator)
    served(training)
    kept = []
    hook = training.model.blocks[1].register_forward_hook(lambda module, args, out: kept.append(out))
    for _ in range(3):
        training.step()
    values = [one.detach().double().sum().item() for one in kept]
    assert len({one.data_ptr() for one in kept}) == 3
    training.step()
    allocator.close()
    hook.remove()
    plain = [torch.ones(5000) for _ in range(20)]
    assert [one.detach().double().sum().item() for one in kept[:3]] == values
    with AllocatorMeter() as meter:
        held = meter.live_bytes
        kept.clear()
        gc.collect()
        assert meter.live_bytes < held
    del plain


def test_one_request_too_many_costs_one_miss(make):
    allocator = make()
    training = Training(allocator)
    served(training)
    counts_of(allocator, training.step)
    usual = counts_of(allocator, training.step)
    planned, missed, conflicts = counts_of(allocator, lambda: training.step(extra=lambda: torch.empty(12345)))
    assert (planned, missed, conflicts) == (usual[0], usual[1] + 1, usual[2])
    assert allocator.stats.misses_by_phase["loss"] >= 1


def test_evaluation_and_other_shapes(make):
    """# case 109: lengths outside the plan are served dynamically, and get plans of their own."""
    allocator = make()
    training, plain = Training(allocator), Training()
    for one in (training, plain):
        for number, tokens in enumerate([50, 50, 30, 50, 70, 30, 50, 30, 70, 50, 30]):
            one.step(tokens)
            if one.allocator:
                one.allocator.end_step()
                assert one.allocator.finish_planning(60)
            with torch.no_grad():
                one.model(torch.ones(40, 24), lambda phase: None)
            if one.allocator and number == 8:
                before = allocator.stats
    after = allocator.stats
    assert after.num_missed == before.num_missed and after.num_conflicts == before.num_conflicts
    assert after.num_planned > before.num_planned + 200
    for left, right in zip(plain.parameters(), training.parameters(), strict=True):
        assert torch.equal(left, right)


def test_gradient_accumulation_visits_phases_again(make):
    allocator = make()
    training = Training(allocator)

    def step():
        allocator.begin_step("two micro-batches")
        for _ in range(2):
            training.model(torch.ones(50, 24), allocator.mark).backward()
        allocator.mark("optimizer")
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)

    step(), step()
    allocator.end_step()
    assert allocator.finish_planning(60)
    step()
    planned, missed, conflicts = counts_of(allocator, step)
    assert planned > 200 and missed + conflicts == 0


def test_a_thread_that_marks_nothing_changes_nothing(make):
    """A data loader's requests come at no fixed place."""
    allocator = make()
    training = Training(allocator)
    stop = threading.Event()

    def load():
        while not stop.is_set():
            torch.empty(1000)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        served(training)
        training.step()
        planned, missed, conflicts = counts_of(allocator, training.step)
    finally:
        stop.set()
        thread.join()
    assert planned > 100 and missed + conflicts == 0


def test_blocks_freed_by_another_thread_may_be_late(make):
    """A copy thread lets go of what it has copied when it likes, within the next phase: nothing conflicts."""
    allocator = make()
    training = Training(allocator)
    handed, threads, late = [], [], False

    def let_go_of(number):
        go, thread = threads[number]
        go.set()
        thread.join()

    def copy_thread(number, go):
        go.wait(10)
        handed[number] = None

    def hand_over(module, args, out):
        number, go = len(handed), threading.Event()
        handed.append(torch.zeros(4000))
        threads.append((go, threading.Thread(target=copy_thread, args=(number, go))))
        threads[-1][1].start()
        if not late:
            let_go_of(number)
        elif number > 0:
            let_go_of(number - 1)

    for block in training.model.blocks:
        block.register_forward_hook(hand_over)

    def step():
        handed.clear()
        threads.clear()
        training.step(extra=lambda: let_go_of(3))

    step(), step()
    allocator.end_step()
    assert allocator.finish_planning(60)
    late = True
    step()
    planned, missed, conflicts = counts_of(allocator, step)
    assert planned > 100 and missed + conflicts == 0


def test_plans_are_saved_and_used_by_the_next_run(make, tmp_path):
    first = make(folder=tmp_path)
    served(Training(first))
    first.begin_step("50 tokens")
    (path,) = tmp_path.iterdir()
    first.close()
    second = make(folder=tmp_path)
    training = Training(second)
    training.step()  # the optimizer makes its state here, which the plan does not know
    planned, missed, conflicts = counts_of(second, training.step)
    assert planned > 100 and missed + conflicts <= 1
    assert second.lines == [f"memo_hf: addresses of {path} are used"]
    second.close()

    other = make(folder=tmp_path, fingerprint="another model")
    Training(other).step()
    assert other.lines == [] and other.plan is None
    other.close()

    path.write_text(path.read_text()[:-50])  # cut short
    third = make(folder=tmp_path)
    training = Training(third)
    training.step()
    assert "is damaged" in third.lines[0] and third.plan is None
    served(training)
    training.step()
    assert third.plan is not None
    assert ServingPlan.load(path, third.plan.fingerprint) == third.plan  # written anew


def small_plan(**changes):
    requests = (PlannedRequest(PhaseLabel("forward 0"), 0, 100, 0), PlannedRequest(PhaseLabel("loss", 1), 0, 50, 512))
    return ServingPlan(**({"fingerprint": "a", "requests": requests, "arena_bytes": 1024} | changes | PROVED))


PROVED = {"lower_bound": 1024, "proved": True}


def test_plan_files_are_checked(tmp_path):
    path = tmp_path / "plans" / "plan.json"
    small_plan().save(path)
    assert ServingPlan.load(path, "a") == small_plan()
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]
    with pytest.raises(PlanError, match="made for 'a', not for 'b'"):
        ServingPlan.load(path, "b")
    good = json.loads(path.read_text())
    for key, value, message in [
        ("format", 99, "format 99"),
        ("requests", [[0, 0, 100, -512]], "-512 is not a whole number"),
        ("requests", [[0, 0, 100, 0.5]], "0.5 is not a whole number"),
        ("requests", [[0, 2**32, 100, 0]], "out of range"),
        ("requests", [[0, 0, 0, 0]], "out of range"),
        ("requests", [[7, 0, 1, 0]], "damaged"),
        ("requests", [[0, 0, 1]], "damaged"),
        ("arena_bytes", 2**70, "out of range"),
        ("phases", None, "damaged"),
    ]:
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(PlanError, match=message):
            ServingPlan.load(path, "a")
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(PlanError, match="damaged.*delete it"):
        ServingPlan.load(path, "a")


def test_the_allocator_refuses_a_wrong_table():
    memory = DeviceMemory(CPU)
    try:
        with pytest.raises(PlanError, match="request 1 ends behind the arena; plan again"):
            memory.add_plan(small_plan(arena_bytes=512))
        assert memory.add_plan(small_plan()) >= 0
        with pytest.raises(MemoError, match="being planned for another model"):
            DeviceMemory(CPU)
    finally:
        memory.close()
    with pytest.raises(MemoError, match="'cpu' and 'cuda'"):
        DeviceMemory(torch.device("meta"))


def test_an_arena_that_finds_no_memory_is_done_without(make):
    allocator = make()
    training = Training(allocator)
    served(training)
    training.step()
    allocator.end_step()
    shape = allocator._shapes["50 tokens"]
    shape.number = allocator._memory.add_plan(ServingPlan("big", shape.plan.requests, 2**60, 1, False))
    planned, *_ = counts_of(allocator, training.step)
    assert planned == 0 and "it is served without" in allocator.lines[-1]


def test_steps_that_differ_too_much_are_not_planned_forever(make):
    """Each step asks for other sizes: the plan is made again, then given up, and every step is right all the same."""
    allocator = make()
    size = [0]

    def step():
        allocator.begin_step("always")
        allocator.mark("forward 0")
        size[0] += 1
        held = [torch.full((size[0] * 10 + i,), float(i)) for i in range(30)]
        assert all((one == i).all() for i, one in enumerate(held))

    for _ in range(30):
        step()
        allocator.end_step()
        assert allocator.finish_planning(60)
    assert sum("planning the addresses" in line for line in allocator.lines) == 4
    assert "these steps are served without" in allocator.lines[-1]
    assert allocator.plan is None


def test_a_failing_solver_leaves_training_alone(make, monkeypatch):
    real = subprocess.Popen

    def broken(command, **kwargs):
        return real([sys.executable, "-c", "raise SystemExit('no addresses today')"], **kwargs)

    monkeypatch.setattr("memo_hf.allocator.solver.subprocess.Popen", broken)
    allocator = make()
    training = Training(allocator)
    served(training)
    monkeypatch.undo()
    training.step()
    assert allocator.lines[1] == "memo_hf: planning addresses failed with status 1: no addresses today"
    served(training)  # tried again
    training.step()
    assert allocator.plan is not None


def test_the_solving_process_loads_no_torch_and_is_ended():
    events = (Event("malloc", 0, 5000, "forward 0", 0, 0), Event("free", 0, 0, "forward 0", 0, 0))
    solver = Solver(Trace(events), 5)
    try:
        assert solver.wait(60)
        placement = solver.poll()
        assert placement.offsets == (0,) and placement.peak == 5120
        code = "import sys, memo_hf.allocator.solver; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    finally:
        solver.close()
    running = Solver(Trace(events), 5)
    running.close()
    assert running._process.poll() is not None


def test_step_without_phases_is_not_planned(make):
    allocator = make()
    for _ in range(4):
        allocator.begin_step("nothing")
        torch.empty(10)
    allocator.end_step()
    assert allocator.lines == ["memo_hf: addresses are not planned: no request came in a marked phase"]
