"""Kind A of the cases: whole sessions under late copies in any legal order, over poison, and on real threads."""

import threading

import pytest
import torch

import memo_hf
import memo_hf.session
from memo_hf.swap import SwapGroup
from tests.harness.sessions import (
    IDS,
    REBUILD,
    SETTINGS,
    TOKEN,
    assert_nothing_left,
    assert_same_bits,
    enabled,
    kept,
    simulate,
    small,
)
from tests.tiny_models import gradients, random_ids, worst_relative_error


def check_any_order(monkeypatch, settings, seed=0, eagerness=0.3, steps=2, family="llama", short=False):
    """Gradients of `steps` steps equal those of the same chunks kept on the device, and the plain model's nearly."""
    model = small(family)
    plain = gradients(model, IDS)
    expected = kept(model, settings=settings)
    backends = simulate(monkeypatch, seed, eagerness, short)
    session = enabled(model, **settings)
    assert {stats.mode for stats in session.stats.layers} == {"layer" if settings.get("mode") == "layer" else "token"}
    for _ in range(steps):
        assert_same_bits(gradients(model, IDS), expected)
    assert worst_relative_error(expected, plain) < 1e-5
    assert session.stats.swapped_bytes == session.stats.planned_bytes > 0  # case 43
    assert_nothing_left(session)
    memo_hf.disable(model)
    assert not backends[0].faults and backends[0].closed


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed, eagerness", [(0, 0.0), (1, 0.3), (2, 0.9)])
def test_any_legal_order_gives_the_same_gradients(monkeypatch, settings, seed, eagerness):  # cases 1, 3, 7, 8 and 10
    check_any_order(monkeypatch, SETTINGS[settings], seed, eagerness)


