"""Fine-tune a causal language model at long context with memo_hf: 7B at 1M tokens on GPUs, 135M at 4,096 on a CPU.

    accelerate launch --config_file recipes/configs/zero3_ulysses_8gpu.yaml recipes/llama7b_1m.py \\
        --model path/to/llama-7b --dataset my_books/ --seq-len 1M
    accelerate launch recipes/llama7b_1m.py --preset cpu

A preset is a set of defaults. Every setting of this script, of `transformers.TrainingArguments` and of
`memo_hf.MemoConfig` is also an argument: see `--help`. With `--dry-run` the launch is forecast instead of run.
"""

import contextlib
import sys
import time
from dataclasses import dataclass, field

import torch
from dry_run import dry_run
from launching import (
    RecipeArguments,
    RecipeParser,
    checkpoint_to_resume,
    config_file,
    leave_the_ranks,
    no_empty_folders,
    say_how_often,
    train,
    without_traceback,
)
from long_text import check_positions, long_sequences, open_documents, stretch_positions
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments, set_seed

from memo_hf import MemoTrainer
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.units import format_bytes, parse_count

PRESETS = {
    # A demonstration: a checkpoint made by recipes/get_checkpoint.py, and text that comes with Python.
    "cpu": {
        "model": "outputs/smollm2-135m",
        "dataset": "manual",
        "seq_len": "4096",
        "compare": True,
        "prompt": "A list comprehension",
        "use_cpu": True,
        "max_steps": 3,
        "save_strategy": "no",
        "output_dir": "outputs/llama7b_1m-cpu",
    },
    "gpu": {"seq_len": "1M", "output_dir": "outputs/llama7b_1m"},
}


@dataclass(kw_only=True)
class Arguments(RecipeArguments):
    seq_len: str = field(default="1M", metadata=RecipeArguments.__dataclass_fields__["seq_len"].metadata)
    documents: str = field(default="cross", metadata=RecipeArguments.__dataclass_fields__["documents"].metadata)
    preset: str = field(default="gpu", metadata={"help": "Which set of defaults.", "choices": list(PRESETS)})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text, where there is one."})
    rope: str = field(
        default="none",
        metadata={"help": "Scale rotary positions up to seq_len.", "choices": ["none", "yarn", "linear"]},
    )
    compare: bool = field(
        default=False, metadata={"help": "First measure one step with activation checkpointing in memo_hf's place."}
    )
    prompt: str | None = field(
        default=None,
        metadata={"help": "Continued by the saved model at the end, on one process: not with DeepSpeed."},
    )


def parser_for(argv: list[str]) -> RecipeParser:
    """The parser of all three groups of settings, with the preset's values as defaults."""
    parser = RecipeParser(Arguments, argv, __doc__)
    parser.set_defaults(**PRESETS[parser.parse_args(argv).preset])
    return parser


def load_model(recipe: Arguments, seq_len: int, seed: int):
    config = AutoConfig.from_pretrained(recipe.model)
    if recipe.rope != "none":
        stretch_positions(config, seq_len, recipe.rope)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, config=config, dtype=recipe.dtype)
    check_positions(model, seq_len)
    if recipe.full:
        return model
    set_seed(seed)  # the adapter begins at random, and Trainer sets the seed later
    return get_peft_model(model, LoraConfig(r=recipe.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))


class PeakMemory(TrainerCallback):
    """Peak device bytes of a step's forward and backward passes, above what was there when the step began."""

    def __init__(self):
        self.peak_bytes = 0
        self._running = contextlib.ExitStack()

    def on_step_begin(self, args, state, control, **kwargs):
        self.meter = self._running.enter_context(AllocatorMeter(args.device))

    def close(self) -> None:
        """Stop metering, also where a step has failed."""
        self._running.close()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.close()
        self.peak_bytes = max(self.peak_bytes, self.meter.peak_bytes - self.meter.start_bytes)


def checkpointed_step(model, row: dict, training: TrainingArguments) -> str:
    """Peak device memory of one step with activation checkpointing, in words. Leaves the model as it was."""
    batch = {name: torch.from_numpy(values)[None].to(training.device) for name, values in row.items()}
    model.to(training.device).train()
    # The name of the switch changed during transformers 5.
    switch = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{switch}_checkpointing_enable")()
    started = time.perf_counter()
    try:
        with (
            AllocatorMeter(training.device) as meter,
            torch.autocast(training.device.type, torch.bfloat16, enabled=bool(training.bf16)),
        ):
            model(**batch, use_cache=False).loss.backward()
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        model.zero_grad()
        getattr(model, f"{switch}_checkpointing_disable")()
    print(f"One step with activation checkpointing took {time.perf_counter() - started:.0f} s.")
    return format_bytes(meter.peak_bytes - meter.start_bytes)


def generate_from(training: TrainingArguments, recipe: Arguments, tokenizer) -> str:
    """What the saved model, loaded anew, makes of the prompt."""
    if recipe.full:
        model = AutoModelForCausalLM.from_pretrained(training.output_dir, dtype=recipe.dtype)
    else:
        base = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=recipe.dtype)
        model = PeftModel.from_pretrained(base, training.output_dir)
    tokens = model.generate(**tokenizer(recipe.prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False)
    return " ".join(tokenizer.decode(tokens[0], skip_special_tokens=True).split())


@without_traceback()
def main(argv: list[str]) -> int:
    parser = parser_for(argv)
    options = parser.parse_args(argv)
    if options.model is None:
        parser.error("--model: give a folder or a hub name")
    parser.check_model(options.model)
    if options.dry_run:
        return dry_run(options)
    config_file(options.model)
    recipe, training, memo = parser.parse_args_into_dataclasses(argv)
    checkpoint = checkpoint_to_resume(training)
    seq_len = parse_count(recipe.seq_len, "--seq_len")
    say_how_often(recipe.dataset, seq_len, training)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    data = long_sequences(
        open_documents(recipe.dataset, shuffle_seed=training.seed),
        tokenizer,
        seq_len,
        column=recipe.text_column,
        keep_documents=recipe.documents == "keep",
        num_ranks=training.world_size,
    )
    model = load_model(recipe, seq_len, training.seed)
    checkpointed = checkpointed_step(model, next(iter(data)), training) if recipe.compare else None

    peak = PeakMemory()
    with contextlib.closing(peak), no_empty_folders(training.output_dir):
        trainer = MemoTrainer(
            model=model, args=training, train_dataset=data, memo=memo if recipe.memo else None, callbacks=[peak]
        )
        train(trainer, checkpoint)
    trainer.save_model()

    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(training.output_dir)
        print(f"\n{trainer.memo_report or 'Trained without memo_hf.'}")
        beside = f"; with activation checkpointing: {checkpointed}" if checkpointed else ""
        print(f"Peak device memory of a step, above weights and optimizer: {format_bytes(peak.peak_bytes)}{beside}")
        print(f"Saved to {training.output_dir}.")
        if recipe.prompt:
            print(
                f"Loaded from there, the model goes on from the prompt:\n  {generate_from(training, recipe, tokenizer)}"
            )
    leave_the_ranks(trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
