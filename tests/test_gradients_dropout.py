"""Dropout anywhere: the gradients are those of the masks that forward drew, whatever is swapped or recomputed.

That swapping and recomputing give equal gradients would also hold if both drew new masks in backward, so the function
that forward computed is compared as well: its finite differences with the masks held, and a replay by hand.
"""

import pytest
import torch
from exactness import assert_close, assert_equal, check_exact, enabled, gradients_of, language_loss
from peft import LoraConfig, get_peft_model
from tiny_models import random_ids, tiny

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.0, qkv="swap", unswapped_layers=0),
    dict(swap_fraction=0.5, qkv="rebuild"),
    dict(swap_fraction=1.0, unswapped_layers=0),
]
IDS = random_ids(2, 37)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)


def with_lora_dropout(model, **settings):
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", **settings)).train()


MODELS = {
    "attention": lambda: tiny("llama", num_hidden_layers=2, attention_dropout=0.3),
    "embedding, attention and residual": lambda: tiny("gpt2", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2, **GPT2),
    "residual alone": lambda: tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.2, embd_pdrop=0.0, **GPT2),
    "attention and activation": lambda: tiny("opt", num_hidden_layers=2, ffn_dim=64, word_embed_proj_dim=32),
    "routers": lambda: tiny("phimoe", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2),
    "LoRA": lambda: with_lora_dropout(tiny("llama", num_hidden_layers=2)),
    "DoRA": lambda: with_lora_dropout(tiny("llama", num_hidden_layers=2), use_dora=True),
    "LoRA and attention": lambda: with_lora_dropout(tiny("llama", num_hidden_layers=2, attention_dropout=0.3)),
    "layer mode": lambda: tiny("bloom", n_layer=2, n_head=4, hidden_dropout=0.2, attention_dropout=0.2),
}


@pytest.mark.parametrize("where", MODELS)
def test_swapped_recomputed_and_kept_are_equal(where):  # cases 47, 48, 49
    model = MODELS[where]()
    with enabled(model, swap_fraction=0.5):
        first, again = (gradients_of(model, language_loss(model, IDS), seed) for seed in (1, 2))
    assert any(not torch.equal(first[name], again[name]) for name in first if name != "random state"), "no dropout"
    check_exact(model, language_loss(model, IDS), SETTINGS, tolerance=None)


# Families that compute in fp64 where their weights are fp64, as norms of the others do not.
IN_FP64 = {
    "embedding, attention and residual": MODELS["embedding, attention and residual"],
    "LoRA, attention and hidden": lambda: with_lora_dropout(
        tiny("gpt_neox", num_hidden_layers=2, attention_dropout=0.2, hidden_dropout=0.2)
    ),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("where", IN_FP64)
def test_gradients_are_those_of_the_function_that_forward_computed(where, settings):
    """Finite differences along a random direction in fp64, each with the seed of the gradients."""
    model, step = IN_FP64[where]().double(), 1e-5
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.manual_seed(0)
    directions = {name: torch.randn_like(parameter) for name, parameter in trained.items()}
    weights = torch.randn(2, 37, 128, dtype=torch.float64)

    def loss():
        return (model(input_ids=IDS).logits * weights).mean()

    def value_at(distance):
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter += distance * directions[name]
        torch.manual_seed(3)
        return loss().item()

    with enabled(model, **settings):
        found = gradients_of(model, loss, seed=3)
        ahead, behind = value_at(step), value_at(-2 * step)
    slope = sum((found[name] * direction).sum().item() for name, direction in directions.items())
    assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_recompute_draws_the_masks_of_forward():
    """A replay by hand: the masks that forward drew, noted and given to a plain run of the model."""
    model = tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.5, embd_pdrop=0.0, **GPT2)
    drawn = {}

    def noting(name, module):
        own = module.forward

        def forward(inputs):
            output = own(inputs)
            if noting.on:
                drawn.setdefault(name, []).append((output != 0).detach())
            return output

        return forward

    dropouts = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p}
    for name, module in dropouts.items():
        module.forward = noting(name, module)
    noting.on = False  # not in the check
    loss = language_loss(model, IDS)
    with enabled(model, swap_fraction=0.3):
        torch.manual_seed(3)
        noting.on = True
        value = loss()
        noting.on = False
        value.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, module in dropouts.items():
        mask = torch.cat(drawn[name], 1)
        assert mask.shape == (2, 37, 32) and 0.3 < mask.float().mean() < 0.7
        module.forward = lambda inputs, mask=mask: inputs * mask / 0.5
    theirs = gradients_of(model, loss)
    assert_close({**ours, "random state": None}, theirs)


def test_a_plain_run_goes_on_with_random_numbers_as_if_nothing_had_been_recomputed():
    model = MODELS["embedding, attention and residual"]()
    states = {}
    for settings in SETTINGS:
        with enabled(model, **settings):
            for _ in range(3):
                gradients_of(model, language_loss(model, IDS), seed=11)
                states.setdefault(settings["swap_fraction"], set()).add(torch.rand(()).item())
    assert all(len(drawn) == 1 for drawn in states.values())
    assert states[0.0] == states[1.0]  # The same chunks.


def test_without_dropout_no_random_number_is_drawn():
    model = tiny("llama")
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    with enabled(model, swap_fraction=0.5):
        assert torch.equal(torch.get_rng_state(), expected)
        language_loss(model, IDS)().backward()
    assert torch.equal(torch.get_rng_state(), expected)


def test_accumulated_micro_batches_draw_their_own_masks():  # case 47
    model = MODELS["LoRA and attention"]()

    def loss():
        return sum(language_loss(model, IDS[row : row + 1])() for row in (0, 1))

    results = []
    for settings in (SETTINGS[0], SETTINGS[3]):
        with enabled(model, **settings):
            results.append(gradients_of(model, loss))
    assert_equal(*results)
