"""Sessions with the planned allocator: the same gradients to the bit, served from plans, and nothing left behind."""

import gc
import subprocess
import sys

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

import memo_hf
from memo_hf.allocator.memory import DeviceMemory
from memo_hf.allocator.native import NativeLibraryError
from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError, HostMemoryError, MemoError, UnsupportedModelError
from memo_hf.serving import ServingStats
from tests.harness.sessions import REBUILD, SETTINGS, TOKEN, assert_same_bits, enabled, simulate, small
from tests.tiny_models import gradients, random_ids

IDS = random_ids(2, 13)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Opens sessions with the planned allocator, and closes them."""
    monkeypatch.setattr("memo_hf.serving.PLANNING_SECONDS", 0.1)
    sessions = []

    def open_session(model, **settings):
        settings = {**TOKEN, "plan_folder": str(tmp_path), "allocator": "planned", **settings}
        sessions.append(enabled(model, **settings))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.close()


class Run:
    """A model in training; `step` is one optimizer step, of as many micro-batches as it is given."""

    def __init__(self, model=None):
        self.model = small() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, *batches):
        for ids in batches or (IDS,):
            self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def serve(self, session, *batches):
        """Steps until the plan is there and used."""
        self.step(*batches)
        self.step(*batches)
        assert session.serving.finish_planning(60)
        self.step(*batches)

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def requests(session):
    """Requests since the allocator was loaded: planned, missed and in conflict."""
    stats = session.serving._allocator.stats
    return stats.num_planned, stats.num_missed, stats.num_conflicts


def during(session, run):
    before = requests(session)
    run()
    return tuple(now - then for now, then in zip(requests(session), before, strict=True))


@pytest.mark.parametrize("mode", SETTINGS)
def test_training_is_bit_equal_and_served(planned, mode):
    settings = SETTINGS[mode]
    stock, run = Run(), Run()
    enabled(stock.model, **settings)
    for _ in range(8):
        stock.step()
    session = planned(run.model, **settings)
    run.serve(session)
    served, missed, conflicts = during(session, lambda: [run.step() for _ in range(4)])
    assert served > 4 * 100 and missed == conflicts == 0  # the copy thread frees nothing
    stats = session.stats.serving
    assert stats.allocator == "planned" and stats.served_share == 1.0
    assert stats.arena_bytes > 0 and stats.planned_bytes > 0 and stats.dynamic_bytes > 0
    assert "planned allocator: " in session.report() and "of requests served there" in session.report()
    run.step()
    assert_same_bits(run.weights(), stock.weights())
    assert_same_bits(gradients(run.model, IDS), gradients(stock.model, IDS))


def test_planned_by_itself_where_a_run_is_long(planned, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("memo_hf.serving.monotonic", lambda: now[0])
    stock, run, other = Run(), Run(), Run()
    enabled(stock.model, allocator="stock", **TOKEN)
    session = planned(run.model, allocator=None)
    for done in range(3):
        assert session.stats.serving == ServingStats(
            "stock", "addresses are planned after 60 seconds of training on a CPU"
        )
        now[0] = 1000.0 + 29.0 * done  # since the first step
        run.step(IDS, IDS)
    now[0] += 2.1
    run.serve(session, IDS, IDS)
    assert during(session, lambda: run.step(IDS, IDS))[1:] == (0, 0)
    assert session.stats.serving.reason == "it pays" and session.stats.serving.served_share == 1.0
    assert "planned allocator: " in session.report()
    late = planned(other.model, allocator=None)
    other.step()  # a session that comes late has its own first minute
    assert "60 seconds" in late.stats.serving.reason
    now[0] += 60
    other.step()
    assert late.stats.serving.allocator == "stock" and "planned for another model" in late.stats.serving.reason
    for _ in range(7):
        stock.step(IDS, IDS)
    assert_same_bits(run.weights(), stock.weights())


def test_by_itself_without_its_library_it_is_stock(planned, monkeypatch):
    monkeypatch.setattr("memo_hf.serving.SECONDS_BEFORE_PLANNING", 0)

    def missing():
        raise NativeLibraryError("not built")

    monkeypatch.setattr("memo_hf.allocator.memory.native.load_cpu_library", missing)
    run = Run()
    session = planned(run.model, allocator=None)
    run.step()
    run.step()
    assert session.stats.serving.allocator == "stock" and "not built" in session.stats.serving.reason
    assert "planned allocator" not in session.report()


@pytest.mark.parametrize("settings", [TOKEN, REBUILD], ids=["token", "rebuild"])
def test_gradients_over_copies_in_any_order(planned, monkeypatch, settings):
    """Fetched and offloaded memory at planned addresses, with copies that run at random legal moments over poison."""
    stock = small()
    enabled(stock, **settings)
    expected = gradients(stock, IDS)
    simulate(monkeypatch, seed=3)
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    session = planned(run.model, **settings)
    run.serve(session)
    for _ in range(4):
        assert_same_bits(gradients(run.model, IDS), expected)
    assert session.stats.serving.planned_bytes > 0


def test_micro_batches_are_one_step(planned):
    run, stock = Run(), Run()
    batches = [IDS, random_ids(2, 10), IDS]
    enabled(stock.model, **TOKEN)
    session = planned(run.model)
    run.serve(session, *batches)
    served, missed, _ = during(session, lambda: run.step(*batches))
    assert served > 3 * 100 and missed == 0
    assert len(session.serving._allocator._shapes) == 1
    for _ in range(4):
        stock.step(*batches)
    assert_same_bits(run.weights(), stock.weights())


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_stay_until_backward(planned, keep):
    """zero_grad between forward and backward, or with gradients kept as zeros: steps still end at the optimizer's."""
    run = Run()
    session = planned(run.model)

    def step():
        loss = run.model(input_ids=IDS, labels=IDS).loss
        run.optimizer.zero_grad(set_to_none=not keep)
        loss.backward()
        run.optimizer.step()

    for _ in range(4):
        step()
        assert session.serving.finish_planning(60)
    served, missed, _ = during(session, step)
    assert served > 100 and missed == 0


