"""Fine-tune a checkpoint of yours on text of yours, at long context.

    python recipes/finetune_checkpoint.py --model path/to/checkpoint --dataset my_documents/ --seq_len 32K
    accelerate launch --config_file recipes/configs/fsdp2_8gpu.yaml recipes/finetune_checkpoint.py ...

`--dataset` takes text files, or chats: JSON lines of {"messages": [{"role": "user", "content": "..."}, ...]}. Every
field of `transformers.TrainingArguments` and `memo_hf.MemoConfig` is an argument too, such as `--max_steps 1000`,
`--learning_rate 1e-5` or `--resume_from_checkpoint last`. With `--dry-run` the launch is forecast instead of run.
"""

import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

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
from long_text import check_positions, long_sequences, open_documents, with_assistant_marked
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from memo_hf import MemoTrainer
from memo_hf.units import parse_count


@dataclass(kw_only=True)
class Arguments(RecipeArguments):
    model: str = field(metadata=RecipeArguments.__dataclass_fields__["model"].metadata)
    dataset: str = field(metadata=RecipeArguments.__dataclass_fields__["dataset"].metadata)
    learn: str | None = field(
        default=None,
        metadata={
            "help": "'assistant': of chats the assistant's words alone, as TRL's version of the chat template marks "
            "them. Not set: those where the chat template itself marks them, else all.",
            "choices": ["assistant"],
        },
    )


def parser_for(argv: list[str]) -> RecipeParser:
    """The parser of all settings, with this recipe's defaults."""
    return RecipeParser(Arguments, argv, __doc__, output_dir="outputs/finetuned")


@without_traceback()
def main(argv: list[str]) -> int:
    parser = parser_for(argv)
    options = parser.parse_args(argv)
    parser.check_model(options.model)
    if options.dry_run:
        return dry_run(options)
    config_file(options.model)
    ours, training, memo = parser.parse_args_into_dataclasses(argv)
    checkpoint = checkpoint_to_resume(training)

    seq_len = parse_count(ours.seq_len, "--seq_len")
    say_how_often(ours.dataset, seq_len, training)
    tokenizer = AutoTokenizer.from_pretrained(ours.model)
    data = long_sequences(
        open_documents(ours.dataset, shuffle_seed=training.seed),
        with_assistant_marked(tokenizer) if ours.learn == "assistant" else tokenizer,
        seq_len,
        keep_documents=ours.documents == "keep",
        num_ranks=training.world_size,
    )

    model = AutoModelForCausalLM.from_pretrained(ours.model, dtype=ours.dtype)
    check_positions(model, seq_len)
    if not ours.full:
        set_seed(training.seed)  # the adapter begins at random, and Trainer sets the seed later
        lora = LoraConfig(r=ours.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)

    with no_empty_folders(training.output_dir):
        trainer = MemoTrainer(model=model, args=training, train_dataset=data, memo=memo if ours.memo else None)
        train(trainer, checkpoint)
    trainer.save_model()

    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(training.output_dir)
        print(trainer.memo_report or "Trained without memo_hf.")
        print(f"Saved to {training.output_dir}")
        if ours.memo:
            report = Path(training.output_dir) / f"memo_report.{'html' if find_spec('matplotlib') else 'txt'}"
            trainer.save_memo_report(report)
            print(f"The report is in {report}")
    leave_the_ranks(trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
