"""`--dry-run` of the recipes: the forecast of a launch from its arguments and the environment of `accelerate launch`.

It loads no weights, starts no process group and runs nothing on a GPU, whose name alone it asks for: it writes the
`memo-hf plan` command that describes the launch, and runs it.
"""

import argparse
import os
import re
import shlex
from pathlib import Path

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from launching import config_file
from long_text import SUFFIXES, open_documents
from torch.distributed.fsdp import CPUOffloadPolicy

from memo_hf import cli
from memo_hf.errors import ConfigError
from memo_hf.forecasting.hardware import find_device
from memo_hf.forecasting.models import read_config

ASSUMED = "h100"
OPTIMIZERS = {
    "sgd": "sgd",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
}


def plan_command(options: argparse.Namespace) -> list[str]:
    """Arguments of `memo-hf plan` for a launch with `options`, which hold recipe, TrainingArguments and MemoConfig."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    use = {name: os.environ.get(f"ACCELERATE_USE_{name}", "false") == "true" for name in ("DEEPSPEED", "FSDP")}
    shards, offloaded, mixed = 1, [], options.bf16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if use["DEEPSPEED"]:
        plugin = DeepSpeedPlugin()
        # ZeRO-1 and 2 keep whole weights on each rank, which is what is forecast for them.
        shards = world if plugin.zero_stage == 3 else 1
        devices = {"optimizer": plugin.offload_optimizer_device, "weights": plugin.offload_param_device}
        offloaded = [what for what, device in devices.items() if device == "cpu"]
    elif use["FSDP"]:
        shards = world
        offloads = isinstance(FullyShardedDataParallelPlugin().cpu_offload, CPUOffloadPolicy)
        offloaded = ["optimizer", "weights"] if offloads else []
    command = ["plan", "--model", _model(options.model), "--seq-len", options.seq_len, "--device"]
    command.append("cpu" if _is_on_cpu(options) else options.device or _gpu_here() or ASSUMED)
    command += ["--batch", options.per_device_train_batch_size, "--train", "full" if options.full else "lora"]
    if not options.full:
        command += ["--lora-rank", options.lora_rank]
    command += ["--dtype", "bfloat16" if mixed else options.dtype]
    if not (mixed or options.dtype == "float32"):
        command.append("--no-master-weights")
    command += ["--optimizer", OPTIMIZERS.get(str(getattr(options.optim, "value", options.optim)), "adamw")]
    command += [part for what in offloaded for part in (f"--{what}-device", "host")]
    command += ["--gpus", world, "--gpus-per-node", os.environ.get("LOCAL_WORLD_SIZE", world), "--shards", shards]
    command += ["--sequence-parallel", ParallelismConfig().sp_size]
    for name in ("host_memory", "device_memory", "chunk_size", "unswapped_layers", "swap_fraction", "qkv"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", getattr(options, name)]
    if options.gradient_accumulation_steps > 1:
        command.append("--gradient-accumulation")
    return [str(part) for part in command]


def _is_on_cpu(options: argparse.Namespace) -> bool:
    return options.use_cpu or os.environ.get("ACCELERATE_USE_CPU") == "true"


def _gpu_here() -> str | None:
    """The GPU of this machine by the name that the forecast has for it; None where it has none, or there is none."""
    if not torch.cuda.is_available():
        return None
    try:
        return find_device(torch.cuda.get_device_name()).name
    except ConfigError:
        return None


def _check_dataset(source: str) -> None:
    """Exit for files that training would refuse, and for a path that leads nowhere. The hub is not asked."""
    path = Path(source)
    is_below_a_folder = "/" in source and path.parent.exists()
    may_be_a_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) and path.suffix not in SUFFIXES
    if path.exists():
        open_documents(source)
    elif is_below_a_folder or not may_be_a_name:
        raise SystemExit(f"--dataset: there is no file or folder {source}")


def _model(name: str) -> str:
    """A folder with a `config.json`, or a name that the forecast knows; else the `config.json` of the hub."""
    try:
        read_config(name)
        return name
    except ConfigError:
        return name if Path(name).exists() else config_file(name)


def dry_run(options: argparse.Namespace) -> int:
    """Print the `memo-hf plan` command of this launch and its answer, once for all ranks.

    Returns:
        the exit code, of the rank that prints: 0 where the run fits, 1 where it does not, 2 for a mistake.

    Raises:
        SystemExit: the launch is one without memo_hf, or there is no such text.
    """
    if not options.memo:
        raise SystemExit("--dry-run forecasts a run with memo_hf: leave out --memo false, or --dry-run")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0
    _check_dataset(options.dataset)
    if not (options.device or _is_on_cpu(options) or _gpu_here()):
        print(
            f"No GPU that the forecast knows is here: --device {ASSUMED} is assumed (cpu: this machine).",
            flush=True,
        )
    command = plan_command(options)
    print(f"memo-hf {shlex.join(command)}\n", flush=True)
    return cli.main(command)
