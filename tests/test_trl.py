"""TRL's SFT and DPO trainers with `MemoTrainerMixin`: the gradients of every step are those of TRL's trainer alone.

Their losses never call the model's own: TRL replaces the model's forward by one that makes log-probabilities in chunks.
"""

import copy
import dataclasses
import warnings
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import (
    MEMO,
    SETTINGS,
    TOKENS,
    VOCAB,
    assert_same_gradients,
    is_untouched,
    random_rows,
    tiny_llama,
    tiny_lora,
    train,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from memo_hf import MemoTrainerMixin
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.errors import ConfigError

trl = pytest.importorskip("trl")
chunked_logprob = pytest.importorskip("trl.kernels.chunked_logprob")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
# TRL's switch, which newer transformers know by another name.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "w1 {% generation %}{{ message['content'] }} <e>{% endgeneration %}"
    "{% else %}w2 {{ message['content'] }} <e>{% endif %}{% endfor %}"
)


class MemoSFTTrainer(MemoTrainerMixin, trl.SFTTrainer):
    pass


class MemoDPOTrainer(MemoTrainerMixin, trl.DPOTrainer):
    pass


@pytest.fixture
def tokenizer():
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<e>": VOCAB - 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="<e>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", pad_token="<e>", chat_template=CHAT)


def words(generator, fewest, most) -> str:
    number = torch.randint(fewest, most + 1, (), generator=generator)
    return " ".join(f"w{i}" for i in torch.randint(3, VOCAB - 1, (number,), generator=generator).tolist())


def rows(kind: str) -> Dataset:
    """Sixteen rows of unequal lengths, of at most `TOKENS` tokens."""
    generator = torch.Generator().manual_seed(4)
    make = {
        "text": lambda: {"text": words(generator, 5, TOKENS - 1)},
        "completions": lambda: {"prompt": words(generator, 3, 9), "completion": " " + words(generator, 2, 9)},
        "chat": lambda: {
            "messages": [
                {"role": role, "content": words(generator, 2, 4)} for role in ("user", "assistant", "user", "assistant")
            ]
        },
        "preferences": lambda: {
            "prompt": words(generator, 3, 9),
            "chosen": " " + words(generator, 2, 9),
            "rejected": " " + words(generator, 2, 9),
        },
    }[kind]
    return Dataset.from_list([make() for _ in range(16)])


def config(config_class, folder, **changes):
    settings = {**SETTINGS, "bf16": False, "max_length": TOKENS, "gradient_checkpointing": False}
    return config_class(str(folder), **{**settings, **changes})


def compare(plain_class, memo_class, make_model, args, data, relative=1e-5, **kwargs):
    """Train with both; returns memo_hf's trainer, what it logged, and the gradients of its steps."""
    runs = []
    for trainer_class, extra in ((plain_class, {}), (memo_class, {"memo": MEMO})):
        torch.manual_seed(5)
        model = make_model()
        # TRL writes into the arguments that it is given.
        runs.append(train(trainer_class, model, copy.deepcopy(args), data, **copy.deepcopy(kwargs), **extra))
    (plain, expected), (trainer, steps) = runs
    assert_same_gradients(steps, expected, relative)
    losses, expected_losses = (
        [log["loss"] for log in each.state.log_history if "loss" in log] for each in (trainer, plain)
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert len(steps) == 3
    assert trainer.memo_stats.forwards == 3 * args.gradient_accumulation_steps
    assert trainer.memo_stats.swapped_bytes == trainer.memo_stats.planned_bytes > 0
    assert {layer.mode for layer in trainer.memo_stats.layers} == {"token"}
    return trainer, next(log for log in trainer.state.log_history if "loss" in log), steps


SFT = {
    "padding": ("text", {}),
    "best-fit packing": ("text", {"packing": True}),
    "best-fit packing that splits": ("text", {"packing": True, "packing_strategy": "bfd_split", "max_length": 16}),
    "wrapped packing": ("text", {"packing": True, "packing_strategy": "wrapped"}),
    "padding-free": ("text", {"padding_free": True, "max_length": None}),
    "completions alone": ("completions", {}),
    "packed completions": ("completions", {"packing": True}),
    "whole rows of completions": ("completions", {"completion_only_loss": False}),
    "assistant alone": ("chat", {"assistant_only_loss": True}),
    "packed assistant": ("chat", {"assistant_only_loss": True, "packing": True, "max_length": 48}),
    "DFT loss": ("completions", {"loss_type": "dft"}),
    "label smoothing, with full logits": ("text", {"label_smoothing_factor": 0.1}),
    "accumulation": ("text", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}),
}


@pytest.mark.parametrize("what", SFT)
def test_sft_gradients_equal_trl_alone(tmp_path, tokenizer, what):
    kind, changes = SFT[what]
    args = config(trl.SFTConfig, tmp_path, **changes)
    trainer, log, _ = compare(trl.SFTTrainer, MemoSFTTrainer, tiny_llama, args, rows(kind), processing_class=tokenizer)
    assert {"memo/swapped_gib", "mean_token_accuracy", "entropy"} <= log.keys()
    if changes.get("packing") and trainer.padding_free:
        assert sum(len(row) for row in trainer.train_dataset["seq_lengths"]) > len(trainer.train_dataset)


