"""Gradients where a layer gets, gives or does more than in the check: encoders, images, router losses, eval layers."""

import inspect

import pytest
import torch
from exactness import assert_close, check_exact, enabled, gradients_of, language_loss
from tiny_models import random_ids, tiny
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import memo_hf
from memo_hf.errors import MemoError, UnsupportedModelError

SETTINGS = [dict(swap_fraction=0.0, qkv="rebuild"), dict(swap_fraction=1.0, unswapped_layers=0)]
IDS = random_ids(2, 37)
TEXT = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=8, patch_size=4)


def modes(session, part=""):
    return {layer.mode for layer in session.stats.layers if part in layer.name}


def warnings_of(caplog):
    return [record.message for record in caplog.records if (record.name, record.levelname) == ("memo_hf", "WARNING")]


class _ShiftedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states + hidden_states.roll(1, 1), *args, **kwargs)


def test_layer_mode_beside_token_mode_attends_alike_in_its_recompute():
    model = tiny("llama", attention_dropout=0.2)
    model.model.layers[1].__class__ = _ShiftedLayer
    with enabled(model) as session:
        assert [layer.mode for layer in session.stats.layers] == ["token", "layer", "token", "token"]
        assert "depend on the layer input of token" in session.stats.layers[1].reason
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    check_exact(model, language_loss(model, IDS, attention_mask=mask), SETTINGS, tolerance=None)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    check_exact(model, language_loss(model, IDS, attention_mask=mask), SETTINGS)


