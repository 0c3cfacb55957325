"""Fine-tune a causal language model at long context with memo_hf: 7B at 1M tokens on GPUs, 135M at 4,096 on a CPU.

    accelerate launch recipes/llama7b_1m.py --preset cpu
    accelerate launch recipes/llama7b_1m.py --preset gpu --model path/to/llama-7b --dataset my_books/ --seq_len 1M

A preset is a set of defaults. Every setting of this script, of `transformers.TrainingArguments` and of
`memo_hf.MemoConfig` is also an argument: see `--help`. Documents are joined, with an end-of-text token after each, and
cut into sequences of exactly `--seq_len` tokens; attention crosses the seams.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerCallback, TrainingArguments

from memo_hf import MemoConfig, MemoTrainer
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.units import format_bytes, parse_count

PRESETS = {
    # A demonstration: a checkpoint made by recipes/get_checkpoint.py, and text that comes with Python.
    "cpu": {
        "model": "outputs/smollm2-135m",
        "seq_len": "4096",
        "compare": True,
        "max_steps": 3,
        "use_cpu": True,
        "output_dir": "outputs/llama7b_1m-cpu",
    },
    "gpu": {"seq_len": "1M", "max_steps": 100, "output_dir": "outputs/llama7b_1m"},
}
COMMON = {
    "per_device_train_batch_size": 1,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
FILE_LOADERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass
class RecipeArguments:
    preset: str = field(default="cpu", metadata={"help": "Which set of defaults.", "choices": list(PRESETS)})
    model: str | None = field(default=None, metadata={"help": "Folder or hub name of any causal language model."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the weights.", "choices": ["bfloat16", "float32"]})
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "A .txt, .jsonl or .parquet file, a folder of them, or a hub name. Not set: Python's manual."
        },
    )
    text_column: str = field(default="text", metadata={"help": "The column of the dataset that holds the text."})
    seq_len: str = field(default="1M", metadata={"help": "Tokens in a sequence: 4096, 128K, 1M."})
    full: bool = field(default=False, metadata={"help": "Train all weights instead of a LoRA adapter."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapter, on every linear layer of the decoder."})
    compare: bool = field(
        default=False, metadata={"help": "First measure one step with activation checkpointing in memo_hf's place."}
    )
    prompt: str = field(default="A list comprehension", metadata={"help": "Continued by the saved model at the end."})


def parse_arguments(argv: list[str]) -> tuple[RecipeArguments, TrainingArguments, MemoConfig]:
    """The three groups of settings, with the preset's values as defaults."""
    parser = HfArgumentParser([RecipeArguments, TrainingArguments, MemoConfig], description=__doc__)
    preset = parser.parse_known_args(argv)[0].preset
    parser.set_defaults(**COMMON, **PRESETS[preset])
    recipe, training, memo = parser.parse_args_into_dataclasses(argv)
    if recipe.model is None:
        parser.error("--model: give a folder or a hub name")
    return recipe, training, memo


def load_texts(dataset: str | None, column: str) -> Dataset:
    """Documents, one a row, in `column`."""
    if dataset is None:
        from pydoc_data.topics import topics

        return Dataset.from_dict({column: list(topics.values())})
    path = Path(dataset)
    if not path.exists():
        return load_dataset(dataset, split="train")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    by_loader = {}
    for file in files:
        if file.suffix in FILE_LOADERS:
            by_loader.setdefault(FILE_LOADERS[file.suffix], []).append(str(file))
    if len(by_loader) != 1:
        raise SystemExit(
            f"--dataset {dataset}: expected files of one kind among {list(FILE_LOADERS)}, found {by_loader}"
        )
    ((loader, data_files),) = by_loader.items()
    options = {"sample_by": "document"} if loader == "text" else {}
    texts = load_dataset(loader, data_files=data_files, split="train", **options)
    return texts.rename_column("text", column) if loader == "text" and column != "text" else texts


def pack(texts: Dataset, column: str, tokenizer, seq_len: int) -> Dataset:
    """Sequences of exactly `seq_len` tokens, as `input_ids` and `labels`; what is left over at the end is dropped."""

    def tokenize(batch):
        ids = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [document + [tokenizer.eos_token_id] for document in ids]}

    def join(batch):
        tokens = [token for document in batch["input_ids"] for token in document]
        rows = [tokens[i : i + seq_len] for i in range(0, len(tokens) - seq_len + 1, seq_len)]
        return {"input_ids": rows, "labels": rows}

    documents = texts.map(tokenize, batched=True, remove_columns=texts.column_names, desc="Tokenizing")
    num_tokens = sum(len(document) for document in documents["input_ids"])
    if num_tokens < seq_len:
        raise SystemExit(f"the text has {num_tokens:,} tokens, and one sequence takes {seq_len:,}: lower --seq_len")
    # One batch, so that tokens are dropped once only.
    packed = documents.map(join, batched=True, batch_size=None, desc=f"Packing to {seq_len:,} tokens")
    return packed.with_format("torch")


def load_model(recipe: RecipeArguments, seq_len: int):
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=recipe.dtype)
    longest = getattr(model.config, "max_position_embeddings", seq_len)
    if seq_len > longest:
        print(f"Note: the model was made for {longest:,} positions; those up to {seq_len:,} are extrapolated.")
    if recipe.full:
        return model
    return get_peft_model(model, LoraConfig(r=recipe.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))


class PeakMemory(TrainerCallback):
    """Peak device bytes of a step's forward and backward passes, above what was there when the step began."""

    def __init__(self):
        self.peak_bytes = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.meter = AllocatorMeter(args.device)
        self.meter.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.meter.__exit__(None, None, None)
        self.peak_bytes = max(self.peak_bytes, self.meter.peak_bytes - self.meter.start_bytes)


def checkpointed_step(model, row: dict, training: TrainingArguments) -> str:
    """Peak device memory of one step with activation checkpointing, in words. Leaves the model as it was."""
    batch = {name: values[None].to(training.device) for name, values in row.items()}
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


def generate_from(output_dir: str, recipe: RecipeArguments, tokenizer) -> str:
    """What the saved model, loaded anew, makes of the prompt."""
    if recipe.full:
        model = AutoModelForCausalLM.from_pretrained(output_dir, dtype=recipe.dtype)
    else:
        base = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=recipe.dtype)
        model = PeftModel.from_pretrained(base, output_dir)
    tokens = model.generate(**tokenizer(recipe.prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False)
    return " ".join(tokenizer.decode(tokens[0], skip_special_tokens=True).split())


def main(argv: list[str]) -> None:
    recipe, training, memo = parse_arguments(argv)
    seq_len = parse_count(recipe.seq_len, "--seq_len")
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    with training.main_process_first(desc="preparing the text"):
        data = pack(load_texts(recipe.dataset, recipe.text_column), recipe.text_column, tokenizer, seq_len)
    model = load_model(recipe, seq_len)
    checkpointed = checkpointed_step(model, data[0], training) if recipe.compare else None

    peak = PeakMemory()
    trainer = MemoTrainer(model=model, args=training, train_dataset=data, memo=memo, callbacks=[peak])
    trainer.train()
    trainer.save_model()

    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(training.output_dir)
        print(f"\n{trainer.memo_report}")
        beside = f"; with activation checkpointing: {checkpointed}" if checkpointed else ""
        print(f"Peak device memory of a step, above weights and optimizer: {format_bytes(peak.peak_bytes)}{beside}")
        print(f"Saved to {training.output_dir}. Loaded from there, the model goes on from the prompt:")
        print(f"  {generate_from(training.output_dir, recipe, tokenizer)}")


if __name__ == "__main__":
    main(sys.argv[1:])
