"""From a command line to a finished training, as the recipes share it: arguments, their mistakes, resuming.

Used by the recipes that train. It knows neither the model nor the text; `dry_run.py` forecasts a launch instead.
"""

import argparse
import dataclasses
import re
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.parallelism_config import ParallelismConfig
from long_text import about_num_tokens, num_documents, too_short
from torch.utils.data import DataLoader, IterableDataset
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import cached_file

from memo_hf import MemoConfig
from memo_hf.arguments import Parser
from memo_hf.errors import ConfigError, MemoError
from memo_hf.forecasting.models import adapter_base

DEFAULTS = {
    "per_device_train_batch_size": 1,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 100,
    "logging_steps": 1,
    "save_steps": 20,
    "save_total_limit": 2,
    "report_to": "none",
    "ddp_find_unused_parameters": False,
    # Each process reads its own sequences; else the first would read and hold those of all, and send them to all.
    "accelerator_config": {"dispatch_batches": False},
}


# Of TrainingArguments' fields, which are arguments all of them, those that --help lists.
_LISTED = {
    *("output_dir", "resume_from_checkpoint", "max_steps", "learning_rate", "lr_scheduler_type"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "seed", "use_cpu"),
    *("logging_steps", "save_strategy", "save_steps", "save_total_limit", "report_to"),
}
_NOT_LISTED = """Every other field of transformers.TrainingArguments is an argument too, by its name:
https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"""


@dataclass(kw_only=True)
class RecipeArguments:
    """What both recipes that train ask for; each adds its own and may set other defaults."""

    model: str | None = field(default=None, metadata={"help": "Folder or hub name of any causal language model."})
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "A .txt, .md, .jsonl or .parquet file, a folder of them, or a hub name; 'manual' and 'stdlib' are "
            "Python's own manual and sources, for a trial."
        },
    )
    seq_len: str = field(default="32K", metadata={"help": "Tokens in a sequence: 4096, 100,000, 128K, 1M."})
    documents: str = field(
        default="keep",
        metadata={
            "help": "'keep': a sequence packs documents, and attention stays inside of each. 'cross': it crosses them.",
            "choices": ["keep", "cross"],
        },
    )
    full: bool = field(default=False, metadata={"help": "Train all weights instead of a LoRA adapter."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapter, on every linear layer of the decoder."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the weights.", "choices": ["bfloat16", "float32"]})
    memo: bool = field(default=True, metadata={"help": "Train with memo_hf; 'false': with transformers alone."})
    dry_run: bool = field(
        default=False,
        metadata={"help": "Forecast this launch instead of running it; exits with 1 where it does not fit."},
    )
    device: str | None = field(
        default=None,
        metadata={
            "help": "What --dry-run forecasts, as for memo-hf plan; on a CPU that CPU. Not set: the GPU of this "
            "machine, or an H100 where there is none."
        },
    )


