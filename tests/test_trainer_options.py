"""Options of `TrainingArguments` that touch the forward, the loss or the loop: each step as with a plain Trainer."""

import pytest
import torch
from datasets import Dataset
from trainer_runs import MEMO, arguments, assert_same_gradients, is_untouched, random_rows, tiny_llama, train
from transformers import Trainer, TrainerCallback

from memo_hf import MemoTrainer

SPLIT = {"eval_strategy": "steps", "eval_steps": 1}
OPTIONS = {
    "half precision": {"fp16": True},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "last accumulation is shorter": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 1},
    "clipped gradients": {"max_grad_norm": 0.01},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "cache asked for": {"use_cache": True},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "workers load the data": {"dataloader_num_workers": 2, **SPLIT},
    "columns that are no inputs": {"remove_unused_columns": False},
    "best model at the end": {"save_strategy": "steps", "save_steps": 1, "save_only_model": True,
                              "load_best_model_at_end": True, **SPLIT},
    "memory metrics": {"skip_memory_metrics": False, "torch_empty_cache_steps": 1,
                       "include_num_input_tokens_seen": "all"},
    "logits of evaluation": {"eval_accumulation_steps": 1, "batch_eval_metrics": True, **SPLIT},
}  # fmt: skip


def rows_of_many_lengths(extra: bool) -> Dataset:
    rows = random_rows()["input_ids"]
    rows = [{"input_ids": row[:n], "labels": row[:n]} for n, row in enumerate(rows, start=9)]
    if extra:
        rows = [{**row, "weight": [0.5] * len(row["labels"]), "kind": n} for n, row in enumerate(rows)]
    return Dataset.from_list(rows)


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "weight": 0.0}

    def column(name):
        if name == "kind":
            return torch.tensor([row[name] for row in rows])
        return torch.tensor([row[name] + [fill[name]] * (longest - len(row[name])) for row in rows])

    batch = {name: column(name) for name in rows[0]}
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_step_is_trainers(tmp_path, option):
    changes = OPTIONS[option]
    data = rows_of_many_lengths(extra="remove_unused_columns" in changes)
    runs = []
    for name, trainer_class, memo in (("plain", Trainer, {}), ("memo", MemoTrainer, {"memo": MEMO})):
        args = arguments(tmp_path / name, **changes)
        metrics = {}
        if args.batch_eval_metrics:
            metrics = {"compute_metrics": lambda seen, compute_result: {"mean": float(seen.predictions.mean())}}
        trainer, steps = train(
            trainer_class, tiny_llama(), args, data, data_collator=pad, eval_dataset=data, **metrics, **memo
        )
        runs.append((trainer, steps))
    (plain, expected), (trainer, steps) = runs
    # fp16 has 11 bits, and chunks round in another order.
    rounding = 1e-2 if "fp16" in changes else 1e-5
    assert_same_gradients(steps, expected, rounding)
    assert trainer.state.global_step == plain.state.global_step
    weights = plain.model.state_dict()
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=10 * rounding, atol=rounding / 10, msg=name)
    assert is_untouched(trainer.model)
    assert trainer.memo_stats.swapped_bytes == trainer.memo_stats.planned_bytes > 0
    for log, plain_log in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "eval_loss", "eval_mean"} & plain_log.keys():
            assert log[key] == pytest.approx(plain_log[key], rel=10 * rounding)


def test_generation_and_a_loss_of_ones_own_between_steps(tmp_path):
    class Speaks(TrainerCallback):
        def __init__(self):
            self.said = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for training in (False, True):
                model.train(training)
                prompt = torch.arange(1, 9)[None]
                self.said.append(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
                with torch.no_grad():
                    self.said.append(model(prompt, labels=prompt).loss.item())

    said = []
    for trainer_class, memo in ((Trainer, {}), (MemoTrainer, {"memo": MEMO})):
        speaks = Speaks()
        model = tiny_llama()
        data = random_rows()
        trainer = trainer_class(model=model, args=arguments(tmp_path), train_dataset=data, callbacks=[speaks], **memo)
        trainer.train()
        said.append(speaks.said)
    for ours, plain in zip(*said, strict=True):
        assert ours == (pytest.approx(plain, rel=1e-5) if isinstance(plain, float) else plain)
