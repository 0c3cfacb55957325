"""`MemoAccelerator` and `MemoPlugin`: a plain loop trains as with Accelerator, with memo_hf on until it is to end."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from memo_hf import MemoAccelerator, MemoConfig, MemoPlugin
from memo_hf.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PLUGIN = MemoPlugin(MemoConfig(swap_fraction=0.5, chunk_size=8))


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's states are shared by a process; each test starts and ends with none."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).train()


def tiny_lora():
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def loop(accelerator, model, steps=4):
    """A user's own loop with gradient accumulation; returns the gradients of each micro-batch and the model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = torch.randint(0, 64, (2 * steps, 24), generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(ids, batch_size=2))
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return gradients, model


def assert_same(gradients, expected, relative):
    for step, expected_step in zip(gradients, expected, strict=True):
        assert step.keys() == expected_step.keys()
        for name, gradient in step.items():
            worst = (gradient - expected_step[name]).abs().max() / expected_step[name].abs().max().clamp(min=1e-12)
            assert worst <= relative, f"{name}: {worst:.2e}"


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_lora])  # case 82
def test_gradients_equal_those_of_a_plain_loop(make_model):
    expected, _ = loop(Accelerator(gradient_accumulation_steps=2), make_model())
    accelerator = MemoAccelerator(memo_plugin=PLUGIN, gradient_accumulation_steps=2)
    gradients, model = loop(accelerator, make_model())
    assert_same(gradients, expected, 1e-5)
    (session,) = accelerator.memo_sessions
    assert session.stats.forwards == 4
    assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
    report = session.report()
    assert "4 layers in token mode" in report and accelerator.memo_report == report
    accelerator.free_memory()
    assert accelerator.memo_report == report
    assert accelerator.memo_sessions == []
    assert not any("forward" in module.__dict__ for module in accelerator.unwrap_model(model).modules())


def test_mixed_precision():
    expected, _ = loop(Accelerator(mixed_precision="bf16"), tiny_llama())
    accelerator = MemoAccelerator(memo_plugin=PLUGIN, mixed_precision="bf16")
    gradients, _ = loop(accelerator, tiny_llama())
    assert accelerator.memo_sessions[0].stats.forwards == 4
    # bf16 has 8 bits; chunks round in another order.
    assert_same(gradients[:1], expected[:1], 0.05)


def test_without_a_plugin_it_is_accelerator():  # case 28
    expected, _ = loop(Accelerator(), tiny_llama())
    accelerator = MemoAccelerator()
    model = tiny_llama()
    gradients, prepared = loop(accelerator, model)
    assert_same(gradients, expected, 0)
    assert accelerator.memo_sessions == [] and accelerator.memo_report is None
    assert prepared is model and not any("forward" in module.__dict__ for module in model.modules())


def test_several_models_and_end_training():
    accelerator = MemoAccelerator(memo_plugin=PLUGIN)
    first, second = accelerator.prepare(tiny_llama(), tiny_llama())
    accelerator.prepare(first)  # once more: it is prepared already
    assert len(accelerator.memo_sessions) == 2
    reports = [session.report() for session in accelerator.memo_sessions]
    accelerator.end_training()
    assert accelerator.memo_report == "\n\n".join(reports)
    assert accelerator.memo_sessions == []
    assert not any("forward" in module.__dict__ for model in (first, second) for module in model.modules())


def test_a_model_of_the_users_own_is_left_alone_with_a_warning():
    accelerator = MemoAccelerator(memo_plugin=PLUGIN)
    with pytest.warns(UserWarning, match="leaves Linear as it is"):
        accelerator.prepare(nn.Linear(2, 2))
    assert accelerator.memo_sessions == []


def test_a_failing_prepare_leaves_no_model_enabled():
    accelerator = MemoAccelerator(memo_plugin=PLUGIN)
    model, compiled = tiny_llama(), torch.compile(tiny_llama(), backend="eager")
    with pytest.raises(UnsupportedModelError, match="torch.compile"):
        accelerator.prepare(model, compiled)
    assert accelerator.memo_sessions == []
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_refuses_compiling():
    with pytest.raises(ConfigError, match="dynamo_backend='no'"):
        MemoAccelerator(memo_plugin=PLUGIN, dynamo_backend="eager")


def test_refuses_fsdp_checkpointing_and_what_splits_attention():  # case 68
    from types import SimpleNamespace

    from memo_hf.integrations.accelerate import refuse_conflicts

    def accelerator(activation_checkpointing, parallelism):
        fsdp = SimpleNamespace(activation_checkpointing=activation_checkpointing)
        return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=fsdp), parallelism_config=parallelism)

    refuse_conflicts(accelerator(False, None))
    with pytest.raises(ConfigError, match="activation_checkpointing=False in fsdp_config"):
        refuse_conflicts(accelerator(True, None))
    with pytest.raises(ConfigError, match=r"context parallelism is on \(cp_size=2\).*sp_backend='deepspeed'"):
        refuse_conflicts(accelerator(False, ParallelismConfig(cp_size=2)))
    with pytest.raises(ConfigError, match=r"tensor parallelism is on \(tp_size=2\)"):
        refuse_conflicts(accelerator(False, ParallelismConfig(tp_size=2)))
    refuse_conflicts(accelerator(False, ParallelismConfig(sp_size=2)))


def test_the_plugin_takes_a_dictionary():
    assert MemoPlugin({"chunk_size": 8}).config == MemoConfig(chunk_size=8)
    assert MemoPlugin().config == MemoConfig()
    with pytest.raises(ConfigError, match="chunksize"):  # case 121
        MemoPlugin({"chunksize": 8})
    with pytest.raises(ConfigError, match="got int"):
        MemoPlugin(8)


def test_the_accelerator_takes_what_the_plugin_holds():
    for given in (MemoConfig(chunk_size=8), {"chunk_size": 8}, MemoPlugin({"chunk_size": 8})):
        assert MemoAccelerator(memo_plugin=given).memo_plugin.config == MemoConfig(chunk_size=8)
    with pytest.raises(ConfigError, match="expected a MemoConfig or a dictionary of its settings, got bool"):
        MemoAccelerator(memo_plugin=True)
