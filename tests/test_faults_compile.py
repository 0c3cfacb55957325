"""Kind I of the cases: compilation is refused with the reason; other saved-tensor hooks and checkpoints compose."""

import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memo_hf
from memo_hf.errors import UnsupportedModelError
from tests.harness.sessions import IDS, SETTINGS, TOKEN, assert_same_bits, enabled, kept, small
from tests.tiny_models import gradients, worst_relative_error

REASON = "compiled.*torch.compile would trace.*Train without torch.compile"


def compile_layer(model):
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


def compile_layer_in_place(model):
    model.model.layers[0].compile(backend="eager")
    return model


def compile_part_in_place(model):
    model.model.layers[1].mlp.compile(backend="eager")
    return model


def compile_model(model):
    return torch.compile(model, backend="eager")


def compile_model_in_place(model):
    model.compile(backend="eager")
    return model


COMPILES = [compile_layer, compile_layer_in_place, compile_part_in_place, compile_model, compile_model_in_place]


@pytest.fixture(autouse=True)
def forgets_compiled_code():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiles", COMPILES)
def test_a_compiled_model_is_refused(compiles):  # case 114
    with pytest.raises(UnsupportedModelError, match=REASON):
        enabled(compiles(small(layers=2)), **TOKEN)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
@pytest.mark.parametrize("compiles", COMPILES)
def test_compiling_later_is_refused(compiles):  # case 114
    """When the compiled model trains; until then, and after `disable`, it runs."""
    model = small(layers=2)
    session = enabled(model, **TOKEN)
    compiled = compiles(model)
    with pytest.raises(UnsupportedModelError, match=REASON):
        gradients(compiled, IDS)
    assert session.stats.forwards == 0
    memo_hf.disable(model)
    torch._dynamo.reset()
    ours = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(compiled, IDS).items()}
    assert worst_relative_error(ours, gradients(small(layers=2), IDS)) < 1e-5


def test_evaluation_may_be_compiled():
    model = small(layers=2)
    expected = model(input_ids=IDS).logits.detach()
    enabled(model, **TOKEN)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=IDS).logits, expected)


def test_other_saved_tensor_hooks_around_the_step():
    """The user's own hooks see what memo_hf leaves on the graph, and change nothing."""
    model = small()
    expected = kept(model, settings=TOKEN)
    enabled(model, **TOKEN)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(gradients(model, IDS), expected)


_RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


@pytest.mark.parametrize("respects", [None, True, False] if _RESPECTS else [None])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_model_inside_a_checkpoint_of_the_user(settings, respects):  # case 115
    """The whole model recomputed by the user, memo_hf inside of it; whatever newer torch does with hooks in there."""
    model = small(layers=2)
    session = enabled(model, **{**SETTINGS[settings], "unswapped_layers": 0})
    expected = gradients(model, IDS)
    options = {} if respects is None else {"respect_saved_tensors_hooks": respects}
    model.zero_grad()
    embeddings = model.model.embed_tokens(IDS)
    loss = checkpoint(lambda x: model(inputs_embeds=x, labels=IDS).loss, embeddings, use_reentrant=False, **options)
    loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    assert session.stats.swapped_bytes > 0
