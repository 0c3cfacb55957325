"""Kind B of the cases: sessions over steps of every kind and exceptions, and the memory that they give back."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import memo_hf
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.errors import MemoError
from memo_hf.layers.step import LayerRecord
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
from tests.harness.simulated_copies import settle
from tests.tiny_models import gradients, random_ids


def count_packs(monkeypatch):
    """A function that says how many tensors were handed to swap groups since."""
    count, put = [0], SwapGroup.put

    def counting(*args, **options):
        count[0] += 1
        return put(*args, **options)

    monkeypatch.setattr(SwapGroup, "put", counting)
    return lambda: count[0]


def outputs_without_training(model):
    """Logits in evaluation and under no_grad, and generated tokens."""
    model.eval()
    found = [model(input_ids=IDS).logits.detach(), model.generate(IDS[:1, :5], max_new_tokens=3, do_sample=False)]
    with torch.inference_mode():
        found.append(model(input_ids=IDS).logits.clone())
    model.train()
    with torch.no_grad():
        found.append(model(input_ids=IDS, labels=IDS).loss)
    return found


def test_evaluation_is_untouched_before_and_between_steps(monkeypatch):  # cases 24, 25 and 26
    model, num_packs = small(), count_packs(monkeypatch)
    before = outputs_without_training(model)
    expected = kept(model, settings=TOKEN)
    session, packs = enabled(model, **TOKEN), num_packs()
    for step in range(2):
        for ours, theirs in zip(outputs_without_training(model), before, strict=True):
            assert torch.equal(ours, theirs)
        assert num_packs() == packs and session.stats.forwards == step
        assert_same_bits(gradients(model, IDS), expected)
        packs = num_packs()
    assert packs > 0


def test_evaluation_between_forward_and_backward():
    model = small()
    expected = kept(model, settings=TOKEN)
    session = enabled(model, **TOKEN)
    loss = model(input_ids=IDS, labels=IDS).loss
    outputs_without_training(model)
    loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    del loss
    assert_nothing_left(session)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_graph_that_never_sees_backward(monkeypatch, settings):  # case 16
    """Losses that are dropped, or do not depend on the layers, leave nothing behind."""
    simulate(monkeypatch)
    model = small()
    session = enabled(model, **SETTINGS[settings])
    for step in range(3):
        output = model(input_ids=IDS, output_hidden_states=True)
        if step == 1:
            output.hidden_states[0].sum().backward()  # an unused head, unused layers
        if step == 2:
            output.hidden_states[1].sum().backward()  # the second layer's backward never runs
        del output
        assert_nothing_left(session)
    expected = kept_by_another(settings)
    assert_same_bits(gradients(model, IDS), expected)


def kept_by_another(settings, **changes):
    return kept(small(**changes), settings=SETTINGS[settings])


def test_what_is_trained_changes_from_step_to_step(monkeypatch):  # case 18
    """A branch gets gradients in some steps and not in others."""
    simulate(monkeypatch)
    model = small()
    session = enabled(model, **TOKEN)
    for step in range(4):
        model.model.embed_tokens.requires_grad_(step % 2 == 0)
        model.model.layers[0].requires_grad_(step % 3 != 0)
        model.model.layers[1].mlp.requires_grad_(step != 1)
        ours = gradients(model, IDS)
        memo_hf.disable(model)
        assert_same_bits(ours, kept(model, settings=TOKEN))
        session = enabled(model, **TOKEN)
        gradients(model, IDS)
        assert_nothing_left(session)


def test_experts_that_get_no_tokens_leave_nothing():  # case 19
    model = small("mixtral", layers=2)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[2:] = -100 * layer.mlp.gate.weight.data[0]
    expected = kept(model, settings=TOKEN)
    session = enabled(model, **TOKEN)
    assert flat_over(6, lambda step: gradients(model, IDS))
    assert_same_bits(gradients(model, IDS), expected)
    assert_nothing_left(session)


def flat_over(num_steps, step):
    """Whether the live bytes after every step but the first two are the same, with the garbage collector off."""
    live = []
    gc.disable()
    try:
        with AllocatorMeter() as meter:
            for number in range(num_steps):
                step(number)
                live.append(meter.live_bytes)
    finally:
        gc.enable()
    assert live[2:] == [live[2]] * (num_steps - 2), live
    return True


@pytest.mark.parametrize("settings", [*SETTINGS, "kept"])
def test_live_bytes_are_flat(settings):  # cases 19 and 22
    """No cycle keeps anything: the collector is off."""
    model = small(layers=2)
    unswapped, num_steps = 2 if settings == "kept" else 0, 50 if settings == "token" else 5
    session = enabled(model, **{**SETTINGS.get(settings, TOKEN), "unswapped_layers": unswapped})
    assert flat_over(num_steps, lambda step: gradients(model, IDS[:1]))
    assert session.stats.host_bytes == 0
    reserved = session.stats.host_reserved_bytes
    gradients(model, IDS[:1])
    assert session.stats.host_reserved_bytes == reserved


@pytest.mark.parametrize("settings", [*SETTINGS, "kept"])
def test_a_dropped_graph_is_freed_at_once(settings):  # case 22
    """Without its backward pass, and without the collector."""
    model = small(layers=2)
    unswapped = 2 if settings == "kept" else 0
    session = enabled(model, **{**SETTINGS.get(settings, TOKEN), "unswapped_layers": unswapped})
    assert flat_over(4, lambda step: model(input_ids=IDS[:1], labels=IDS[:1]))
    settle(session._engine)
    assert session.stats.host_bytes == 0


def test_another_length_at_each_step():  # case 109
    model = small(layers=2)
    session = enabled(model, **{**TOKEN, "unswapped_layers": 0})
    lengths = torch.randint(2, 40, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    peak = 0
    with AllocatorMeter() as meter:
        for step, length in enumerate([39, *lengths]):
            ids = random_ids(1 + step % 2, length, seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
            del ids
            stats = session.stats
            assert stats.host_bytes == 0 and stats.swapped_bytes == stats.planned_bytes
            peak = max(peak, stats.peak_host_bytes)
            if step == 0:
                live = meter.live_bytes
            assert meter.live_bytes <= live
    assert session.stats.host_reserved_bytes <= 1.6 * peak


@pytest.mark.parametrize("settings, layer", [("token", 0), ("token", 2), ("rebuild", 0), ("layer", 0)])
def test_an_exception_in_forward(monkeypatch, settings, layer):
    simulate(monkeypatch)
    model = small()
    expected = kept(model, settings=SETTINGS[settings])
    session = enabled(model, **SETTINGS[settings])
    for _ in range(2):
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradients(model, IDS)
        hook.remove()
        assert_nothing_left(session)
        assert model.config._attn_implementation == "sdpa"
        assert_same_bits(gradients(model, IDS), expected)


@pytest.mark.parametrize("settings, layer", [("token", 0), ("token", 2), ("rebuild", 0), ("layer", 0)])
def test_an_exception_in_backward(monkeypatch, settings, layer):
    simulate(monkeypatch)
    model = small()
    expected = kept(model, settings=SETTINGS[settings])
    session = enabled(model, **SETTINGS[settings])
    for _ in range(2):
        hook = model.model.layers[layer].mlp.down_proj.register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradients(model, IDS)
        hook.remove()
        assert_nothing_left(session)
        assert_same_bits(gradients(model, IDS), expected)


def test_an_exception_between_forward_and_backward(monkeypatch):
    simulate(monkeypatch)
    model = small()
    expected = kept(model, settings=TOKEN)
    session = enabled(model, **TOKEN)

    def step():
        loss = model(input_ids=IDS, labels=IDS).loss
        raise ZeroDivisionError(f"before the backward pass of {loss.item()}")

    with pytest.raises(ZeroDivisionError):
        step()
    assert_nothing_left(session)
    assert_same_bits(gradients(model, IDS), expected)


def test_a_copy_that_fails_says_so_and_a_new_session_works(monkeypatch):
    model = small()
    expected = kept(model, settings=TOKEN)
    enabled(model, **TOKEN)
    with monkeypatch.context() as broken:
        broken.setattr("memo_hf.swap.cpu_threads.copy_bytes", lambda source, target: 1 / 0)
        with pytest.raises(MemoError, match="copy thread of the swap engine failed.*ZeroDivisionError"):
            gradients(model, IDS)
    memo_hf.disable(model)
    enabled(model, **TOKEN)
    assert_same_bits(gradients(model, IDS), expected)


@pytest.mark.parametrize("order", ["backward first", "disable first"])
def test_backward_inside_and_after_the_session(order):  # case 21
    model = small()
    expected = kept(model, settings=TOKEN)
    enabled(model, **TOKEN)
    loss = model(input_ids=IDS, labels=IDS).loss
    if order == "backward first":
        loss.backward()
        memo_hf.disable(model)
        assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    else:
        memo_hf.disable(model)
        with pytest.raises(MemoError, match="closed"):
            loss.backward()
    model.zero_grad()
    assert_same_bits(gradients(model, IDS), gradients(small(), IDS))


def test_host_memory_and_thread_go_with_disable():  # case 23
    gc.collect()
    model, threads = small(), threading.active_count()
    session = enabled(model, **TOKEN)
    loss = model(input_ids=IDS, labels=IDS).loss
    assert session.stats.host_reserved_bytes > 0 and threading.active_count() == threads + 1
    total = session.stats.total_swapped_bytes
    memo_hf.disable(model)
    assert session.stats.host_bytes == session.stats.host_reserved_bytes == 0
    assert session.stats.total_swapped_bytes == total > 0
    assert threading.active_count() == threads
    del loss


def test_host_memory_and_thread_go_with_the_model():
    """Nobody calls `disable`."""
    model, threads = small(), threading.enumerate()
    session = enabled(model, **TOKEN)
    gradients(model, IDS)
    (thread,) = set(threading.enumerate()) - set(threads)
    pool, gone = session._engine._pool, weakref.ref(model)
    assert pool.reserved_bytes > 0
    del model, session
    gc.collect()
    thread.join(10)
    assert gone() is None and pool.reserved_bytes == 0 and not thread.is_alive()


@pytest.mark.parametrize("ending", ["", "loss.backward(); del model"])
def test_interpreter_exit_is_clean(ending):
    script = f"""
import memo_hf
from tests.harness.simulated_copies import settle
from tests.tiny_models import random_ids, tiny
model, ids = tiny("llama", num_hidden_layers=2), random_ids(1, 12)
session = memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=0.5, chunk_size=6, unswapped_layers=0))
loss = model(input_ids=ids, labels=ids).loss
assert session.stats.swapped_bytes > 0
{ending}
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr


@pytest.mark.parametrize("settings", [TOKEN, REBUILD])
def test_device_copies_go_with_their_layer(settings):
    """After its backward pass a layer holds nothing on the device, even where the graph is kept."""
    model = small(layers=2)
    session = enabled(model, **{**settings, "unswapped_layers": 0})
    end, records = LayerRecord.end_backward, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LayerRecord, "end_backward", lambda record: records.append(record) or end(record))
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward(retain_graph=True)
    assert len(records) == 2 and session.stats.host_bytes == session.stats.swapped_bytes
    assert not [record for record in records if record.rebuilt]
    assert not [stored for record in records for stored in record.group._live() if stored.device is not None]
