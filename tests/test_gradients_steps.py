"""Gradients over the ways in which steps follow each other: accumulation, several forwards, evaluation, exceptions."""

import gc

import pytest
import torch
from exactness import (
    assert_close,
    assert_equal,
    assert_nothing_on_host,
    check_exact,
    enabled,
    gradients_of,
    language_loss,
    nothing_swapped_or_recomputed,
)
from tiny_models import random_ids, tiny

SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.5, unswapped_layers=0),
    dict(swap_fraction=1.0, unswapped_layers=0),
    dict(mode="layer", unswapped_layers=0),
]
IDS = random_ids(4, 37)
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3", num_hidden_layers=3)


@each_setting
def test_accumulated_micro_batches_equal_one_batch(model, settings):
    joint = gradients_of(model, language_loss(model, IDS[:2]))
    with enabled(model, **settings) as session:
        for row in (0, 1):
            (language_loss(model, IDS[row : row + 1])() / 2).backward()
            assert_nothing_on_host(session)
        ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert_close({**ours, "random state": None}, joint)


@each_setting
@pytest.mark.parametrize("order", ["joint", "first first", "last first"])
def test_several_forwards_before_backward(model, settings, order):  # case 6; DPO runs chosen and rejected so
    def loss():
        with torch.no_grad():  # the reference model's part
            reference = model(input_ids=IDS[2:3]).logits.mean()
        first, last = language_loss(model, IDS[:1])(), language_loss(model, IDS[1:2, :30])()
        if order == "joint":
            return -torch.nn.functional.logsigmoid(first - last - reference)
        halves = [first * 2, last * 3]
        other, ours = halves if order == "first first" else halves[::-1]
        other.backward()
        return ours

    check_exact(model, loss, [settings])


@each_setting
def test_evaluation_swaps_nothing_and_changes_nothing(model, settings):  # cases 24, 25, 26
    loss = language_loss(model, IDS[:2])
    stock = model(input_ids=IDS[2:]).logits.detach()
    with enabled(model, **settings) as session:

        def evaluate():
            before = session.stats
            model.eval()
            with torch.no_grad():
                no_grad = model(input_ids=IDS[2:]).logits
            with torch.inference_mode():
                inference = model(input_ids=IDS[2:]).logits
                model.generate(IDS[2:, :5], max_new_tokens=3, do_sample=False)
            model.train()
            with torch.no_grad():  # training mode, as some evaluations leave it
                training = model(input_ids=IDS[2:]).logits
            assert all(torch.equal(logits, stock) for logits in (no_grad, inference, training))
            assert session.stats == before

        evaluate()
        first = gradients_of(model, loss)
        evaluate()
        value = loss()
        evaluate()  # between forward and backward
        value.backward()
        between = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        assert session.stats.forwards == 2 and session.stats.stock_forwards == 0
    assert_equal({**between, "random state": first["random state"]}, first)


@each_setting
def test_an_exception_between_forward_and_backward_frees_all(model, settings):
    with enabled(model, **settings) as session:
        expected = gradients_of(model, language_loss(model, IDS[:2]))

        def broken_step():
            value = language_loss(model, IDS[2:])()
            assert session.stats.host_bytes > 0
            raise KeyboardInterrupt(value.item())

        with pytest.raises(KeyboardInterrupt):
            broken_step()
        assert_nothing_on_host(session)
        assert_equal(gradients_of(model, language_loss(model, IDS[:2])), expected)


@each_setting
@pytest.mark.parametrize("part", ["q_proj", "o_proj", "down_proj"])
def test_an_exception_inside_of_a_layer_frees_all(model, settings, part):
    with enabled(model, **settings) as session:
        expected = gradients_of(model, language_loss(model, IDS[:2]))
        module = dict(model.model.layers[1].named_modules())[f"{'mlp' if part == 'down_proj' else 'self_attn'}.{part}"]

        def fail(*args):
            raise ArithmeticError("broken")

        hook = module.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            language_loss(model, IDS[2:])()
        hook.remove()
        assert_nothing_on_host(session)
        assert model.config._attn_implementation == "sdpa"
        assert_equal(gradients_of(model, language_loss(model, IDS[:2])), expected)


