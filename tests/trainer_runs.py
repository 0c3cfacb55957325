"""How the tests of trainers train a tiny model with and without memo_hf, and compare the gradients of every step."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from memo_hf import MemoConfig

MEMO = MemoConfig(swap_fraction=0.5, chunk_size=8)
VOCAB, TOKENS, LAYERS = 64, 24, 4
SETTINGS = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def tiny_llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**{**sizes, **changes})
    return LlamaForCausalLM(config)


def tiny_lora(dropout=0.0, **settings):
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(**{"r": 2, "target_modules": "all-linear", "lora_dropout": dropout, **settings})
    )


def random_rows() -> Dataset:
    """Sixteen rows of `TOKENS` random tokens, with labels."""
    ids = torch.randint(0, VOCAB, (16, TOKENS), generator=torch.Generator().manual_seed(3))
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def arguments(folder, **changes):
    return TrainingArguments(str(folder), **{**SETTINGS, **changes})


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def train(trainer_class, model, args, data, **kwargs):
    """The trainer after `train()`, and the gradients of its steps."""
    gradients = Gradients()
    trainer = trainer_class(model=model, args=args, train_dataset=data, callbacks=[gradients], **kwargs)
    trainer.train()
    return trainer, gradients.steps


def assert_same_gradients(steps, expected, relative=1e-5):
    assert len(steps) == len(expected)
    for step, expected_step in zip(steps, expected, strict=True):
        assert step.keys() == expected_step.keys()
        for name, gradient in step.items():
            worst = (gradient - expected_step[name]).abs().max() / expected_step[name].abs().max().clamp(min=1e-12)
            assert worst <= relative, f"{name}: {worst:.2e}"


def is_untouched(model):
    return not any("forward" in module.__dict__ for module in model.modules())
