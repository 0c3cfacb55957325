"""Losses and metrics of users' own on `outputs.logits`, in chunks or on the real ones, as on the stock model's."""

import pytest
import torch
from loss_models import CHUNK, TOKENS, VOCABULARY, assert_same, compare, gradients, make_batch, make_model, own_loss
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.loss import install_chunked_loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_own_cross_entropy(reduction, label_smoothing):
    inputs = make_batch()
    labels = inputs.pop("labels")

    def loss(output):
        losses = own_loss(output, labels, reduction=reduction, label_smoothing=label_smoothing)
        return losses if reduction != "none" else (losses * torch.linspace(0, 1, len(losses))).sum()

    compare(make_model(), inputs, loss)


def test_trainer_label_smoother():
    from transformers.trainer_pt_utils import LabelSmoother

    inputs = make_batch()
    labels = inputs.pop("labels")
    compare(make_model(), inputs, lambda output: LabelSmoother(0.1)(output, labels, shift_labels=True))


def test_token_selection_with_a_mask():
    inputs = make_batch()
    labels = inputs.pop("labels")[:, 1:]
    mask = labels != -100

    def loss(output):
        return functional.cross_entropy(output.logits[..., :-1, :][mask].contiguous(), labels[mask])

    compare(make_model(), inputs, loss)


def test_several_losses_of_one_forward():
    # Model loss, z-loss and entropy of one forward: each its own job, one gradient per parameter.
    def loss(output):
        logits = output.logits.float()
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return output.loss + 1e-2 * logits.logsumexp(-1).pow(2).mean() - 0.1 * entropy.mean()

    compare(make_model(), make_batch(), loss)


def test_what_was_made_without_grad_is_constant():
    def loss(output):
        with torch.no_grad():
            weights = output.logits.softmax(-1)
        return (weights * output.logits).sum(-1).mean() + (output.logits - output.logits.detach()).exp().sum(-1).mean()

    compare(make_model(), make_batch(), loss)


def test_two_backwards_of_two_losses():
    def run(model):
        model.zero_grad()
        output = model(**make_batch())
        output.loss.backward(retain_graph=True)
        output.logits.logsumexp(-1).mean().backward()
        return output.loss.detach(), gradients(model)

    model = make_model()
    stock = run(model)
    install_chunked_loss(model, CHUNK)
    assert_same(stock, run(model))


def test_second_backward_of_one_loss_raises():
    model = make_model()
    install_chunked_loss(model, CHUNK)
    loss = model(**make_batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("mixed", [False, True])
def test_operations_on_the_whole_logits(mixed):
    # Right, large, and said once.
    def loss(output):
        whole = output.logits.var(dim=1).sum() + output.logits.transpose(1, 2).pow(2).mean()
        return whole + output.loss if mixed else whole

    with pytest.warns(UserWarning, match=r"var needs the whole logits, \(2, 24, 211\) or 39.56 KiB") as caught:
        compare(make_model(), make_batch(), loss, whole=["var"])
    assert len(caught) == 1


@pytest.mark.parametrize("detached", [True, False])
def test_a_metric_on_the_whole_logits_leaves_the_graph(detached):
    inputs = make_batch()
    labels = inputs.pop("labels")

    def loss(output):
        with torch.set_grad_enabled(detached):
            assert not (output.logits.detach() if detached else output.logits).var().requires_grad
        return own_loss(output, labels)

    with pytest.warns(UserWarning, match="var needs"):
        compare(make_model(), inputs, loss, whole=["var"])


def test_in_place_operations():
    inputs = make_batch()
    labels = inputs.pop("labels")

    def in_place(output):
        output.logits.div_(2)
        return own_loss(output, labels)

    def on_a_view(output):
        logits = output.logits[:, 2:-1]
        logits.div_(2)
        return logits.logsumexp(-1).sum() + output.logits.logsumexp(-1).sum()

    def ambiguous(output):
        copied = output.logits * 2
        output.logits.div_(2)
        return copied.sum()

    with pytest.warns(UserWarning, match="div_ needs"):
        compare(make_model(), inputs, in_place, whole=["div_"])
    with pytest.warns(UserWarning, match="div_ needs"):
        compare(make_model(), inputs, on_a_view, whole=["div_"])
    with pytest.raises(UnsupportedModelError, match="div_ would change"):
        compare(make_model(), inputs, ambiguous)


def test_metrics_without_the_logits():
    model, inputs = make_model(), make_batch()
    stock = model(**inputs).logits.detach()
    installed = install_chunked_loss(model, CHUNK)
    logits = model(**inputs).logits
    picked = inputs["input_ids"][..., None]
    for metric in (
        lambda logits: logits.argmax(dim=-1),
        lambda logits: logits[:, 3:].argmax(-1, keepdim=True),
        lambda logits: logits.view(-1, VOCABULARY)[5:9].argmax(-1),
        lambda logits: logits[1, -7:-1].amax(-1),
        lambda logits: logits[..., :50].logsumexp(-1),
        lambda logits: torch.softmax(logits, 2).gather(-1, picked),
        lambda logits: logits.flatten(0, 1)[torch.tensor([3, 3, 1])].sum(dim=[-1]),
        lambda logits: (logits + torch.arange(VOCABULARY)[None, None]).logsumexp(-1),
    ):
        torch.testing.assert_close(metric(logits), metric(stock))
    assert not installed.materialised
    for detached in (logits.detach(), logits.data):
        assert not detached.requires_grad and not detached.logsumexp(-1).requires_grad


def test_metadata_is_that_of_the_logits():
    model, inputs = make_model(), make_batch()
    install_chunked_loss(model, CHUNK)
    output = model(**inputs)
    logits = output.logits
    assert isinstance(logits, torch.Tensor) and logits.requires_grad and logits.grad_fn is not None
    assert (
        logits.shape == logits.size() == (2, 24, VOCABULARY) and len(logits) == 2 and logits.ndim == logits.dim() == 3
    )
    assert logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.numel() == 2 * 24 * VOCABULARY
    assert logits.is_contiguous() and not logits[:, 1:].is_contiguous() and logits.is_floating_point()
    assert repr(logits) == "DeferredLogits(shape=(2, 24, 211), dtype=torch.float32, device=cpu)"
    assert any(leaf is logits for leaf in tree_leaves(output)) and "DeferredLogits" in repr(output)
    assert logits.float() is logits and logits.to(torch.float32) is logits and logits.contiguous() is logits
    with pytest.raises(RuntimeError, match="view"):
        logits[:, 1:].view(-1, VOCABULARY)  # torch's own refusal
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits.view(-1, VOCABULARY), torch.zeros(3, dtype=torch.long))
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(logits.view(-1, VOCABULARY), torch.full((TOKENS,), VOCABULARY))


def test_hooks_on_outputs_run_before_the_parameters_are_ready():
    # FSDP2 gathers parameters in a hook on the model's outputs, whether or not the loss was computed inside the model.
    model, order = make_model(), []
    install_chunked_loss(model, CHUNK)
    output = model(input_ids=make_batch()["input_ids"])
    output.logits.register_hook(lambda grad: order.append("output"))
    model.lm_head.weight.register_hook(lambda grad: order.append("weight"))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
    (output.logits.logsumexp(-1).sum() + own_loss(output, make_batch()["labels"])).backward()
    assert order == ["output", "weight", "accumulated"]
    order.clear()
    output = model(input_ids=make_batch()["input_ids"])
    output.logits.register_hook(lambda grad: order.append("output"))
    with pytest.warns(UserWarning, match="var needs"):
        output.logits.var().backward()
    assert order == ["output", "weight", "accumulated"]
