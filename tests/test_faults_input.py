"""Kind J of the cases, and input that cannot be: messages say what happened, the value, the limit and what to do."""

import logging
import os
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import memo_hf
from memo_hf import MemoConfig
from memo_hf.errors import ConfigError, HostMemoryError, MemoError, UnsupportedModelError
from tests.harness.sessions import IDS, TOKEN, assert_nothing_left, enabled, small
from tests.tiny_models import gradients, worst_relative_error


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"swap_fracton": 0.5},
            r"keys \['swap_fracton'\] \(did you mean 'swap_fraction'\?\); the known keys are \['swap_fraction'",
        ),
        ({"a": 1, "chunk_size": 4, "A": 2}, r"unknown MemoConfig keys \['A', 'a'\]"),
        ({"swap_fraction": 1.5}, "swap_fraction is 1.5; it must be a number from 0 to 1"),
        ({"swap_fraction": -0.1}, "swap_fraction is -0.1"),
        ({"swap_fraction": float("nan")}, "swap_fraction is nan"),
        ({"swap_fraction": "0.5"}, "swap_fraction is '0.5'"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be a whole number of at least 1"),
        ({"chunk_size": 1.5}, "chunk_size is 1.5"),
        ({"chunk_size": True}, "chunk_size is True"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be a whole number of at least 0"),
        ({"unswapped_layers": None}, "unswapped_layers is None"),
        ({"qkv": "keep"}, r"qkv is 'keep'; it must be one of \['swap', 'rebuild'\]"),
        ({"mode": "token"}, r"mode is 'token'; it must be one of \['auto', 'layer'\]"),
        ({"host_memory": "lots"}, "host_memory"),
        ({"host_memory": "0GiB"}, "host_memory is 0"),
        ({"host_memory": 64}, "host_memory: 64 without a unit means 64 bytes; write the unit, for example 64GiB"),
        ({"device_memory": "70"}, "device_memory: 70 without a unit"),
        ({"host_memory_for_others": "60"}, "host_memory_for_others: 60 without a unit"),
    ],
)
def test_settings_that_cannot_be(values, message):  # case 121
    for make in (MemoConfig.from_dict, lambda values: MemoConfig(**values)):
        with pytest.raises(ConfigError, match=message):
            make(values)


def test_settings_of_another_type_are_refused():
    for config in ({"swap_fraction": 0.5}, 0.5, "auto"):
        with pytest.raises(ConfigError, match=f"config is {type(config).__name__}; pass a MemoConfig"):
            memo_hf.enable(small(), config)