@each_setting
def test_an_exception_in_backward_frees_all(model, settings):
    with enabled(model, **settings) as session:
        expected = gradients_of(model, language_loss(model, IDS[:2]))
        weight = model.model.layers[1].mlp.down_proj.weight

        def fail(gradient):
            raise ArithmeticError("broken")

        hook = weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            language_loss(model, IDS[2:])().backward()
        hook.remove()
        # torch itself holds what is left of a failed backward pass until the thread's next one.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        assert_nothing_on_host(session)
        assert_equal(gradients_of(model, language_loss(model, IDS[:2])), expected)


@each_setting
def test_retained_graphs_give_the_same_gradients_again(model, settings):  # case 30
    with enabled(model, **settings) as session:
        once = gradients_of(model, language_loss(model, IDS[:2]))
        value = language_loss(model, IDS[:2])()
        value.backward(retain_graph=True)
        assert session.stats.host_bytes > 0
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        value.backward()
        assert_nothing_on_host(session)
        twice = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with pytest.raises(RuntimeError, match="backward through .* a second time"):
            value.backward()
    assert_equal({**first, "random state": once["random state"]}, once)
    assert all(torch.equal(twice[name], 2 * first[name]) for name in first)


@each_setting
def test_backward_from_the_middle_a_second_time_raises(model, settings):
    with enabled(model, **settings):
        hidden = model.model(input_ids=IDS[:2]).last_hidden_state
        hidden.sum().backward()
        with pytest.raises(RuntimeError, match="backward through .* a second time"):
            hidden.sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_double_backward_is_refused(model, settings):
    with enabled(model, **settings):
        weight = model.model.layers[0].mlp.up_proj.weight
        (gradient,) = torch.autograd.grad(language_loss(model, IDS[:2])(), [weight], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()
    model.zero_grad()


@each_setting
def test_gradients_of_chosen_tensors(model, settings):
    weights = [model.model.layers[0].self_attn.q_proj.weight, model.model.layers[2].mlp.up_proj.weight]
    stock = torch.autograd.grad(language_loss(model, IDS[:2])(), weights)
    with enabled(model, **settings) as session:
        ours = torch.autograd.grad(language_loss(model, IDS[:2])(), weights)
        assert_nothing_on_host(session)
    for mine, its in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5 * its.abs().max().item())
    assert all(parameter.grad is None for parameter in model.parameters())


@each_setting
def test_parameter_hooks_fire_once_per_backward(model, settings):  # case 72
    calls = {}

    def count(kind, name):
        def hook(tensor):
            calls[kind, name] = calls.get((kind, name), 0) + 1

        return hook

    hooks = []
    for name, parameter in model.named_parameters():
        hooks.append(parameter.register_hook(count("gradient", name)))
        hooks.append(parameter.register_post_accumulate_grad_hook(count("accumulated", name)))
    with enabled(model, **settings):
        for step in (1, 2):
            language_loss(model, IDS[:2])().backward()
            assert len(calls) == 2 * sum(1 for _ in model.parameters())
            assert set(calls.values()) == {step}
    for hook in hooks:
        hook.remove()
    model.zero_grad()


@pytest.mark.parametrize("settings", SETTINGS[:1], ids=str)
def test_hooks_on_parameters_change_gradients(model, settings):
    weight = model.model.layers[1].self_attn.k_proj.weight
    hook = weight.register_hook(lambda gradient: gradient * 3)
    check_exact(model, language_loss(model, IDS[:2]), [settings])
    hook.remove()


@each_setting
def test_fused_optimizer_steps_in_backward(model, settings):
    """A hook that steps each parameter as soon as its gradient is there, as LOMO and torchtune do."""
    model = tiny("qwen3", num_hidden_layers=3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def descend(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    def run(session):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        hooks = [parameter.register_post_accumulate_grad_hook(descend) for parameter in model.parameters()]
        for step in range(2):
            with session():
                language_loss(model, IDS[step : step + 2])().backward()
        for hook in hooks:
            hook.remove()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    kept = run(lambda: nothing_swapped_or_recomputed(model, **settings))
    ours = run(lambda: enabled(model, **settings))
    assert_equal(ours, kept)


def test_many_steps_equal_those_that_keep_all():  # case 11
    model = tiny("llama", num_hidden_layers=2, attention_dropout=0.1)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def train(run):
        model.load_state_dict(start)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with run(model, swap_fraction=0.5) as session:
            for step in range(20):
                language_loss(model, random_ids(2, 20 + step, seed=step))().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert_nothing_on_host(session)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_equal(train(enabled), train(nothing_swapped_or_recomputed))