def test_optimizers_within_backward_and_one_after_the_other(planned):
    model = small()
    first, *others = model.parameters()
    inside = torch.optim.AdamW([first], lr=1e-2)

    def step_now(parameter):
        inside.step()
        inside.zero_grad()

    first.register_post_accumulate_grad_hook(step_now)
    after = [torch.optim.AdamW(others[::2], lr=1e-2), torch.optim.AdamW(others[1::2], lr=1e-2)]
    session = planned(model)

    def step():
        model(input_ids=IDS, labels=IDS).loss.backward()
        for optimizer in after:
            optimizer.step()
        for optimizer in after:
            optimizer.zero_grad()

    step(), step()
    assert session.serving.finish_planning(60)
    step()
    served, missed, _ = during(session, step)
    (shape,) = session.serving._allocator._shapes.values()
    phases = {(request.phase.name, request.phase.visit) for request in shape.plan.requests}
    assert {("backward 0", 0), ("optimizer", 0), ("optimizer", 1)} <= phases and ("optimizer", 2) not in phases
    assert served > 100 and missed == 0


def test_evaluation_and_lengths_in_turn(planned):
    """# case 109: other lengths get plans of their own; evaluation is served dynamically, gradients are equal."""
    stock, run = Run(), Run()
    enabled(stock.model, **TOKEN)
    session = planned(run.model)
    lengths = [13, 13, 8, 13, 11, 8, 13, 8, 11, 8, 13, 11, 11, 13]
    for number, length in enumerate(lengths):
        for one in (stock, run):
            one.step(random_ids(2, length))
        assert session.serving.finish_planning(60)
        if number % 3 == 0:
            served, missed, conflicts = during(session, lambda: evaluate(run.model))
            assert served == missed == conflicts == 0
    assert_same_bits(run.weights(), stock.weights())
    assert {name.split(" tokens")[0] for name in session.serving._allocator._shapes} == {"2 x 13", "2 x 8", "2 x 11"}
    served, missed, _ = during(session, lambda: run.step(random_ids(2, 8)))
    assert served > 100 and missed == 0


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    model.train()


def test_a_batch_that_runs_untouched_is_served_dynamically(planned):
    run = Run()
    session = planned(run.model, min_tokens=20)
    run.serve(session)
    assert during(session, lambda: run.step(random_ids(1, 12))) == (0, 0, 0)
    assert session.stats.stock_forwards == 1
    assert during(session, run.step)[0] > 100


def test_the_next_run_uses_the_plan(planned, tmp_path):
    first = Run()
    session = planned(first.model)
    first.serve(session)
    session.close()
    (file,) = tmp_path.iterdir()
    second = Run()
    session = planned(second.model)
    second.step()  # makes the optimizer's state
    assert during(session, second.step)[0] > 100
    session.close()
    assert list(tmp_path.iterdir()) == [file]

    other = Run(small(layers=2))
    session = planned(other.model)
    other.step()
    assert during(session, other.step) == (0, 0, 0)
    session.close()

    file.write_text(file.read_text()[:200])
    third = Run()
    session = planned(third.model)
    third.step()
    assert during(session, third.step) == (0, 0, 0)  # made anew instead