class _Queries(nn.Module):
    """Queries whose weight is taken by others, or that are one of a list."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.list = linear.weight, nn.ModuleList([nn.Linear(32, 32, bias=False)])

    def __call__(self, hidden):
        return nn.functional.linear(hidden, self.weight) + self.list[0](hidden)


def test_parameters_of_modules_that_are_not_called():
    model = tiny("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Queries(layer.self_attn.q_proj)
    with enabled(model) as session:
        assert modes(session) == {"token"}
    check_exact(model, language_loss(model, IDS), SETTINGS)


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])  # in project, in finish
def test_parameters_that_a_layer_does_not_hold(norm):
    model = tiny("llama", num_hidden_layers=2)
    model.model.shared = nn.Linear(32, 32)
    for layer in model.model.layers:
        own = getattr(layer, norm).forward
        getattr(layer, norm).forward = lambda hidden, own=own: own(hidden) + model.model.shared(hidden)
    with enabled(model) as session:
        assert modes(session) == {"layer"}
        assert "parameters that it does not hold, of shapes [(" in session.stats.layers[0].reason
    check_exact(model, language_loss(model, IDS), SETTINGS)


def test_layers_in_eval_mode_train_too():
    model = tiny("llama")
    model.model.layers[0].eval()
    check_exact(model, language_loss(model, IDS), SETTINGS)


@pytest.mark.parametrize("mode", ["auto", "layer"])
def test_layer_input_as_a_keyword(mode):
    model = tiny("llama", num_hidden_layers=3)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: ((), {"hidden_states": args[0], **kwargs} if args else kwargs),
            with_kwargs=True,
        )
    with enabled(model, mode=mode) as session:
        assert modes(session) == {"token" if mode == "auto" else "layer"}
    check_exact(model, language_loss(model, IDS), [{"mode": mode, **settings} for settings in SETTINGS])


def test_a_tensor_taken_from_inside_of_a_layer_gets_no_gradient():
    model, taken = tiny("llama", num_hidden_layers=2), []
    with enabled(model, swap_fraction=1.0):
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: taken.append(output))
        loss = language_loss(model, IDS)()
        with pytest.raises(MemoError, match="taken out of a layer.*mode='layer'"):
            (loss + sum(tensor.square().sum() for tensor in taken)).backward()


def whisper():
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=30, num_mel_bins=8, vocab_size=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).train()
    sound = torch.randn(2, 8, 60)
    return model, lambda: model(input_features=sound, labels=IDS[:, :21].contiguous()).loss


@pytest.mark.parametrize("frozen_encoder", [False, True])
def test_cross_attention_falls_back_to_layer_mode(frozen_encoder, caplog):
    model, loss = whisper()  # Its decoder passes the check, where it has no encoder's output to attend to.
    model.model.encoder.requires_grad_(not frozen_encoder)
    plain = gradients_of(model, loss)
    for settings in SETTINGS:
        caplog.clear()
        with enabled(model, **settings) as session:
            assert_close(gradients_of(model, loss), plain)
            assert_close(gradients_of(model, loss), plain)
            assert modes(session, "decoder") == {"layer"} and session.stats.forwards == 2
        (warning,) = warnings_of(caplog)
        assert "model.decoder fall back to layer mode" in warning


def test_encoder_decoder_with_a_position_bias_runs_in_layer_mode():
    torch.manual_seed(0)
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    labels = IDS[:, :21].contiguous()
    with enabled(model) as session:
        assert modes(session) == {"layer"} and "position bias" in session.stats.layers[0].reason
    check_exact(model, lambda: model(input_ids=IDS, labels=labels).loss, SETTINGS, tolerance=None)


def test_arguments_that_need_gradients_fall_back_to_layer_mode(caplog):
    model = tiny("llama")
    model.model.rotary_emb.scale = nn.Parameter(torch.ones(8))
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(
        part * model.model.rotary_emb.scale for part in own(*args, **kwargs)
    )
    plain = gradients_of(model, language_loss(model, IDS))
    assert "model.rotary_emb.scale" in plain
    with enabled(model, swap_fraction=1.0) as session:
        assert_close(gradients_of(model, language_loss(model, IDS)), plain)
        assert modes(session) == {"layer"}
    assert "position_embeddings" in warnings_of(caplog)[0]


def test_text_with_images_runs_its_text_per_token():
    torch.manual_seed(0)
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4, spatial_merge_size=2)
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": dict(type="mrope", mrope_section=[1, 1, 2])},
        vision_config=vision, image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(config).train()
    ids = IDS.clamp(min=7)
    ids[:, 3], ids[:, 4:8], ids[:, 8] = 3, 5, 4
    inputs = dict(
        pixel_values=torch.randn(2 * 16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
        mm_token_type_ids=(ids == 5).long(),
    )
    with enabled(model) as session:
        assert modes(session, "language_model") == {"token"} and modes(session, "visual") == {"layer"}
    check_exact(model, language_loss(model, ids, **inputs), SETTINGS)


def test_masks_made_outside_of_the_stack_fall_back_to_layer_mode(caplog):
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 16},
        vision_config={**VISION, "num_hidden_layers": 2, "vision_use_head": False},
        mm_tokens_per_image=4, image_token_index=5, boi_token_index=3, eoi_token_index=4,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).train()
    ids = IDS.clamp(min=7)
    ids[:, 4:8] = 5
    inputs = dict(pixel_values=torch.randn(2, 3, 8, 8), token_type_ids=(ids == 5).long())
    plain = gradients_of(model, language_loss(model, ids, **inputs))
    with enabled(model, swap_fraction=1.0) as session:
        assert_close(gradients_of(model, language_loss(model, ids, **inputs)), plain)
        assert modes(session) == {"layer"}
    assert "ready made" in warnings_of(caplog)[0]


def test_router_losses_fall_back_to_layer_mode_and_are_exact(caplog):
    model = tiny("mixtral", router_aux_loss_coef=0.5)
    loss = language_loss(model, IDS, output_router_logits=True)
    plain, without = gradients_of(model, loss), gradients_of(model, language_loss(model, IDS))
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(plain[name], without[name], rtol=0.01)
    for settings in SETTINGS:
        with enabled(model, **settings) as session:
            assert_close(gradients_of(model, loss), plain)
            assert modes(session) == {"layer"}
    assert "output_router_logits" in warnings_of(caplog)[0]


def test_attention_weights_fall_back_to_layer_mode_and_are_right(caplog):
    model = tiny("llama", attn_implementation="eager")
    stock = model(input_ids=IDS, output_attentions=True).attentions
    with enabled(model, swap_fraction=1.0) as session:
        ours = model(input_ids=IDS, output_attentions=True).attentions
        assert modes(session) == {"layer"}
    assert len(ours) == len(stock) and all(torch.equal(mine, its) for mine, its in zip(ours, stock, strict=True))
    assert "output_attentions" in warnings_of(caplog)[0]


def test_hidden_states_come_out_and_carry_gradients():
    model = tiny("llama")

    def loss():
        output = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
        return output.loss + sum((k + 1) * hidden.square().mean() for k, hidden in enumerate(output.hidden_states))

    stock = model(input_ids=IDS, output_hidden_states=True).hidden_states
    with enabled(model, swap_fraction=1.0) as session:
        ours = model(input_ids=IDS, output_hidden_states=True).hidden_states
        assert modes(session) == {"token"}
    assert len(ours) == len(stock) == 5
    for mine, its in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    check_exact(model, loss, SETTINGS)


def test_chunked_attention_falls_back_beyond_one_chunk_with_one_warning(caplog):
    sizes = dict(
        head_dim=8, attention_chunk_size=24, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1
    )
    model = tiny("llama4_text", **sizes)
    short, long = language_loss(model, IDS[:, :24]), language_loss(model, IDS)
    check_exact(model, short, SETTINGS)
    plain = gradients_of(model, long)
    caplog.clear()
    with enabled(model, swap_fraction=0.5) as session:
        gradients_of(model, short)
        assert modes(session) == {"token"} and not warnings_of(caplog)
        for _ in range(2):
            assert_close(gradients_of(model, long), plain)
        assert modes(session) == {"layer"}
    (warning,) = warnings_of(caplog)
    assert "chunked_overlay" in warning


def test_a_cache_that_holds_tokens_is_refused_and_an_empty_one_ignored():  # case 58
    for family in ("llama", "bloom"):
        model = tiny(family)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        filled = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=IDS[:, :5], use_cache=True, **{name: filled})
        with enabled(model):
            with pytest.raises(UnsupportedModelError, match="holds 5 tokens"):
                model(input_ids=IDS, **{name: filled})
        empty = DynamicCache(config=model.config)
        loss = language_loss(model, IDS, use_cache=True, **{name: empty})
        plain = gradients_of(model, language_loss(model, IDS))
        with enabled(model, swap_fraction=0.5):
            assert_close(gradients_of(model, loss), plain)
            assert_close(gradients_of(model, loss), plain)
        assert empty.get_seq_length() == 0


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match="Sequential has no decoder layers"):
        memo_hf.enable(nn.Sequential(nn.Linear(2, 2)))