@pytest.mark.parametrize("settings", [TOKEN, REBUILD], ids=["token", "rebuild"])
def test_device_memory_that_goes_chunk_by_chunk(monkeypatch, settings):
    check_any_order(monkeypatch, settings, eagerness=0.0, short=True)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_ends_of_the_swap_fraction(monkeypatch, fraction):
    check_any_order(monkeypatch, {**TOKEN, "swap_fraction": fraction, "unswapped_layers": 0}, eagerness=0.1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_worker_thread_gives_the_same_gradients(settings):
    model = small()
    expected = kept(model, settings=SETTINGS[settings])
    session = enabled(model, **SETTINGS[settings])
    for _ in range(3):
        assert_same_bits(gradients(model, IDS), expected)
    assert_nothing_left(session)


@pytest.mark.parametrize("layers, last_first, settings", [(1, 1, "token"), (3, 0, "rebuild"), (3, 1, "layer")])
def test_two_micro_batches_in_flight(monkeypatch, settings, layers, last_first):  # case 6
    """Both forward passes before either backward pass, in either order."""
    settings = {**SETTINGS[settings], "unswapped_layers": 0}
    model, batches = small(layers=layers), [IDS, random_ids(2, 13, seed=5)]
    one, other = (kept(model, ids, settings=settings) for ids in batches)
    simulate(monkeypatch, eagerness=0.2)
    session = enabled(model, **settings)
    losses = [model(input_ids=ids, labels=ids).loss for ids in batches]
    for loss in reversed(losses) if last_first else losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, one[name] + other[name], rtol=1e-6, atol=1e-7)
    del loss, losses
    assert_nothing_left(session)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_graph_is_used_twice(monkeypatch, settings):  # cases 1 and 30
    model = small()
    expected = kept(model, settings=SETTINGS[settings])
    simulate(monkeypatch, eagerness=0.2)
    session = enabled(model, **SETTINGS[settings])
    loss = model(input_ids=IDS, labels=IDS).loss
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    loss.backward()
    assert_nothing_left(session)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def losses_of_training(num_steps, **settings):
    model = small(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = enabled(model, **settings)
    losses = []
    for step in range(num_steps):
        ids = random_ids(1, 8 + step % 5, seed=step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, session.stats


def test_a_long_training_is_equal_to_the_bit(monkeypatch):  # case 11
    settings = dict(swap_fraction=0.5, chunk_size=6)
    expected, _ = losses_of_training(20, **settings, unswapped_layers=99)
    on_thread, stats = losses_of_training(20, **settings, unswapped_layers=0)
    assert on_thread == expected and stats.total_swapped_bytes > 0 and stats.forwards == 20
    simulate(monkeypatch)
    assert losses_of_training(20, **settings, unswapped_layers=0)[0] == expected


def test_host_memory_is_mapped_in_the_first_two_steps_only():  # case 13
    model = small()
    session = enabled(model, **TOKEN)
    counts = []
    for _ in range(5):
        gradients(model, IDS)
        counts.append(session.engine(IDS.device).stats.host_allocations)
    assert counts[1:] == [counts[1]] * 4 and counts[0] > 0


def test_two_models_take_turns():
    """Two sessions in one process, one forward pass of the other between each forward and backward pass."""
    models = small(), small("qwen2", seed=3)
    expected = [kept(model, settings=TOKEN) for model in models]
    sessions = [enabled(model, **TOKEN) for model in models]
    for _ in range(2):
        losses = [model(input_ids=IDS, labels=IDS).loss for model in models]
        for model, loss, theirs in zip(models, losses, expected, strict=True):
            model.zero_grad()
            loss.backward()
            assert_same_bits({name: p.grad for name, p in model.named_parameters()}, theirs)
    del losses, loss
    for session in sessions:
        assert_nothing_left(session)
    memo_hf.disable(models[0])
    assert_same_bits(gradients(models[1], IDS), expected[1])


def test_two_models_on_two_threads():
    models = small(), small(seed=3)
    expected = [kept(model, settings=TOKEN) for model in models]
    failures = []

    def work(model, theirs):
        try:
            for _ in range(3):
                assert_same_bits(gradients(model, IDS), theirs)
        except BaseException as failure:  # a thread's exception would be lost
            failures.append(failure)

    for model in models:
        enabled(model, **TOKEN)
    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


def test_what_autograd_saves_from_the_middle_of_a_storage(monkeypatch):  # case 4
    """Labels are saved as an int64 view that starts at the second token, and freed by the model before backward."""
    backends = simulate(monkeypatch, eagerness=0)
    engine = memo_hf.session.SwapEngine(torch.device("cpu"), 2**20)
    group, scores = engine.open_group(), torch.randn(60, 100, requires_grad=True)
    labels = torch.arange(1, 61).roll(30)
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(scores[1:], labels[1:]), scores)
    with torch.autograd.graph.saved_tensors_hooks(group.put, lambda handle: handle.get()):
        loss = torch.nn.functional.cross_entropy(scores[1:], labels[1:])
    group.seal()
    del labels
    for _ in range(2):
        engine.open_group().put(torch.full((60,), -1))  # lets the first group's device memory go, and takes it
    assert torch.equal(torch.autograd.grad(loss, scores)[0], expected[0])
    assert not backends[0].faults
    engine.close()


def note_groups(monkeypatch):
    """The swap groups that are opened from now on."""
    groups, init = [], SwapGroup.__init__
    monkeypatch.setattr(SwapGroup, "__init__", lambda group, *args: groups.append(group) or init(group, *args))
    return groups


def num_on_the_device(groups):
    return sum(any(stored.offload.buffer is not None for stored in group._live()) for group in groups)


def test_rounding_buffers_are_two(monkeypatch):
    """Copies that never run by themselves: two groups at most hold device memory (section 4.1)."""
    backends, groups, held, model = simulate(monkeypatch, eagerness=0), note_groups(monkeypatch), [], small(layers=5)
    enabled(model, **{**TOKEN, "unswapped_layers": 0})
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: held.append(num_on_the_device(groups)))
    loss = model(input_ids=IDS, labels=IDS).loss
    assert held == [1, 2, 2, 2, 2] and not backends[0].faults
    del loss


def test_an_address_within_a_group(monkeypatch):  # case 33
    """Tensors that die while their group is open: the next one may lie where they lay."""
    simulate(monkeypatch, eagerness=1.0)
    engine = memo_hf.session.SwapEngine(torch.device("cpu"), 2**24)
    group, handles = engine.open_group(), []
    for number in range(50):
        handles.append(group.put(torch.full((1000,), float(number))))
        engine.let_go()
    assert all(torch.all(handle.get() == number) for number, handle in enumerate(handles))
    engine.close()


def test_a_layer_whose_backward_does_not_read_what_it_fetched(monkeypatch):
    """The copy is under way when its layer is over: its memory waits for it."""
    backends, groups, model = simulate(monkeypatch, eagerness=0), note_groups(monkeypatch), small()
    enabled(model, **{**TOKEN, "unswapped_layers": 0})
    loss = model(input_ids=IDS, labels=IDS).loss
    for group in 2 * groups:
        group.prefetch()
        group.release()
    backends[0]._eagerness = 1.0
    loss.backward()
    assert not backends[0].faults