def test_what_is_no_model_is_refused():
    for model, said in (
        ("llama", r"str \('llama'\)"),
        (Path("llama"), "PosixPath"),
        ([small()], "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(ConfigError, match=f"^model is {said}; pass the model itself"):
            memo_hf.enable(model)


def test_a_model_without_decoder_layers():
    for model in (nn.Linear(2, 2), nn.Sequential(nn.ReLU())):
        with pytest.raises(UnsupportedModelError, match="(Linear|Sequential) has no decoder layers.*without memo_hf"):
            memo_hf.enable(model)
        assert "forward" not in vars(model)


LEAST = 4 * 2 * 13 * (32 + 32 + 32 + 2 * 16)  # layer input, attention output, queries, keys and values in fp32


@pytest.mark.parametrize("qkv, least", [("swap", LEAST), ("rebuild", 4 * 2 * 13 * (32 + 32))])
def test_a_host_budget_too_small_for_what_is_never_recomputed(qkv, least):
    """Before the first layer runs, with the bytes of a step and of a layer; with that many it begins."""
    model, calls = small(), []
    settings = dict(swap_fraction=0.0, chunk_size=26, unswapped_layers=1, qkv=qkv)
    session = enabled(model, **settings, host_memory=f"{2 * least - 1}B")
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(HostMemoryError, match=r"Raise MemoConfig\(host_memory=\.\.\.\), shorten the sequence") as error:
        gradients(model, IDS)
    numbers = [int(number) for number in re.findall(r"\((\d+) bytes\)", str(error.value))]
    assert numbers == [2 * least, least, 2 * least - 1] and "each of the 2 layers" in str(error.value)
    assert not calls and session.stats.swapped_bytes == session.stats.host_reserved_bytes == 0
    memo_hf.disable(model)
    logsumexp = 4 * 2 * 13 * 4
    session = enabled(model, **settings, host_memory=f"{2 * (least + logsumexp) + 8192}B")
    gradients(model, IDS)
    assert session.stats.swapped_bytes == 2 * (least + logsumexp)


def test_the_same_in_layer_mode():
    model = small()
    enabled(model, mode="layer", swap_fraction=0.0, unswapped_layers=0, host_memory="1KiB")
    with pytest.raises(HostMemoryError, match=r"\(9984 bytes\), .*\(3328 bytes\) for each of the 3 layers"):
        gradients(model, IDS)


@pytest.mark.parametrize(
    "budget, swapped, said",
    [
        (2 * (6656 + 416) + 8192, 2 * (6656 + 416), "q, k, v are recomputed"),
        (2 * 3328 + 4096, 2 * 3328, "the layers' inputs alone are swapped, and attention is recomputed too"),
    ],
)
def test_a_cpus_small_host_budget_is_kept_by_recomputing_more(budget, swapped, said, caplog):
    model = small()
    plain = gradients(model, IDS)
    session = enabled(model, chunk_size=8, unswapped_layers=1, host_memory=f"{budget}B")
    with caplog.at_level("WARNING", logger="memo_hf"):
        for _ in range(2):
            assert worst_relative_error(gradients(model, IDS), plain) < 1e-5
            assert session.stats.swapped_bytes == swapped and session.stats.host_reserved_bytes <= budget
    told = [record.message for record in caplog.records if "host memory has no room for all" in record.message]
    assert told[-1].endswith(said) and len(told) == (1 if "q, k, v" in said else 2)  # nothing new is said in the second
    assert "decided by host memory" in session.report()
    assert ("of 2 layers the inputs alone are swapped" in session.report()) is ("inputs" in said)


def test_a_host_budget_that_runs_out_on_the_way():
    """What is swapped beyond the least is not foreseen here: the message names what to change, and nothing is left."""
    model = small()
    plain = gradients(model, IDS)
    session = enabled(model, **{**TOKEN, "swap_fraction": 1.0}, host_memory=f"{3 * LEAST}B")
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="budget.*Raise host_memory, lower swap_fraction, or .*shorter"):
            gradients(model, IDS)
        assert_nothing_left(session)
        assert session.stats.host_reserved_bytes <= 3 * LEAST
    memo_hf.disable(model)
    enabled(model, **{**TOKEN, "swap_fraction": 0.0}, host_memory=f"{3 * LEAST}B")
    assert worst_relative_error(gradients(model, IDS), plain) < 1e-5


def test_the_budget_is_shared_by_the_ranks_of_a_node(monkeypatch):  # case 93
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model = small()
    session = enabled(model, **TOKEN, host_memory="64MiB")
    gradients(model, IDS)
    assert session.stats.host_budget_bytes == 2**24


def test_a_step_that_swaps_nothing_is_reported(caplog):  # case 121
    model = small()
    session = enabled(model, **{**TOKEN, "unswapped_layers": 3})
    with caplog.at_level(logging.WARNING, "memo_hf"):
        for _ in range(2):
            gradients(model, IDS)
    assert session.stats.swapped_bytes == 0
    assert caplog.text.count("memo_hf swaps nothing") == 1
    assert "MemoConfig(unswapped_layers=3) keeps all 3 layers on the device" in caplog.text


def test_a_step_that_swaps_is_not(caplog):
    model = small()
    enabled(model, **TOKEN)
    with caplog.at_level(logging.WARNING, "memo_hf"):
        gradients(model, IDS)
    assert not caplog.text


def test_input_without_two_tokens_runs_untouched():
    model = small()
    session = enabled(model, **TOKEN)
    plain = small()
    for ids in (IDS[:, :1], IDS[:1, :1]):
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert session.stats.forwards == 0 and session.stats.stock_forwards == 2


def test_a_hook_inside_of_a_layer_is_warned_of_once(caplog):
    model, seen = small(), []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    model.model.layers[0].register_forward_hook(lambda *_: None)  # around the layer: sees all tokens, and the graph
    enabled(model, **TOKEN)
    for _ in range(2):
        gradients(model, IDS)
    messages = [record.message for record in caplog.records if "forward hook" in record.message]
    assert len(messages) == 1 and "a forward hook on model.layers.1.mlp is called for each chunk" in messages[0]
    assert "MemoConfig(mode='layer')" in messages[0] and any(not output.requires_grad for output in seen)
    handle.remove()
    memo_hf.disable(model)
    caplog.clear()
    enabled(model, **TOKEN)
    gradients(model, IDS)
    assert not [record for record in caplog.records if "forward hook" in record.message]


def test_eval_mode_with_gradients_is_warned_of_once(caplog):
    model = small().eval()  # as from_pretrained leaves it
    session = enabled(model, **TOKEN)
    for _ in range(2):
        gradients(model, IDS)
    messages = [record.message for record in caplog.records if "eval mode" in record.message]
    assert len(messages) == 1 and "call model.train()" in messages[0]
    assert session.stats.forwards == session.stats.swapped_bytes == 0
    caplog.clear()
    memo_hf.disable(model)
    enabled(model.train(), **TOKEN)
    gradients(model, IDS)
    gradients(model.eval(), IDS)
    with torch.no_grad():
        model(input_ids=IDS)
    assert not [record for record in caplog.records if "eval mode" in record.message]


def test_a_layer_that_keeps_a_tensor_of_its_forward_runs_whole():
    """An auxiliary loss made from an attribute of a module has its gradient."""

    class KeepsLoss(nn.Linear):
        def forward(self, hidden):
            output = super().forward(hidden)
            self.loss = (output**2).mean()
            return output

    def step(model):
        loss = model(input_ids=IDS, labels=IDS).loss
        (loss + sum(layer.mlp.up_proj.loss for layer in model.model.layers)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, model = small(), small()
    for each in (plain, model):
        for layer in each.model.layers:
            layer.mlp.up_proj.__class__ = KeepsLoss
    session = enabled(model, **TOKEN)
    assert worst_relative_error(step(model), step(plain)) < 1e-5
    assert {layer.mode for layer in session.stats.layers} == {"layer"}
    assert "up_proj.loss keeps a tensor of its forward" in session.stats.layers[0].reason


@pytest.mark.parametrize("swap_fraction", [0.0, 0.5, 1.0])
def test_parameters_that_changed_since_forward_are_refused(swap_fraction):
    model = small()
    enabled(model, **{**TOKEN, "swap_fraction": swap_fraction})
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()
    others = {name: (p.detach() * 1.3).requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, kwargs=dict(input_ids=IDS, labels=IDS), tie_weights=False).loss
    with pytest.raises(RuntimeError, match="other parameters in backward|changed in place"):
        torch.autograd.grad(loss, list(others.values()), allow_unused=True)


def test_enabled_under_autocast_and_trained_without():
    plain, model = small(), small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        enabled(model, **TOKEN)
    assert worst_relative_error(gradients(model, IDS), gradients(plain, IDS)) < 1e-5


def test_a_forked_child_is_told():
    model = small()
    enabled(model, **TOKEN)
    gradients(model, IDS)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            gradients(model, IDS)
            os.write(write, b"trained")
        except MemoError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"the process was forked while memo_hf was enabled" in os.read(read, 1000)
    gradients(model, IDS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_activated_lora_is_refused():
    peft = get_peft_model(
        small(), LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    )
    with pytest.raises(UnsupportedModelError, match="activated LoRA"):
        memo_hf.enable(peft)