@pytest.mark.parametrize("memo, chunks", [(MEMO, True), (dataclasses.replace(MEMO, chunked_loss=False), False)])
def test_the_loss_takes_less_memory_than_trl_s(tmp_path, tokenizer, memo, chunks):
    """With 1,024 tokens and 8,192 words TRL's loss on a CPU is nearly all of the peak."""
    tokens, words = 1024, 8192
    ids = torch.randint(0, words, (1, tokens), generator=torch.Generator().manual_seed(6))
    data = Dataset.from_dict({"input_ids": ids.tolist()})
    args = config(trl.SFTConfig, tmp_path, max_steps=1, max_length=tokens, per_device_train_batch_size=1, packing=True)
    peaks, runs = [], []
    for setting in (memo, None):
        model = tiny_llama(vocab_size=words, max_position_embeddings=tokens)
        with AllocatorMeter() as meter:
            trainer, steps = train(
                MemoSFTTrainer, model, copy.deepcopy(args), data, memo=setting, processing_class=tokenizer
            )
        peaks.append(meter.peak_bytes)
        runs.append(steps)
    assert_same_gradients(*runs)
    assert chunked_logprob.TOKEN_CHUNK_SIZE == 4096
    logits = tokens * words * 4
    assert peaks[1] > 8 * logits
    assert (peaks[0] < 3 * logits) == chunks


@pytest.mark.parametrize("packing", [False, True])
def test_sft_with_an_adapter(tmp_path, tokenizer, packing):
    args = config(trl.SFTConfig, tmp_path, packing=packing)
    lora = LoraConfig(r=2, target_modules="all-linear")
    _, _, steps = compare(
        trl.SFTTrainer, MemoSFTTrainer, tiny_llama, args, rows("text"), processing_class=tokenizer, peft_config=lora
    )
    assert all("lora_" in name for name in steps[0])


DPO = {
    "a copy as the reference": (tiny_llama, {}, {}),
    "a model as the reference": (tiny_llama, {}, {"ref_model": lambda: tiny_llama(rms_norm_eps=1e-3)}),
    "the model without its adapter": (tiny_llama, {}, {"peft_config": lambda: LoraConfig(r=2)}),
    "a frozen copy of the adapter": (lambda: tiny_lora(init_lora_weights=False), {}, {}),
    "computed before": (tiny_llama, {"precompute_ref_log_probs": True}, {}),
    "weighted by the policy": (tiny_llama, {"use_weighting": True}, {}),
}


@pytest.mark.parametrize("reference", DPO)
def test_dpo_gradients_equal_trl_alone(tmp_path, tokenizer, reference):  # case 24
    """Every step has a forward pass of the policy and one of the reference, which may be the same layers."""
    make_model, changes, extra = DPO[reference]
    if make_model is tiny_llama:  # TRL reads the copy that is the reference from the model's own folder
        tiny_llama().save_pretrained(tmp_path / "model")
        make_model = lambda: LlamaForCausalLM.from_pretrained(tmp_path / "model")  # noqa: E731
    args = config(trl.DPOConfig, tmp_path, learning_rate=0.01, **changes)
    extra = {name: make() for name, make in extra.items()}
    trainer, log, steps = compare(
        trl.DPOTrainer,
        MemoDPOTrainer,
        make_model,
        args,
        rows("preferences"),
        relative=1e-4,  # the gradient is of a difference of two nearly equal sums
        processing_class=tokenizer,
        **extra,
    )
    assert {"memo/swapped_gib", "rewards/margins"} <= log.keys()
    assert not any(".ref." in name for name in steps[0])
    assert is_untouched(
        trainer.model.get_base_model().model if hasattr(trainer.model, "peft_config") else trainer.model.model
    )


def test_checkpointing_that_is_only_a_default_is_turned_off(tmp_path, tokenizer):
    args = trl.SFTConfig(str(tmp_path), bf16=False, **SETTINGS)
    assert args.gradient_checkpointing
    with pytest.warns(UserWarning, match="Write gradient_checkpointing=False"):
        trainer = MemoSFTTrainer(
            model=tiny_llama(), args=args, train_dataset=random_rows(), processing_class=tokenizer, memo=MEMO
        )
    trainer.train()
    assert trainer.memo_stats.forwards == 3
    assert args.gradient_checkpointing  # the user's own arguments are left alone
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = MemoSFTTrainer(
            model=tiny_llama(), args=args, train_dataset=random_rows(), memo=None, processing_class=tokenizer
        )
    assert getattr(plain.args, CHECKPOINTING)


@pytest.mark.parametrize("trainer_class, config_class, kind, where", [
    (MemoSFTTrainer, trl.SFTConfig, "text", "sft_trainer"),
    (MemoDPOTrainer, trl.DPOConfig, "preferences", "dpo_trainer"),
])  # fmt: skip
def test_refuses_trl_s_activation_offloading(
    tmp_path, tokenizer, monkeypatch, trainer_class, config_class, kind, where
):
    # TRL's own needs a GPU.
    monkeypatch.setattr(f"trl.trainer.{where}.get_act_offloading_ctx_manager", lambda model: nullcontext())
    args = config(config_class, tmp_path, activation_offloading=True)
    tiny_llama().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    kwargs = dict(model=model, args=args, train_dataset=rows(kind), processing_class=tokenizer)
    with pytest.raises(ConfigError, match="activation_offloading=False.*or train without memo_hf: memo=None"):
        trainer_class(**kwargs, memo=MEMO)
    assert trainer_class(**kwargs, memo=None).args.activation_offloading
