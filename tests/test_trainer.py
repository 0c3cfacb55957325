"""`MemoTrainer` and `MemoTrainerMixin`: Trainer's training exactly, on from the first step to the last, then off."""

import copy

import pytest
import torch
from trainer_runs import (
    LAYERS,
    MEMO,
    Gradients,
    arguments,
    assert_same_gradients,
    is_untouched,
    random_rows,
    tiny_llama,
    tiny_lora,
    train,
)
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

from memo_hf import MemoConfig, MemoTrainer
from memo_hf.errors import ConfigError, MemoError

# peft reads it whenever it wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# The switch got another name during transformers 5.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


@pytest.fixture
def data():
    return random_rows()


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_lora])
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulation"])
def test_gradients_equal_those_of_trainer(tmp_path, data, make_model, changes):
    args = arguments(tmp_path, **changes)
    _, expected = train(Trainer, make_model(), args, data)
    trainer, steps = train(MemoTrainer, make_model(), args, data, memo=MEMO)
    assert_same_gradients(steps, expected)
    assert trainer.memo_stats.forwards == 3 * args.gradient_accumulation_steps
    assert trainer.memo_stats.stock_forwards == 0
    assert {layer.mode for layer in trainer.memo_stats.layers} == {"token"}


def test_without_memo_it_is_trainer_to_the_bit(tmp_path, data):  # case 28
    results = []
    for trainer_class, kwargs in ((Trainer, {}), (MemoTrainer, {"memo": None})):
        model = tiny_lora(dropout=0.2)
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
        trainer, steps = train(trainer_class, model, args, data, eval_dataset=data, **kwargs)
        clocks = ("runtime", "per_second")
        logs = [
            {key: value for key, value in log.items() if not any(clock in key for clock in clocks)}
            for log in trainer.state.log_history
        ]
        results.append((steps, model.state_dict(), torch.get_rng_state(), logs))
    (steps, weights, rng, logs), (memo_steps, memo_weights, memo_rng, memo_logs) = results
    assert_same_gradients(memo_steps, steps, relative=0)
    assert all(torch.equal(weights[name], memo_weights[name]) for name in weights)
    assert torch.equal(rng, memo_rng)
    assert logs == memo_logs
    assert is_untouched(model)


def test_evaluation_before_between_and_after_steps(tmp_path, data):  # cases 24, 25
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    plain, expected = train(Trainer, tiny_llama(), args, data, eval_dataset=data)
    trainer, steps = train(MemoTrainer, tiny_llama(), args, data, eval_dataset=data, memo=MEMO)
    assert_same_gradients(steps, expected)
    losses, expected_losses = (
        [log["eval_loss"] for log in each.state.log_history if "eval_loss" in log] for each in (trainer, plain)
    )
    assert len(losses) == 4
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert trainer.memo_stats.forwards == 3  # of training alone
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected_losses[-1], rel=1e-6)


def test_mixed_precision_during_training_and_after_it(tmp_path, data):
    args = arguments(tmp_path, bf16=True, learning_rate=0.0)
    plain, expected = train(Trainer, tiny_llama(), args, data, eval_dataset=data)
    trainer, steps = train(MemoTrainer, tiny_llama(), args, data, eval_dataset=data, memo=MEMO)
    # bf16 has 8 bits, and chunks round in another order.
    assert_same_gradients(steps, expected, relative=0.05)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_trains_twice_and_leaves_nothing_behind(tmp_path, data):  # case 23
    sessions = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sessions.append(trainer.memo_session)

    model = tiny_llama()
    trainer = MemoTrainer(model=model, args=arguments(tmp_path), train_dataset=data, memo=MEMO, callbacks=[Look])
    for run in (1, 2):
        trainer.train()
        assert len(sessions) == 3 * run
        assert trainer.memo_session is None
        assert sessions[-1].stats.host_reserved_bytes == 0  # closed
        assert trainer.memo_stats.forwards == 3
        assert trainer.memo_stats.swapped_bytes == trainer.memo_stats.planned_bytes > 0
        assert is_untouched(model)


def test_a_failure_closes_the_session(tmp_path, data):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("a user's own error")

    model = tiny_llama()
    trainer = MemoTrainer(model=model, args=arguments(tmp_path), train_dataset=data, memo=MEMO, callbacks=[Fails])
    with pytest.raises(KeyError, match="a user's own error"):
        trainer.train()
    assert trainer.memo_session is None
    assert is_untouched(model)
    trainer.remove_callback(Fails)
    trainer.train()
    assert trainer.memo_stats.forwards == 3


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_lora])
def test_a_checkpoint_is_an_ordinary_one_and_resumes(tmp_path, data, make_model):
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer, steps = train(MemoTrainer, make_model(), args, data, memo=MEMO)
    plain = train(Trainer, make_model(), arguments(tmp_path / "plain", save_strategy="steps", save_steps=2), data)[0]
    saved, expected = ({f.name for f in (tmp_path / part / "checkpoint-2").iterdir()} for part in ("", "plain"))
    assert saved == expected
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())
    gradients = Gradients()
    resumed = MemoTrainer(model=make_model(), args=args, train_dataset=data, memo=MEMO, callbacks=[gradients])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_gradients(gradients.steps, steps[2:], relative=0)


