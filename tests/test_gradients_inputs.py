"""Gradients over padding, packed documents, positions and windows; and no document that reads another."""

import pytest
import torch
from exactness import check_exact, enabled, language_loss
from tiny_models import gradients, random_ids, tiny, worst_relative_error

SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.5, qkv="swap"),
    dict(swap_fraction=1.0, unswapped_layers=0),
]
WINDOWED = {
    "llama": {},
    "mistral": dict(sliding_window=7),
    "gemma3_text": dict(sliding_window=7),
    "gpt_oss": dict(sliding_window=7, num_hidden_layers=3),
    "gemma2": dict(sliding_window=7),
}
IDS = random_ids(2, 37)


def padding(left: int = 0, right: int = 0, hole: slice = slice(0)):
    mask = torch.ones_like(IDS)
    mask[0, :left] = 0
    mask[1, 37 - right :] = 0
    mask[1, hole] = 0
    return mask


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("sides", [dict(left=9), dict(right=20), dict(left=3, right=5, hole=slice(11, 15))], ids=str)
def test_padding_is_exact(family, sides):
    model, mask = tiny(family, **WINDOWED[family]), padding(**sides)
    # Nor does padding predict the first token after it: what a query of padding sees differs among transformers' own
    # implementations.
    labels = IDS.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)

    def loss():
        return model(input_ids=IDS, attention_mask=mask, labels=labels).loss

    check_exact(model, loss, SETTINGS[1:2])


def packed_positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


PACKED = {"position_ids": packed_positions(5, 20, 12), "use_cache": False}
# What collators for flash attention hand over beside positions; without flash the model itself reads positions alone.
BOUNDS = dict(
    cu_seq_lens_q=torch.tensor([0, 5, 25, 37], dtype=torch.int32),
    cu_seq_lens_k=torch.tensor([0, 5, 25, 37], dtype=torch.int32),
    max_length_q=20,
    max_length_k=20,
)


@pytest.mark.parametrize("family", [family for family in WINDOWED if family != "gpt_oss"])  # it ignores documents
def test_packed_documents_are_exact(family):
    model = tiny(family, **WINDOWED[family])
    check_exact(model, language_loss(model, IDS[:1], **PACKED), SETTINGS[:2])


def test_packed_documents_are_exact_in_several_rows():
    model = tiny("llama", num_hidden_layers=3)
    positions = torch.cat([packed_positions(5, 20, 12), packed_positions(30, 7)])
    check_exact(model, language_loss(model, IDS, position_ids=positions, use_cache=False), SETTINGS)


@pytest.mark.parametrize(
    "inputs", [PACKED, dict(attention_mask=padding(left=9, right=20)[:1])], ids=["packed", "padded"]
)
def test_a_default_device_that_the_model_is_not_on(inputs):
    """What memo_hf makes goes where the model is, or to the host, whatever torch's default is for others."""
    model, ids = tiny("llama", num_hidden_layers=3), IDS[:1]
    expected = gradients(model, ids, **inputs)
    with torch.device("meta"), enabled(model, swap_fraction=0.5):
        ours = gradients(model, ids, **inputs)
    assert worst_relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize("how", ["positions", "bounds"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_no_document_reads_another(family, how):  # case 85
    model = tiny(family, num_hidden_layers=3)
    inputs = {**PACKED, **(BOUNDS if how == "bounds" else {})}
    moved = IDS[:1].clone()
    moved[0, 9] = (moved[0, 9] + 1) % 128
    with enabled(model, swap_fraction=0.5) as session:
        assert {layer.mode for layer in session.stats.layers} == {"token"}
        before, after = (model(input_ids=ids, **inputs).logits for ids in (IDS[:1], moved))
        differs = (before != after).any(-1)[0]
        assert not differs[:5].any() and not differs[25:].any()
        assert differs[9:25].all()
        # And no gradient crosses: the loss of the last document alone reaches only its own tokens.
        embedded = model.get_input_embeddings()(IDS[:1]).detach().requires_grad_()
        model(inputs_embeds=embedded, **inputs).logits[0, 25:].square().sum().backward()
        reached = (embedded.grad != 0).any(-1)[0]
        assert reached[25:].all() and not reached[:25].any()


def test_bounds_of_documents_equal_positions():
    model = tiny("llama", num_hidden_layers=3)
    loss = language_loss(model, IDS[:1], **PACKED, **BOUNDS)
    check_exact(model, loss, SETTINGS)


def test_bounds_over_several_rows():
    model = tiny("llama", num_hidden_layers=3)
    positions = torch.cat([packed_positions(5, 20, 12), packed_positions(30, 7)])
    bounds = torch.tensor([0, 5, 25, 37, 67, 74], dtype=torch.int32)
    extra = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=30, max_length_k=30)
    check_exact(model, language_loss(model, IDS, position_ids=positions, use_cache=False, **extra), SETTINGS[:1])


@pytest.mark.parametrize("offset", [1, 100])
def test_explicit_positions_are_exact(offset):
    model = tiny("qwen3", num_hidden_layers=3)
    positions = (torch.arange(37) + offset)[None].expand(2, -1)
    check_exact(model, language_loss(model, IDS, position_ids=positions), SETTINGS)


def test_embeddings_in_place_of_ids_get_their_gradient():
    model = tiny("llama", num_hidden_layers=3)
    embedded = torch.nn.Parameter(model.get_input_embeddings()(IDS).detach().clone())
    model.register_parameter("embedded", embedded)
    check_exact(model, lambda: model(inputs_embeds=embedded, labels=IDS).loss, SETTINGS)


def test_window_larger_than_the_sequence():
    model = tiny("mistral", sliding_window=64)
    check_exact(model, language_loss(model, IDS), SETTINGS[:1])


def test_eager_models_are_exact():
    model = tiny("llama", attn_implementation="eager")
    check_exact(model, language_loss(model, IDS), SETTINGS[:1])
