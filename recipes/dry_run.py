"""`--dry-run` of the recipes: the forecast of a launch from its arguments and the environment of `accelerate launch`.

It loads no weights, starts no process group and touches no GPU: it writes the `memo-hf plan` command that describes the
launch, and runs it.
"""

import argparse
import os
import shlex
from pathlib import Path

from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from launching import config_file
from torch.distributed.fsdp import CPUOffloadPolicy

from memo_hf import cli
from memo_hf.errors import ConfigError
from memo_hf.forecasting.models import read_config

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
    command.append("cpu" if options.use_cpu or os.environ.get("ACCELERATE_USE_CPU") == "true" else options.device)
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
        SystemExit: the launch is one without memo_hf.
    """
    if not options.memo:
        raise SystemExit("--dry-run forecasts a run with memo_hf: leave out --memo false, or --dry-run")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0
    command = plan_command(options)
    print(f"memo-hf {shlex.join(command)}\n", flush=True)
    return cli.main(command)