def test_tensors_outlive_the_session(planned):
    """# case 104: gradients at planned addresses are good after the session, its plan and its allocator are gone."""
    run = Run()
    session = planned(run.model)
    run.serve(session)
    run.model(input_ids=IDS, labels=IDS).loss.backward()
    held = {name: parameter.grad for name, parameter in run.model.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in held.items()}
    session.close()
    session.close()
    del session, run
    gc.collect()
    filler = [torch.ones(3000) for _ in range(50)]
    assert_same_bits(held, copies)
    del filler


def test_close_puts_back_what_was_there(planned):
    run = Run()
    session = planned(run.model)
    run.serve(session)
    last = session.stats.serving
    session.close()
    assert session.stats.serving.served_share == last.served_share
    memory = DeviceMemory(torch.device("cpu"))  # nothing plans this device any more
    memory.close()
    before = memory.stats.dynamic_bytes
    torch.ones(1000)
    run.step()
    assert memory.stats.dynamic_bytes == before


def test_a_session_that_nobody_closed_ends_with_its_model(planned, tmp_path):
    run = Run()
    enabled(run.model, allocator="planned", plan_folder=str(tmp_path), **TOKEN)
    run.step()
    other = Run(small(layers=2))
    session = planned(other.model)
    with pytest.raises(MemoError, match="being planned for another model"):
        other.step()
    del run
    gc.collect()
    other.step()
    assert session.stats.serving.allocator == "planned"


def test_errors_within_a_step_leave_serving_intact(planned):
    """# case 93: host memory ends in the middle of a planned step; the steps after it are served and right."""
    run, stock = Run(), Run()
    session = planned(run.model)
    run.serve(session)
    budget, session.host_budget_bytes = session.host_budget_bytes, 10
    with pytest.raises(HostMemoryError):
        run.step()
    session.host_budget_bytes = budget
    enabled(stock.model, **TOKEN)
    for _ in range(3):
        stock.step()
    served, missed, _ = during(session, run.step)
    stock.step()
    assert served > 100 and missed == 0
    assert_same_bits(run.weights(), stock.weights())


def test_trainer_with_evaluation(tmp_path):
    """The Trainer needs to do nothing: optimizer steps and evaluation are seen, and the weights are the same."""
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in random_ids(8, 13)]
    weights, served = [], []
    for allocator in ("stock", "planned"):
        arguments = TrainingArguments(
            tmp_path / allocator, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            eval_strategy="steps", eval_steps=3, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        memo = MemoConfig(allocator=allocator, plan_folder=str(tmp_path), **TOKEN)
        trainer = memo_hf.MemoTrainer(small(), arguments, train_dataset=rows, eval_dataset=rows, memo=memo)
        trainer.add_callback(WaitForPlans(trainer))
        trainer.train()
        weights.append({name: parameter.detach() for name, parameter in trainer.model.named_parameters()})
        served.append(trainer.memo_stats.serving.served_share)
    assert_same_bits(*weights)
    assert served[0] is None and served[1] > 0.9


class WaitForPlans(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, *args, **kwargs):
        assert self.trainer.memo_session.serving.finish_planning(60)


def test_stock_touches_nothing(monkeypatch):
    monkeypatch.setattr("memo_hf.serving.SECONDS_BEFORE_PLANNING", 0)
    run = Run()
    session = enabled(run.model, allocator="stock", **TOKEN)
    run.step()
    run.step()
    assert session.stats.serving == ServingStats() == ServingStats("stock", "asked for", None, 0, 0, 0)
    assert session.serving._allocator is None
    session.close()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="allocator is 'fast'; it must be one of"):
        MemoConfig(allocator="fast")


def test_compilation_is_refused_with_the_planned_allocator(planned):
    """# case 102"""
    model = small()
    model.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="compiled"):
        planned(model)
    with pytest.raises(UnsupportedModelError, match="compiled"):
        memo_hf.enable(torch.compile(small(), backend="eager"), MemoConfig(allocator="planned"))


def test_cuda_that_is_in_use_is_refused(planned, monkeypatch):
    """# case 98: the error says which line to add and where."""
    model = small()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with pytest.raises(MemoError, match=r"memo_hf.allocator.cuda.install\(\) before CUDA is first used"):
        planned(model)
    monkeypatch.undo()
    session = planned(model)  # nothing is left of the attempt
    session.close()


def test_cuda_that_is_not_in_use_gets_the_allocator(planned, monkeypatch):
    installed = []
    monkeypatch.setattr("memo_hf.serving.cuda.install", lambda: installed.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    planned(small())
    assert installed == [True]


def test_planned_without_the_library_says_so(planned, monkeypatch):
    def missing():
        raise MemoError("not built")

    monkeypatch.setattr("memo_hf.serving.native.load_cpu_library", missing)
    with pytest.raises(MemoError, match="not built"):
        planned(small())


def test_serving_initialises_no_cuda():
    """# case 98"""
    code = "import torch, memo_hf.session, memo_hf.serving; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
