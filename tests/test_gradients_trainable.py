"""Gradients where only some parameters train: frozen parts, tied weights, and the adapters of peft."""

import pytest
import torch
from adapters import lora, randomise_adapters
from exactness import assert_close, assert_nothing_on_host, check_exact, enabled, gradients_of, language_loss
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import random_ids, tiny
from torch import nn

from memo_hf.errors import UnsupportedModelError

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SETTINGS = [
    dict(swap_fraction=0.0, qkv="rebuild"),
    dict(swap_fraction=0.5, unswapped_layers=0),
    dict(swap_fraction=1.0, unswapped_layers=0),
]
IDS = random_ids(2, 37)


def llama(**changes):
    return tiny("llama", num_hidden_layers=3, **changes)


def trained(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def check(model, settings=SETTINGS):
    """Exact, and exactly the trainable parameters that a plain run gives a gradient to have one."""
    found = set(gradients_of(model, language_loss(model, IDS))) - {"random state"}
    assert found and found <= trained(model)
    check_exact(model, language_loss(model, IDS), settings)


def only(model, *parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    return model


FROZEN = {
    "embedding frozen": lambda: only(llama(), "layers", "norm", "lm_head"),
    "first layer frozen": lambda: only(llama(), "layers.1", "layers.2"),
    "middle layer alone": lambda: only(llama(), "layers.1"),
    "embedding alone": lambda: only(llama(), "embed"),
    "norms alone": lambda: only(llama(), "norm"),
    "biases alone": lambda: only(tiny("qwen2", num_hidden_layers=3), "bias"),
    "query and value alone": lambda: only(llama(), "q_proj", "v_proj"),
    "middle MLP alone": lambda: only(llama(), "layers.1.mlp"),
    "routers alone": lambda: only(tiny("mixtral", num_hidden_layers=3), "gate.weight"),
    "sinks alone": lambda: only(tiny("gpt_oss", num_hidden_layers=3), "sinks"),
    "tied weights": lambda: llama(tie_word_embeddings=True),
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parts_are_exact(what):
    check(FROZEN[what]())


FORWARD_ONLY = {
    "last layer": lambda: only(llama(), "layers.2"),
    "norms after the layers": lambda: only(llama(), "model.norm"),
    "head": lambda: only(llama(), "lm_head"),
}


@pytest.mark.parametrize("what", FORWARD_ONLY)
def test_layers_without_a_backward_pass_swap_nothing(what, caplog):
    model = FORWARD_ONLY[what]()
    plain = gradients_of(model, language_loss(model, IDS))
    with enabled(model, swap_fraction=1.0) as session:
        assert_close(gradients_of(model, language_loss(model, IDS)), plain)
        assert session.stats.swapped_bytes == session.stats.planned_bytes == 0
    # Said where a user may wonder: some layers train.
    assert ("2 of 3 layers have nothing to train in them or before them" in caplog.text) == (what == "last layer")


def test_layers_with_and_without_adapters_are_planned_apart():
    model = lora(tiny("llama", num_hidden_layers=4), target_modules=["q_proj", "down_proj"], layers_to_transform=[1])
    check(model)


def test_what_trains_may_change_between_steps():
    model = llama()
    with enabled(model, swap_fraction=0.5) as session:
        for parts in (("",), ("layers.1",), ("embed", "layers.0"), ("",)):
            only(model, *parts)
            ours = set(gradients_of(model, language_loss(model, IDS))) - {"random state"}
            assert ours == trained(model)
            assert_nothing_on_host(session)
    check(model, SETTINGS[:1])


LORA = {
    "all linear": lambda: lora(llama(), target_modules="all-linear"),
    "query and value": lambda: lora(llama(), target_modules=["q_proj", "v_proj"]),
    "output": lambda: lora(llama(), target_modules=["o_proj"]),
    "MLP": lambda: lora(llama(), target_modules=["gate_proj", "up_proj", "down_proj"]),
    "middle layer": lambda: lora(llama(), target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
    "fused projections": lambda: lora(tiny("phi3", num_hidden_layers=3), target_modules="all-linear"),
    "DoRA": lambda: lora(llama(), target_modules="all-linear", use_dora=True),
    "rsLoRA with biases": lambda: lora(
        tiny("qwen2", num_hidden_layers=3), target_modules="all-linear", use_rslora=True, bias="all"
    ),
    "head and embedding saved": lambda: lora(
        llama(), target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    "norms saved": lambda: lora(llama(), target_modules=["v_proj"], modules_to_save=["input_layernorm"]),
    "tied head": lambda: lora(llama(tie_word_embeddings=True), target_modules="all-linear"),
    "experts' router": lambda: lora(tiny("qwen3_moe", num_hidden_layers=3), target_modules=["q_proj", "o_proj"]),
}


@pytest.mark.parametrize("what", LORA)
def test_lora_is_exact(what):  # case 54
    check(LORA[what]())


@pytest.mark.parametrize("inner", [False, True])
def test_adapters_added_after_enable(inner):
    model = llama()
    with enabled(model, swap_fraction=0.5, unswapped_layers=0) as session:
        wrapped = lora(model, target_modules="all-linear")
        ours = gradients_of(wrapped, language_loss(wrapped, IDS))
        assert session.stats.swapped_bytes > 0
        assert_nothing_on_host(session)
    plain = gradients_of(wrapped, language_loss(wrapped, IDS))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    target = wrapped.get_base_model() if inner else wrapped
    with enabled(target, swap_fraction=0.5):
        torch.testing.assert_close(
            gradients_of(wrapped, language_loss(wrapped, IDS)), plain, rtol=1e-4, atol=1e-6
        )  # case 82


def test_two_adapters_and_switching_between_them():
    model = lora(llama(), target_modules="all-linear")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    randomise_adapters(model)
    with enabled(model, swap_fraction=0.5) as session:
        for adapter in ("default", "second", "default"):
            model.set_adapter(adapter)
            ours = gradients_of(model, language_loss(model, IDS))
            assert all(adapter in name for name in ours if name != "random state")
            assert_nothing_on_host(session)
            with model.disable_adapter(), torch.no_grad():  # the reference model of DPO with adapters
                model(input_ids=IDS)
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        check(model, SETTINGS[1:2])


def test_merged_adapters():
    model = lora(llama(), target_modules="all-linear").merge_and_unload()
    model.requires_grad_(True)
    check(model, SETTINGS[1:2])


def test_prompt_tuning_is_exact():
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).train()
    check(model)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # so does peft
def test_prefix_tuning_is_refused():
    model = get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).train()
    assert isinstance(model, PeftModel)
    with enabled(model):
        with pytest.raises(UnsupportedModelError, match="prefix tuning"):
            language_loss(model, IDS)()


def test_weights_shared_by_two_modules_of_a_layer():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
        layer.self_attn.o_proj.weight = layer.self_attn.q_proj.weight  # one before attention, one after it
    check(model)


def test_weights_shared_by_all_layers():
    model = llama()
    for layer in model.model.layers[1:]:
        layer.mlp.load_state_dict(model.model.layers[0].mlp.state_dict())
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight = getattr(model.model.layers[0].mlp, name).weight
    check(model)


def test_one_layer_used_twice():
    model = llama()
    model.model.layers[2] = model.model.layers[1]
    with enabled(model) as session:
        assert [(layer.name, layer.mode) for layer in session.stats.layers] == [
            ("model.layers.0", "token"),
            ("model.layers.1", "token"),
        ]
    # A cache would give its second use the keys of its first one.
    check_exact(model, language_loss(model, IDS, use_cache=False), SETTINGS)


def test_parametrized_weights():
    model = llama()
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
        nn.utils.parametrizations.weight_norm(layer.mlp.down_proj)
    check(model)


class _SumOfTwo(nn.Linear):
    """Autograd hands one and the same tensor out as the gradient of both parameters."""

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight + self.delta)


def test_parameters_that_are_handed_one_gradient():
    model = llama()
    for layer in model.model.layers:
        for module in (layer.self_attn.v_proj, layer.mlp.gate_proj):
            module.delta = nn.Parameter(torch.randn_like(module.weight) / 10)
            module.__class__ = _SumOfTwo
    check(model)
