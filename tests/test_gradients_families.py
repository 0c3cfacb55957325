"""Gradients of many families: token mode where it must run, layer mode with its reason elsewhere."""

import pytest
from exactness import TOLERANCE, check_exact, enabled, language_loss
from tiny_models import LAYER_MODE, MIXED_MODE, MORE_TOKEN_MODE, TOKEN_MODE, random_ids, tiny

# 37 tokens are two chunks of 16 and a ragged one, and half of them is no multiple of anything.
SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.5, qkv="swap"),
    dict(swap_fraction=1.0, qkv="rebuild", unswapped_layers=0),
]
WINDOWED = ("gemma2", "gemma3_text", "gpt_oss")


def modes(session):
    return [layer.mode for layer in session.stats.layers]


@pytest.mark.parametrize("family", TOKEN_MODE | MORE_TOKEN_MODE)
def test_token_mode_is_exact(family):
    kinds = dict(layer_types=["sliding_attention", "full_attention"]) if family in WINDOWED else {}
    model = tiny(family, num_hidden_layers=2, **kinds)
    loss = language_loss(model, random_ids(2, 37))
    with enabled(model) as session:
        assert modes(session) == ["token"] * 2, session.stats.layers
    check_exact(model, loss, SETTINGS)


@pytest.mark.parametrize("chunk_size", [1, 3, 36, 38, 1000])
@pytest.mark.parametrize("swap_fraction", [0.0, 0.3, 1.0])
def test_any_chunk_size_is_exact(chunk_size, swap_fraction):
    model = tiny("qwen3", num_hidden_layers=2)
    loss = language_loss(model, random_ids(1, 37))
    check_exact(model, loss, [dict(chunk_size=chunk_size, swap_fraction=swap_fraction)])


@pytest.mark.parametrize("family", LAYER_MODE)
def test_layer_mode_is_exact_and_says_why(family):
    model = tiny(family)
    with enabled(model) as session:
        assert set(modes(session)) == {"layer"}
        assert all(LAYER_MODE[family]["reason"] in layer.reason for layer in session.stats.layers)
    check_exact(model, language_loss(model, random_ids(2, 37)), SETTINGS[:1])


@pytest.mark.parametrize("family", MIXED_MODE)
def test_hybrids_run_each_layer_in_its_mode(family):
    model = tiny(family)
    with enabled(model) as session:
        assert set(modes(session)) == {"token", "layer"}, session.stats.layers
    # The decay of linear attention gets a small gradient, a sum of large terms: 3e-5 were seen.
    tolerance = 1e-4 if family == "qwen3_next" else TOLERANCE
    check_exact(model, language_loss(model, random_ids(2, 37)), SETTINGS, tolerance)


def test_layers_built_alike_but_patched_apart_are_checked_apart():
    model = tiny("llama")
    mlp, own = model.model.layers[2].mlp, model.model.layers[2].mlp.forward
    mlp.forward = lambda hidden: own(hidden + hidden.roll(1, 1))
    with enabled(model) as session:
        assert modes(session) == ["token", "token", "layer", "token"]
    check_exact(model, language_loss(model, random_ids(2, 37)), SETTINGS)
