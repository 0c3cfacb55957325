"""Adapters of every kind, on ordinary and on quantized weights, in a Trainer and out of it; saved ones need no memo_hf.

Where in a layer adapters may be, and switching between them, is in test_gradients_trainable; dropout in
test_gradients_dropout.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters import lora, with_adapter
from exactness import check_exact, enabled, gradients_of, language_loss
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
    prepare_model_for_kbit_training,
)
from tiny_models import random_ids, tiny
from torch import nn
from trainer_runs import MEMO, arguments, assert_same_gradients, random_rows, tiny_llama, tiny_lora, train
from transformers import Trainer

import memo_hf
from memo_hf import MemoTrainer
from memo_hf.errors import ConfigError

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SETTINGS = [dict(swap_fraction=0.0, qkv="rebuild"), dict(swap_fraction=0.5, unswapped_layers=0)]
IDS = random_ids(2, 37)


def llama(**changes):
    return tiny("llama", num_hidden_layers=3, **changes)


def check(model, settings=SETTINGS):
    check_exact(model, language_loss(model, IDS), settings)


KINDS = {
    "LoRA of the head": lambda: lora(llama(), target_modules=["q_proj", "lm_head"]),
    "LoRA of the embedding": lambda: lora(llama(), target_modules=["v_proj", "embed_tokens"]),
    "LoRA with biases of its own": lambda: lora(
        tiny("qwen2", num_hidden_layers=3), target_modules=["q_proj", "v_proj"], lora_bias=True
    ),
    "DoRA with rsLoRA and norms saved": lambda: lora(
        llama(), target_modules="all-linear", use_dora=True, use_rslora=True, modules_to_save=["norm"]
    ),
    "LoRA of the experts": lambda: lora(
        tiny("qwen3_moe", num_hidden_layers=3),
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "some tokens": lambda: lora(llama(), target_modules=["q_proj"], trainable_token_indices=[5, 7, 9]),
    "IA3": lambda: with_adapter(
        llama(), IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "VeRA, whose projections all layers share": lambda: with_adapter(
        llama(), VeraConfig(r=4, target_modules=["q_proj", "o_proj"], d_initial=0.3)
    ),
    "LoHa": lambda: with_adapter(llama(), LoHaConfig(r=4, target_modules=["v_proj", "up_proj"], init_weights=False)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact(kind):  # case 54
    model = KINDS[kind]()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with enabled(model) as session:
        assert {layer.mode for layer in session.stats.layers} == {"token"}
    check(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


class _Dequantized(torch.autograd.Function):
    """x times the weights that 4-bit numbers stand for; dequantized again in backward, and not saved as tensors."""

    @staticmethod
    def forward(ctx, inputs, linear):
        ctx.linear = linear
        return inputs @ linear.dequantized().T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.linear.dequantized(), None


class FourBitLinear(nn.Linear):
    """Stands in for bitsandbytes' Linear4bit: two 4-bit numbers a byte in `weight`, a scale for each row.

    As the real one on a CPU it repacks its weights, in place and for good, when it is evaluated without gradients.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        numbers = (linear.weight.detach() / self.scale).round().to(torch.int8).add(8).to(torch.uint8)
        self.weight = nn.Parameter(numbers[:, ::2] * 16 + numbers[:, 1::2], requires_grad=False)

    def dequantized(self) -> torch.Tensor:
        numbers = torch.stack((self.weight // 16, self.weight % 16), dim=2).flatten(1)
        return (numbers.float() - 8) * self.scale

    def forward(self, inputs):
        if not (self.training or inputs.requires_grad):
            self.weight.data = self.weight.data.flip(1)
        return _Dequantized.apply(inputs, self)


def quantized(make_linear, **changes) -> nn.Module:
    """A Llama whose layers' linears are replaced by what `make_linear` makes of them."""
    model = llama(**changes)
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear:
                layer.set_submodule(name, make_linear(module))
    return model


def real_four_bit(linear: nn.Linear) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    weight = linear.weight.detach()
    made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    return made.to("cpu")


@pytest.mark.parametrize("make_linear", [FourBitLinear, real_four_bit])
def test_qlora_is_exact_and_leaves_the_weights_alone(make_linear):
    model = quantized(make_linear, hidden_size=64, intermediate_size=128)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.is_floating_point()}
    assert len(before) == 3 * 7
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = lora(model, target_modules="all-linear", lora_dropout=0.0)
    plain = gradients_of(model, language_loss(model, IDS))
    assert all("lora_" in name for name in plain if name != "random state")
    check(model)
    with enabled(model.eval(), swap_fraction=0.5):
        pass
    model.train()
    after = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().named_parameters()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # so does peft
def test_what_prepares_qlora_checkpoints_unless_told_not_to():
    model = quantized(FourBitLinear)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ConfigError, match="use_gradient_checkpointing=False"):
        memo_hf.enable(model)


def first(trainer):
    inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), trainer.model)


def second(trainer):
    trainer.model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    trainer.model.set_adapter("second")


@pytest.mark.parametrize("make_model, add", [(tiny_llama, first), (tiny_lora, second)])
def test_adapters_added_after_the_trainer_was_made(tmp_path, make_model, add):
    runs, args = [], arguments(tmp_path, learning_rate=0.01)
    for trainer_class, memo in ((Trainer, {}), (MemoTrainer, {"memo": MEMO})):

        class Adding(trainer_class):
            def train(self, *args, **kwargs):
                torch.manual_seed(7)
                add(self)
                return super().train(*args, **kwargs)

        runs.append(train(Adding, make_model(), args, random_rows(), **memo))
    assert_same_gradients(runs[1][1], runs[0][1])
    assert all("lora_" in name for name in runs[1][1][0])
    assert runs[1][0].memo_stats.swapped_bytes > 0


LOAD = """
import sys
sys.modules["memo_hf"] = None  # importing it fails
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM
model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2]).eval()
torch.save(model(input_ids=torch.arange(24)[None]).logits, sys.argv[3])
"""


def test_saved_adapters_need_no_memo_hf(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = tiny_lora(use_dora=True, use_rslora=True, modules_to_save=["lm_head"])
    trainer, _ = train(MemoTrainer, model, arguments(tmp_path, learning_rate=1.0), random_rows(), memo=MEMO)
    trainer.save_model(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=torch.arange(24)[None]).logits
        with trainer.model.disable_adapter():
            base = trainer.model(input_ids=torch.arange(24)[None]).logits
    assert (expected - base).abs().max() > 1e-3  # it has learnt something
    paths = [str(tmp_path / name) for name in ("base", "adapter", "logits.pt")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, *paths],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(paths[-1]), expected, rtol=1e-5, atol=1e-6)
    assert not list(Path(tmp_path / "adapter").glob("*memo*"))