class RecipeParser(Parser, HfArgumentParser):
    """Parser of a recipe's own settings, a dataclass, and of those of TrainingArguments and MemoConfig."""

    def __init__(self, recipe: type, argv: list[str], description: str, **defaults):
        groups = [recipe, TrainingArguments, MemoConfig]
        super().__init__(
            groups,
            description=description,
            epilog=_NOT_LISTED,
            usage="%(prog)s [--NAME VALUE ...]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for action in self._actions:
            if action.option_strings[0].startswith("--"):
                del action.option_strings[1:]  # the same name with - for _, which works and need not be shown
            if action.dest not in _LISTED and action.dest in TrainingArguments.__dataclass_fields__:
                action.help = argparse.SUPPRESS
            elif action.choices and len(action.choices) > 10:
                action.metavar = "NAME"
        resume = self._option_string_actions["--resume_from_checkpoint"]
        resume.help = "A folder checkpoint-N to go on from, or 'last': the newest in --output_dir."
        self.set_defaults(dataloader_pin_memory=torch.cuda.is_available(), **DEFAULTS | defaults)
        options = self.parse_known_args(argv)[0]
        if options.full and options.lora_rank != self.get_default("lora_rank"):
            self.error("--lora_rank is of an adapter, and --full trains none: leave out one of them")
        if options.device != self.get_default("device") and not options.dry_run:
            self.error("--device is what --dry-run forecasts; training takes the GPUs that it finds, or --use_cpu true")
        if options.full:
            self.set_defaults(learning_rate=1e-5)  # all weights, instead of an adapter that begins at nothing

    def check_model(self, name: str) -> None:
        """Exit where `name` can only be a folder, and there is none: the hub would answer with pages. Exit for an
        adapter too: transformers would load its base, and a new adapter would begin at nothing. Exit for a folder
        without a model, of which transformers would first read the tokenizer."""
        like_a_path = name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1
        in_a_folder = "/" in name and Path(name).parent.exists()
        if (like_a_path or in_a_folder) and not Path(name).exists():
            self.error(f"--model: there is no folder {name} (recipes/get_checkpoint.py makes one for a trial)")
        if base := adapter_base(name):
            is_checkpoint = (Path(name) / "trainer_state.json").exists()
            checkpoint = name if is_checkpoint else get_last_checkpoint(name) or f"{name}/checkpoint-N"
            self.error(
                f"--model: {name} holds an adapter; give its base ({base}) as --model and --resume_from_checkpoint "
                f"{checkpoint}"
            )
        folder = Path(name)
        if folder.is_dir() and not (folder / "config.json").is_file():
            found = sorted(folder.glob("*/config.json")) or sorted(folder.glob("*/*/config.json"))
            meant = f"; did you mean {found[0].parent}?" if found else ""
            self.error(f"--model: {name} holds no config.json{meant}")

    def parse_args_into_dataclasses(self, *args, **kwargs):
        """As HfArgumentParser's; exits where a group of settings refuses a value, or two of them together."""
        try:
            return super().parse_args_into_dataclasses(*args, **kwargs)
        except (ValueError, OSError) as error:  # the latter of a file that an argument names
            self.error(_as_typed(" ".join(str(error).split())))


def _as_typed(words: str) -> str:
    """What is said of a setting, said of its argument: `--host_memory 8GiB` for `MemoConfig(host_memory='8GiB')`."""
    names = "|".join(spec.name for spec in dataclasses.fields(MemoConfig))
    words = re.sub(rf"MemoConfig\(({names})=\.\.\.\)", r"--\1", words)
    words = re.sub(rf"MemoConfig\(({names})='?([^()']*)'?\)", r"--\1 \2", words)
    return re.sub(rf"^(?=({names})\b)", "--", words)


@contextmanager
def without_traceback():
    """Around a recipe's `main`: what ends it on purpose says what to do, so its words are all that is printed.

    The exit code is 2 for a wrong argument, whose name the message begins with, or a wrong setting. It is 1 where the
    run does not fit, or where the text is at fault.
    """
    try:
        yield
    except (MemoError, SystemExit) as error:
        words = error.code if isinstance(error, SystemExit) else _as_typed(str(error))
        if not (isinstance(error, ConfigError) or str(words).startswith("--")):
            raise SystemExit(words) from error
        print(f"{Path(sys.argv[0]).name}: {words}", file=sys.stderr)
        raise SystemExit(2) from error


def config_file(model: str) -> str:
    """The path of a model's `config.json`, in its folder or fetched from the hub. Exits where there is none."""
    try:
        return cached_file(model, "config.json")
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"--model: there is no folder {model} with a config.json; from the hub: {reason}") from error


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """The folder to go on from, "last" being the newest of `output_dir`; None to begin. For before a model is loaded.

    Exits where there is no such checkpoint, and where it has all steps already: Trainer would add one.
    """
    named, newest = training.resume_from_checkpoint, None
    if not named:
        return None
    where = training.output_dir if named == "last" else named
    if Path(where).is_dir():
        newest = get_last_checkpoint(where)
    if named == "last" and newest is None:
        raise SystemExit(f"--resume_from_checkpoint last: there is no checkpoint in {where} (--output_dir)")
    folder = Path(newest if named == "last" else named)
    if not folder.is_dir():
        raise SystemExit(f"--resume_from_checkpoint {folder}: there is no such folder")
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():
        asked = f"; did you mean {newest}?" if newest else ""
        raise SystemExit(f"--resume_from_checkpoint {folder}: no checkpoint, as it has no {state.name}{asked}")
    trained = TrainerState.load_from_json(state).global_step
    if trained >= training.max_steps:
        if training.process_index == 0:
            print(f"{folder} has trained {trained:,} steps of {training.max_steps:,} (--max_steps): nothing to do")
        raise SystemExit(0)
    return str(folder)


@contextmanager
def no_empty_folders(output_dir: str):
    """Around the making of a Trainer, which makes its folder, and the training: one that fails leaves none empty."""
    folder = Path(output_dir)
    made = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty
            for part in made:
                part.rmdir()
        raise


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Train from the beginning, or from a checkpoint.

    Where ranks share sequences DeepSpeed deals out the batches by an object of its own, in which accelerate cannot skip
    what was trained before the checkpoint. In a loader of what is dealt out it can.
    """
    accelerator = trainer.accelerator
    if checkpoint and trainer.get_sp_size() > 1:
        deal_out = accelerator.deepspeed_ulysses_dl_adapter
        accelerator.deepspeed_ulysses_dl_adapter = lambda *loader_and_model: DataLoader(
            _Stream(deal_out(*loader_and_model)), batch_size=None
        )
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except BaseException:
        for callback in trainer.callback_handler.callbacks:
            if bar := getattr(callback, "training_bar", None):
                bar.close()  # else the error would be on its line, and it would be drawn once more below
        raise


def leave_the_ranks(trainer: Trainer) -> None:
    """End what the ranks have together, in order and not as their processes happen to end.

    DDP goes first: where it is the last to hold gloo's group, it waits for gloo's threads and lets no Python run, which
    is what one of them may wait for.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


class _Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def say_how_often(dataset: str, seq_len: int, training: TrainingArguments) -> None:
    """Print, once for all ranks, how much text there is and how often it is read, where its size is at hand.

    Exits where that is clearly less than one sequence. Near to one it says so: tokens are guessed from bytes.
    """
    num_tokens, documents = about_num_tokens(dataset), num_documents(dataset)
    if not num_tokens:
        return
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    step_tokens = seq_len * sequences // ParallelismConfig().sp_size
    size, times = (float(f"{n:.2g}") for n in (num_tokens, training.max_steps * step_tokens / num_tokens))
    if num_tokens < seq_len / 2:
        advice = too_short(num_tokens * 3 // 4)  # a guess; one that is too high by a third still fits
        raise SystemExit(f"the text has about {size:,.0f} tokens, and one sequence takes {seq_len:,}: {advice}")
    counted = "" if documents is None else f"{documents:,} document{'s' if documents > 1 else ''} with "
    steps, read = ("1 step", "reads") if training.max_steps == 1 else (f"{training.max_steps:,} steps", "read")
    read = f"{steps} of {step_tokens:,} {read} it about {times:,g} times."
    if num_tokens < 1.5 * seq_len:
        read = f"that may or may not make one sequence of {seq_len:,}."
    if training.process_index == 0:
        print(f"The text has {counted}about {size:,.0f} tokens: {read}")
