"""What `enable` and `disable` do to a model, to its copies, and to what happens to the model in between."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import memo_hf
from memo_hf import MemoConfig
from memo_hf.errors import ConfigError, MemoError, UnsupportedModelError
from tests.harness.sessions import IDS, SETTINGS, TOKEN, assert_same_bits, enabled, kept, small
from tests.tiny_models import gradients, worst_relative_error


def everything_of(model):
    """Every attribute of every module in order, with the objects they are; settings; names and hooks."""
    return {
        "attributes": {
            name: {key: list(item.items()) if isinstance(item, dict) else item for key, item in vars(module).items()}
            for name, module in model.named_modules()
        },
        "order": {name: list(vars(module)) for name, module in model.named_modules()},
        "config": (model.config.to_dict(), list(vars(model.config).items())),
        "names": list(model.state_dict()),
        "versions": [tensor._version for tensor in model.state_dict().values()],
    }


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_disable_leaves_the_model_as_it_was_found(family, settings):
    model, other = small(family), small(family)
    random_state = torch.get_rng_state()
    before, interfaces = everything_of(model), dict(AttentionInterface._global_mapping)
    loss = model(input_ids=IDS, labels=IDS).loss
    with memo_session(model, **SETTINGS[settings]):
        assert list(model.state_dict()) == before["names"]  # case 87
        gradients(model, IDS)
    assert everything_of(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert set(AttentionInterface._global_mapping) - set(interfaces) <= {"memo"}
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, loss)
    assert_same_bits(gradients(model, IDS), gradients(other, IDS))


class memo_session:
    """`enable` and `disable` round a block."""

    def __init__(self, model, **settings):
        self.model, self.settings = model, settings

    def __enter__(self):
        return enabled(self.model, **self.settings)

    def __exit__(self, *_):
        memo_hf.disable(self.model)


def test_enable_alone_changes_no_weight_and_draws_no_random_number():
    model = small()
    before, random_state = everything_of(model)["versions"], torch.get_rng_state()
    enabled(model, **TOKEN)
    assert everything_of(model)["versions"] == before and torch.equal(torch.get_rng_state(), random_state)


def test_enable_twice_and_disable_twice():  # case 31
    model = small()
    session = enabled(model, **TOKEN)
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    for again in (model, model.model):
        with pytest.raises(UnsupportedModelError, match="already enabled.*disable"):
            enabled(again, **TOKEN)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
    with pytest.raises(MemoError, match="not enabled on this LlamaModel"):
        memo_hf.disable(model.model)
    memo_hf.disable(model)
    session.close()  # harmless
    with pytest.raises(MemoError, match="not enabled on this LlamaForCausalLM; call memo_hf.enable"):
        memo_hf.disable(model)
    enabled(model, **TOKEN)
    assert worst_relative_error(gradients(model, IDS), gradients(small(), IDS)) < 1e-5


def test_a_wrapper_that_came_later_stays():
    model = small()
    enabled(model, **TOKEN)
    module, calls = model.model.layers[0], []
    ours = module.forward
    module.forward = lambda *args, **kwargs: calls.append(1) or ours(*args, **kwargs)
    assert worst_relative_error(gradients(model, IDS), gradients(small(), IDS)) < 1e-5
    memo_hf.disable(model)
    assert_same_bits(gradients(model, IDS), gradients(small(), IDS))
    assert len(calls) == 2


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_a_copy_is_not_enabled(duplicate):
    model, plain = small(), gradients(small(), IDS)
    session = enabled(model, **TOKEN)
    ours = gradients(model, IDS)
    copied = duplicate(model)
    assert_same_bits(gradients(copied, IDS), plain)
    assert session.stats.forwards == 1
    with pytest.raises(MemoError, match="not enabled"):
        memo_hf.disable(copied)
    with torch.no_grad():
        copied.lm_head.weight.zero_()  # whoever computes with the original's head does not see this
    assert copied(input_ids=IDS).logits.abs().max() == 0
    enabled(copied, **TOKEN)
    assert_same_bits(gradients(model, IDS), ours)


def test_a_copy_keeps_the_forward_that_was_put_there_before():
    model = small()
    layer, calls = model.model.layers[0], []
    layer.forward = _Counting(layer, calls)
    enabled(model, **TOKEN)
    calls.clear()
    copied = copy.deepcopy(model)
    model(input_ids=IDS)
    assert not copied.model.layers[0].forward.calls
    copied(input_ids=IDS)
    assert copied.model.layers[0].forward.calls == [1]
    memo_hf.disable(model)
    assert type(layer.forward) is _Counting


class _Counting:
    def __init__(self, module, calls):
        self.module, self.calls = module, calls

    def __call__(self, *args, **kwargs):
        self.calls.append(1)
        return type(self.module).forward(self.module, *args, **kwargs)


def test_another_dtype_after_enable():
    model = small()
    session = enabled(model, **TOKEN)
    gradients(model, IDS)
    ours = gradients(model.double(), IDS)
    assert session.stats.layers[0].mode == "token"
    assert ours["lm_head.weight"].dtype == torch.float64
    assert worst_relative_error(ours, gradients(small().double(), IDS)) < 1e-12
    assert gradients(model.bfloat16(), IDS)["lm_head.weight"].dtype == torch.bfloat16


def test_a_device_that_cannot_swap_is_named_and_the_way_back_works():
    model = small()
    session = enabled(model, **TOKEN)
    ours = gradients(model, IDS)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.to("meta")
    with pytest.raises(MemoError, match="not supported on device meta"):
        model(input_ids=IDS.to("meta"))
    model.to_empty(device="cpu").load_state_dict(weights)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    assert_same_bits(gradients(model, IDS), ours)
    assert session.stats.swapped_bytes > 0


def test_modules_inside_a_layer_may_be_replaced():
    model, other = small(), small()
    enabled(model, **TOKEN)
    for changed in (model, other):
        old = changed.model.layers[0].self_attn.q_proj
        changed.model.layers[0].self_attn.q_proj = new = torch.nn.Linear(32, 32)
        new.load_state_dict({"weight": old.weight, "bias": torch.linspace(-1, 1, 32)})
    assert worst_relative_error(gradients(model, IDS), gradients(other, IDS)) < 1e-5


def test_adapters_may_come_and_go():
    peft = pytest.importorskip("peft")
    adapters = dict(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, other = small(), small()
    enabled(model, **TOKEN)
    for changed in (model, other):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(peft.LoraConfig(**adapters), changed)
    ours = gradients(model, IDS)
    assert sum("lora" in name for name in ours) == 4 * 3
    assert worst_relative_error(ours, gradients(other, IDS)) < 1e-5


@pytest.mark.parametrize("change", ["replaced", "added"])
def test_layers_that_came_later_are_refused(change):
    model = small()
    enabled(model, **TOKEN)
    if change == "replaced":
        model.model.layers[1] = small().model.layers[1]
    else:
        model.model.layers.append(small(layers=4).model.layers[3])
        model.config.num_hidden_layers = 4
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.[13] was put there after.*enable it again"):
        gradients(model, IDS)
    memo_hf.disable(model)
    plain = gradients(model, IDS)
    enabled(model, **TOKEN)
    assert worst_relative_error(gradients(model, IDS), plain) < 1e-5


def switch(model, verb):
    """The method that turns activation checkpointing on or off; its name changed during transformers 5."""
    new = getattr(model, f"activation_checkpointing_{verb}", None)
    return new or getattr(model, f"gradient_checkpointing_{verb}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused_before_and_after(reentrant):  # cases 68, 69 and 80
    model, other = small(), small()
    for changed in (model, other):
        if changed is other:
            session = enabled(other, **TOKEN)
        switch(changed, "enable")({"use_reentrant": reentrant})
        with pytest.raises(ConfigError, match="activation checkpointing of .* is on.*activation_checkpointing=False"):
            enabled(changed, **TOKEN) if changed is model else gradients(changed, IDS)
    switch(other, "disable")()
    assert worst_relative_error(gradients(other, IDS), gradients(small(), IDS)) < 1e-5
    assert session.stats.forwards == 1


def test_a_checkpoint_wrapper_is_refused_before_and_after():  # cases 64 and 68
    model, other = small(), small()
    enabled(other, **TOKEN)
    for changed in (model, other):
        apply_activation_checkpointing(changed, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    with pytest.raises(ConfigError, match="model.layers.0 is wrapped.*fsdp_activation_checkpointing: false"):
        enabled(model, **TOKEN)
    with pytest.raises(ConfigError, match="layers.0 is wrapped.*fsdp_activation_checkpointing: false"):
        gradients(other, IDS)


def test_data_parallel_is_refused():
    model = small()
    with pytest.raises(UnsupportedModelError, match="one process per GPU"):
        enabled(torch.nn.DataParallel(model), **TOKEN)
    enabled(model, **TOKEN)
    with pytest.raises(UnsupportedModelError, match="one process per GPU"):
        model.model._replicate_for_data_parallel()  # as nn.DataParallel does for each GPU
    memo_hf.disable(model)
    assert type(model.model._replicate_for_data_parallel()) is type(model.model)


def test_a_forward_that_replaces_ours_is_noticed(caplog):
    model = small()
    enabled(model, **{**TOKEN, "mode": "layer"})
    for layer in model.model.layers:
        del layer.forward
    with caplog.at_level(logging.WARNING, "memo_hf"):
        gradients(model, IDS)
    assert "none of the layers ran under memo_hf" in caplog.text


def test_short_batches_run_untouched(caplog):  # cases 28 and 95
    model, plain = small(), gradients(small(), IDS)
    with caplog.at_level(logging.INFO, "memo_hf"):
        session = memo_hf.enable(model)
        for _ in range(2):
            assert_same_bits(gradients(model, IDS), plain)
    stats = session.stats
    assert (stats.stock_forwards, stats.forwards, stats.total_swapped_bytes) == (2, 0, 0)
    assert caplog.text.count("fewer than 2048 tokens and runs untouched") == 1
    assert "untouched: 2 of 2 batches were shorter than min_tokens=2,048" in session.report()
    memo_hf.disable(model)
    session = memo_hf.enable(model, MemoConfig(min_tokens=IDS.numel(), unswapped_layers=0))
    gradients(model, IDS), gradients(model, IDS[:, 1:])
    assert (session.stats.stock_forwards, session.stats.forwards) == (1, 1)


def test_expected_gradients_are_not_the_plain_ones_by_accident():
    """The bit-exact comparisons of these files could not fail if chunks changed nothing."""
    model = small()
    ours, plain = kept(model, settings=TOKEN), gradients(model, IDS)
    assert any(not torch.equal(ours[name], plain[name]) for name in plain)
