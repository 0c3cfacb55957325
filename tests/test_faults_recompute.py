"""Kind D of the cases: what is recomputed is what forward computed, side effects and shared arguments included."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from tests.harness.sessions import IDS, REBUILD, SETTINGS, TOKEN, assert_same_bits, enabled, kept, simulate, small
from tests.tiny_models import gradients, worst_relative_error


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cache", ["asked for", "given"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_training_call_with_a_cache(monkeypatch, settings, cache):  # cases 57 and 58
    """A recompute that found the keys of forward in a cache would attend to twice as many."""
    simulate(monkeypatch)
    model = small()
    plain = gradients(model, IDS)
    enabled(model, **SETTINGS[settings])
    for _ in range(2):
        given = dict(past_key_values=DynamicCache()) if cache == "given" else {}
        assert worst_relative_error(gradients(model, IDS, use_cache=True, **given), plain) < 1e-5


class _Shares(LlamaDecoderLayer):
    """The first layer computes something that the others add (keys and values of Gemma 3n, cross-attention states)."""

    def forward(self, hidden_states, shared=None, **kwargs):
        if self.self_attn.layer_idx == 0:
            self.give(shared, self.mlp(hidden_states))
        output = super().forward(hidden_states, **kwargs)
        return output if self.self_attn.layer_idx == 0 else output + self.take(shared)

    def give(self, shared, tensor):
        if isinstance(shared, dict):
            shared["states"] = tensor
        elif isinstance(shared, list):
            shared.append(tensor)
        else:
            shared.states = tensor

    def take(self, shared):
        return (
            shared["states"] if isinstance(shared, dict) else shared[-1] if isinstance(shared, list) else shared.states
        )


class _Holder:
    states = None


class _SharingModel(LlamaModel):
    def __init__(self, config, container):
        super().__init__(config)
        self.layers = nn.ModuleList(_Shares(config, index) for index in range(config.num_hidden_layers))
        self.container = container

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids=input_ids, shared=self.container(), **kwargs)


def gradients_of(model, **inputs):
    model.zero_grad()
    (model(input_ids=IDS, **inputs).last_hidden_state * torch.linspace(-1, 1, 32)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("container", [dict, lambda: {"states": None}, list, _Holder])
def test_layers_that_share_through_an_argument(monkeypatch, container):  # cases 22, 54 and 55
    """Every gradient, not only the loss: they are computed whole, and the reason is reported."""
    simulate(monkeypatch)
    torch.manual_seed(0)
    model = _SharingModel(small().config, container).train()
    plain = gradients_of(model)
    session = enabled(model, **TOKEN)
    assert {stats.reason for stats in session.stats.layers} == {
        "it shares state with other layers through an argument that it changes"
    }
    for _ in range(2):
        assert worst_relative_error(gradients_of(model), plain) < 1e-5
    assert session.stats.swapped_bytes > 0


class _Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, scale=None, **kwargs):
        return super().forward(hidden_states, **kwargs) * scale


class _ScaledModel(LlamaModel):
    """Every layer is given a tensor that needs a gradient, as per-layer embeddings and encoder states do."""

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(_Scaled(config, index) for index in range(config.num_hidden_layers))
        self.scale = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids=input_ids, scale=self.scale(input_ids), **kwargs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_gradients_of_what_layers_are_given_beside_their_input(monkeypatch):  # cases 54 and 55
    simulate(monkeypatch)
    torch.manual_seed(0)
    model = _ScaledModel(small().config).train()
    plain = gradients_of(model)
    enabled(model, **TOKEN)
    ours = gradients_of(model)
    assert "scale.weight" in ours and worst_relative_error(ours, plain) < 1e-5


def test_gradients_of_an_encoder(monkeypatch):  # cases 30 and 55
    simulate(monkeypatch)
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()
    plain = gradients(model, IDS)
    session = enabled(model, **{**TOKEN, "unswapped_layers": 0})
    ours = gradients(model, IDS)
    assert any(name.startswith("encoder.block.0") for name in ours)
    assert worst_relative_error(ours, plain) < 1e-5
    assert session.stats.forwards == 1 and session.stats.total_swapped_bytes > 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_router_near_ties(monkeypatch, settings):  # cases 60 and 61
    """Experts 1 to 3 score within a rounding error of each other: choosing another would change shapes."""
    simulate(monkeypatch)
    model = small("mixtral", layers=2)
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight[1:] = weight[1] * (1 + 1e-7 * torch.arange(3)[:, None])
    settings = {**SETTINGS[settings], "unswapped_layers": 0}
    expected = kept(model, settings=settings)
    enabled(model, **settings)
    for _ in range(2):
        assert_same_bits(gradients(model, IDS), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_loss_that_balances_experts(monkeypatch, family):  # case 61
    simulate(monkeypatch)
    model = small(family, layers=2, output_router_logits=True, router_aux_loss_coef=1.0)
    plain = gradients(model, IDS)
    enabled(model, **{**TOKEN, "unswapped_layers": 0})
    for _ in range(2):
        assert worst_relative_error(gradients(model, IDS), plain) < 1e-5


PROJECT, FINISH, HEAD = (2 * 26 * weights for weights in (32 * (32 + 2 * 16), 32 * 32 + 3 * 32 * 64, 32 * 128))
PLAIN = 3 * (PROJECT + FINISH + HEAD)
AGAIN = PROJECT + FINISH - 2 * 26 * 32 * 64  # Without the layer's last product, whose result nobody reads.
SIX_TOKENS_SWAPPED = dict(swap_fraction=6 / 13, chunk_size=12), AGAIN * 7 // 13


@pytest.mark.parametrize(
    "settings, again",
    [
        (dict(swap_fraction=1.0, chunk_size=26), 0),
        (dict(swap_fraction=0.0, chunk_size=26), AGAIN),
        SIX_TOKENS_SWAPPED,
        (dict(swap_fraction=0.0, chunk_size=8, qkv="rebuild"), AGAIN + PROJECT),
        (dict(swap_fraction=1.0, chunk_size=26, qkv="rebuild"), 0),
        (dict(mode="layer"), AGAIN),
    ],
)
def test_how_much_is_computed_again(settings, again):  # case 69
    """Floating point operations of the matrix products of a step, exactly."""
    model = small(layers=1)
    enabled(model, unswapped_layers=0, **{"swap_fraction": 0.0, **settings})
    with FlopCounterMode(display=False) as counter:
        gradients(model, IDS)
    counts = counter.get_flop_counts()["Global"]
    # Batched products are left out: in transformers 5.17 the rotary table is one.
    products = sum(flops for operation, flops in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))
    assert products == PLAIN + again, (products - PLAIN) / AGAIN


def test_rebuilt_queries_have_the_bits_of_forward():
    """Attention's backward reads rebuilt queries and keys beside the logsumexp of the first ones."""
    model = small()
    swapped = kept(model, settings={**REBUILD, "qkv": "swap"})
    assert_same_bits(kept(model, settings=REBUILD), swapped)


@pytest.mark.parametrize("settings", SETTINGS)
def test_backward_draws_no_random_numbers(settings):  # case 49
    """What is recomputed draws forward's numbers again, and leaves the random state as it was before."""
    model = small(layers=2, attention_dropout=0.1)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    enabled(model, **{**SETTINGS[settings], "unswapped_layers": 0})
    loss = model(input_ids=IDS, labels=IDS).loss
    before = torch.get_rng_state()
    torch.manual_seed(5)
    loss.backward()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)


class _NotesItsCache(LlamaDecoderLayer):
    def forward(self, hidden_states, past_key_values=None, cache=None, **kwargs):
        self.caches.append(past_key_values if cache is None else cache)
        return super().forward(hidden_states, **kwargs)


def test_a_layer_is_given_no_cache():  # cases 55 and 57
    model, caches = small(layers=2), []
    for layer in model.model.layers:
        layer.__class__, layer.caches = _NotesItsCache, caches
    enabled(model, **TOKEN)
    caches.clear()
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    gradients(model, IDS, **{name: DynamicCache()})
    assert caches and not [cache for cache in caches if cache is not None]
