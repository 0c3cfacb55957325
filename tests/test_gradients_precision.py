"""Gradients with bf16 weights and under autocast; copies of weights are never swapped, counted to the byte."""

import pytest
import torch
from exactness import assert_close, check_exact, enabled, gradients_of, language_loss
from peft import LoraConfig, get_peft_model
from tiny_models import random_ids, tiny

from memo_hf.layers.tokenwise import Node, cut_into_chunks
from memo_hf.swap import SwapEngine, SwapGroup

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.5, unswapped_layers=0),
    dict(swap_fraction=1.0, unswapped_layers=0),
]
IDS = random_ids(2, 37)
BF16 = 2e-2  # of the largest entry: plain bf16 runs differ from fp32 by more
FAMILIES = ["llama", "gemma3_text", "gpt_neox", "mixtral", "gpt_oss"]


def small(family, **changes):
    return tiny(family, num_hidden_layers=3, **changes)


def under_autocast(model, dtype=torch.bfloat16):
    """The loss under autocast, whose backward runs outside of it, as is usual."""

    def loss():
        with torch.autocast("cpu", dtype=dtype):
            return model(input_ids=IDS, labels=IDS).loss

    return loss


def lora(model):
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def assert_no_worse_than_plain(model, loss, truth, **settings):
    """As close to the fp32 gradients `truth` as a plain run in the same precision is, and a half."""
    plain = gradients_of(model, loss)
    with enabled(model, **settings):
        ours = gradients_of(model, loss)
    for name in plain:
        if name == "random state":
            continue
        scale = truth[name].abs().max()
        assert ours[name].dtype == plain[name].dtype
        error, stock_error = ((g[name].float() - truth[name]).abs().max() / scale for g in (ours, plain))
        assert error <= 1.5 * stock_error + 4e-3, f"{name}: {error:.1e}, plain {stock_error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights(family):
    model = small(family)
    truth = gradients_of(model, language_loss(model, IDS))
    model = model.bfloat16()
    check_exact(model, language_loss(model, IDS), SETTINGS, tolerance=None)
    if family not in ("mixtral", "gpt_oss"):  # where rounding moves a token to another expert
        assert_no_worse_than_plain(model, language_loss(model, IDS), truth, swap_fraction=0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_on_fp32_weights(family):  # case 51
    model = small(family)
    truth = gradients_of(model, language_loss(model, IDS))
    check_exact(model, under_autocast(model), SETTINGS, tolerance=None)
    if family not in ("mixtral", "gpt_oss"):
        assert_no_worse_than_plain(model, under_autocast(model), truth, swap_fraction=0.5)


@pytest.mark.parametrize("precision", ["bf16 weights", "autocast"])
def test_lora_in_low_precision(precision):
    model = lora(small("llama").bfloat16() if precision == "bf16 weights" else small("llama"))
    loss = language_loss(model, IDS) if precision == "bf16 weights" else under_autocast(model)
    check_exact(model, loss, SETTINGS, tolerance=BF16)


def test_autocast_in_layer_mode():
    model = small("llama")
    check_exact(model, under_autocast(model), [dict(mode="layer", unswapped_layers=0)], tolerance=1e-6)


def test_backward_under_autocast_too():
    model = small("llama")

    def loss():
        value = model(input_ids=IDS, labels=IDS).loss
        value.backward()
        return value.detach().requires_grad_()  # gradients_of calls its backward, which reaches nothing

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients_of(model, loss)

    results = []
    for settings in (dict(swap_fraction=0.0), dict(swap_fraction=1.0)):
        with enabled(model, unswapped_layers=0, **settings):
            results.append(run())
    assert_close(results[0], results[1], 0.0)
    assert_close(results[0], run(), BF16)


@pytest.mark.parametrize("trained", ["all", "LoRA"])
def test_no_copy_of_a_weight_is_swapped_under_autocast(trained):  # case 42
    """The bytes that are swapped grow with tokens and not with weights: each byte is a token's, a seventh more tokens
    swap a seventh more bytes."""
    model = small("llama")
    if trained == "LoRA":
        model = lora(model)
    swapped = {}
    for tokens in (28, 32):
        ids = random_ids(2, tokens)
        with enabled(model, chunk_size=8, swap_fraction=1.0, unswapped_layers=0) as session:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            swapped[tokens] = session.stats.swapped_bytes
    assert swapped[28] * 8 == swapped[32] * 7


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("trained", ["all", "LoRA"])
def test_no_weight_is_swapped(trained, precision):
    """No saved tensor that goes to the host shares memory with a weight, or has a weight's values."""
    model = small("llama")
    if precision == "bf16":
        model = model.bfloat16()
    if trained == "LoRA":
        model = lora(model)
    seen = []
    own = SwapGroup.put

    def put(group, tensor, **kwargs):
        seen.append((tensor.untyped_storage().data_ptr(), tuple(tensor.shape), tensor.detach().clone()))
        return own(group, tensor, **kwargs)

    with pytest.MonkeyPatch.context() as patch, enabled(model, swap_fraction=1.0, unswapped_layers=0):
        patch.setattr(SwapGroup, "put", put)
        loss = under_autocast(model) if precision == "autocast" else language_loss(model, IDS)
        loss().backward()
    assert len(seen) > 50
    weights = [*model.parameters(), *model.buffers()]
    addresses = {weight.untyped_storage().data_ptr() for weight in weights}
    assert not any(address in addresses for address, _, _ in seen)
    for weight in weights:
        if weight.dim() < 2:
            continue
        for _, shape, value in seen:
            for view in (weight, weight.t()):
                assert shape != tuple(view.shape) or not torch.equal(value.float(), view.to(value.dtype).float())


def test_chunks_are_summed_in_fp32():
    """600 chunks that each add 1: a sum in bf16 would stop at 256."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    engine = SwapEngine(torch.device("cpu"), 2**20)
    node = Node(
        run=lambda inputs, start, stop: (inputs[0] * module.weight,),
        parameters=[(module, "weight")],
        frozen=[],
        chunks=cut_into_chunks(600, 1, 0.5),
        group=engine.open_group(),
    )
    (output,) = node.apply(torch.ones(1, 600, 8, dtype=torch.bfloat16))
    output.backward(torch.ones_like(output))
    assert module.weight.grad.dtype is torch.bfloat16 and (module.weight.grad == 600).all()
    engine.close()