def test_numbers_reach_the_loggers(tmp_path, data, capsys):
    memo = {"swap_fraction": 1.0, "chunk_size": 8}
    trainer, _ = train(MemoTrainer, tiny_llama(), arguments(tmp_path), data, memo=memo)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3
    assert all(log["memo/swapped_gib"] * 2**30 == trainer.memo_stats.planned_bytes for log in logs)
    assert all(log["memo/swap_fraction"] == 1.0 for log in logs)
    assert all(log["memo/host_peak_gib"] > 0 for log in logs)
    assert f"memo_hf: {LAYERS} layers in token mode" in capsys.readouterr().out


def test_too_short_batches_run_untouched_and_it_says_so(tmp_path, data, capsys):
    trainer, steps = train(MemoTrainer, tiny_llama(), arguments(tmp_path), data, memo=MemoConfig())
    _, expected = train(Trainer, tiny_llama(), arguments(tmp_path), data)
    assert_same_gradients(steps, expected, relative=1e-5)
    assert trainer.memo_stats.stock_forwards == 3
    assert "fewer than 2,048 tokens runs untouched" in capsys.readouterr().out


def test_no_effect_is_an_error(tmp_path, data):  # case 121
    class Elsewhere(MemoTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            other = copy.deepcopy(tiny_llama()).train()
            return other(**{k: v for k, v in inputs.items()}).loss

    trainer = Elsewhere(model=tiny_llama(), args=arguments(tmp_path), train_dataset=data, memo=MEMO)
    with pytest.raises(MemoError, match="swapped 0 bytes"):
        trainer.train()


@pytest.mark.parametrize(
    "changes, switch",
    [
        ({CHECKPOINTING: True}, rf"{CHECKPOINTING}=False \(\w+_checkpointing=False\)"),  # case 68
        ({CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
         f"{CHECKPOINTING}=False"),  # case 80
        ({"torch_compile": True}, "torch_compile=False"),
    ],
)  # fmt: skip
def test_refuses_what_does_the_same(tmp_path, data, monkeypatch, changes, switch):
    # TrainingArguments puts torch_compile into the environment.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.raises(ConfigError, match=switch):
        MemoTrainer(model=tiny_llama(), args=arguments(tmp_path, **changes), train_dataset=data, memo=MEMO)
    Trainer(model=tiny_llama(), args=arguments(tmp_path, **changes), train_dataset=data)


def test_refuses_wrong_settings(tmp_path, data):  # case 121
    for memo, message in (({"alpha": 1}, "alpha"), ({"swap_fraction": 2}, "swap_fraction"), ("swap", "got str")):
        with pytest.raises(ConfigError, match=message):
            MemoTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=data, memo=memo)


def test_a_trainer_without_memo_says_so(tmp_path, data):
    with pytest.warns(UserWarning, match=r"MemoTrainer was made without memo=.* Write memo=MemoConfig\(\)") as said:
        trainer = MemoTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=data)
    assert len(said) == 1 and said[0].filename == __file__ and trainer.memo_config is None
    MemoTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=data, memo=None)
    with pytest.raises(ConfigError, match=r"memo is True; write memo=MemoConfig\(\)"):
        MemoTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=data, memo=True)


def test_model_init_and_batch_size_search(tmp_path, data):
    args = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4)

    class OutOfMemoryOnce(TrainerCallback):
        sizes = []

        def on_step_end(self, args, state, control, **kwargs):
            self.sizes.append(state.train_batch_size)
            if len(self.sizes) == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate more than there is")

    trainer = MemoTrainer(
        model_init=lambda: tiny_llama(), args=args, train_dataset=data, memo=MEMO, callbacks=[OutOfMemoryOnce]
    )
    trainer.train()
    assert OutOfMemoryOnce.sizes[0] > OutOfMemoryOnce.sizes[1]
    assert trainer.memo_stats.forwards == 3
    assert is_untouched(trainer.model)


def test_config_parses_beside_training_arguments(tmp_path):
    parser = HfArgumentParser([TrainingArguments, MemoConfig])
    argv = ["--output_dir", str(tmp_path), "--swap_fraction", "0.25", "--chunk_size", "512", "--qkv", "rebuild",
            "--host_memory", "2GiB", "--no_chunked_loss", "--report_to", "none", "--use_cpu"]  # fmt: skip
    training, memo = parser.parse_args_into_dataclasses(argv)
    assert training.output_dir == str(tmp_path)
    assert memo == MemoConfig(swap_fraction=0.25, chunk_size=512, qkv="rebuild", host_memory="2GiB", chunked_loss=False)
    assert parser.parse_args_into_dataclasses(argv[:2])[1] == MemoConfig()
    with pytest.raises(ConfigError, match="swap_fraction is 1.5"):
        parser.parse_args_into_dataclasses([*argv[:2], "--swap_fraction", "1.5"])
