"""`memo_hf.forecast`, and the one place that turns what people write into a `Setup`. Used by the command line too."""

from __future__ import annotations

import inspect
import os

from memo_hf.errors import ConfigError, did_you_mean
from memo_hf.forecasting.activations import ALL_LINEAR, LORA_RANK, Training
from memo_hf.forecasting.find import advise
from memo_hf.forecasting.forecast import Forecast, forecast_setup
from memo_hf.forecasting.hardware import Device, find_device, this_cpu
from memo_hf.forecasting.setup import DTYPES, Setup
from memo_hf.forecasting.shapes import ModelShape
from memo_hf.planner.budgets import host_budget_bytes, read_host_memory
from memo_hf.units import parse_count, parse_flops, parse_memory


def forecast(model, seq_len: int | str, **options) -> Forecast:
    """Forecast a run before it starts: whether it fits, what it takes, and how long a step is.

    Args:
        model: a shipped name ("llama-3.1-8b"), a `config.json` or its folder, or a configuration: transformers' own
            (`model.config`, anything with `to_dict()`) or a dictionary.
        seq_len: tokens, as a number or "1M" (1,048,576).
        **options: see `make_setup`.

    Raises:
        ConfigError: an option is unknown or wrong. A run that does not fit raises nothing: read `fits` and `advice`.
    """
    known = list(inspect.signature(make_setup).parameters)[2:]
    for name in options:
        if name not in known:
            raise ConfigError(f"forecast has no option {name!r}{did_you_mean(name, known)}; its options are {known}")
    return forecast_setup(make_setup(model, seq_len, **options), advise)


def make_setup(
    model,
    seq_len: int | str,
    *,
    batch: int = 1,
    train: str = "full",
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    dtype: str | None = None,
    master_weights: bool = True,
    optimizer: str = "adamw",
    optimizer_device: str = "device",
    weights_device: str = "device",
    gpus: int = 1,
    gpus_per_node: int = 8,
    sequence_parallel: int = 1,
    shards: int | None = None,
    device: str | Device = "h100",
    device_memory: str | int | None = None,
    flops: str | float | None = None,
    link_bandwidth: str | float | None = None,
    host_memory: str | int | None = None,
    chunk_size: int | None = None,
    unswapped_layers: int = 2,
    swap_fraction: float | None = None,
    qkv: str | None = None,
    chunked_loss: bool = True,
    gradient_accumulation: bool = False,
) -> Setup:
    """A `Setup` from what people write.

    Args:
        batch: sequences that one data-parallel group works on at once.
        train: "full", or "lora" with `lora_rank` (default: 16) and `lora_targets` ("all-linear", the default, or names
            with commas).
        dtype: "bfloat16" (the default on GPUs), "float16" or "float32" (the default on a CPU).
        master_weights: fp32 master weights beside 16-bit ones.
        optimizer: "adamw", "adamw-8bit", "sgd-momentum" or "sgd".
        optimizer_device, weights_device: "device" or "host", where the optimizer's states and the weights live.
        gpus, gpus_per_node: of the run, and how many of them share a node's host memory.
        sequence_parallel, shards: how many GPUs share a sequence, and how many share the weights (default: all).
        device: a name of the table, "cpu" for this machine's, or a `Device`; the next three replace its numbers.
        device_memory: bytes, as "48GiB"; without it the swap fraction on "cpu" stays 0, as in a run.
        flops: dense peak per second in the dtype, as "989T" or 989e12.
        link_bandwidth: bytes per second and device, each way, as "25GB".
        host_memory: of one node, all of which activations and offloaded states may take. Default: nine tenths of the
            device's usual host, or of what this machine has free for "cpu".
        chunk_size, unswapped_layers, swap_fraction, qkv, chunked_loss: as in `MemoConfig`.
        gradient_accumulation: whether gradients of earlier passes are held during forward.

    Raises:
        ConfigError: a value is wrong or contradicts another.
    """
    chosen = _device(device, device_memory, flops, link_bandwidth)
    dtype = dtype or ("float32" if chosen.name == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose from {sorted(DTYPES)}")
    if train not in ("full", "lora"):
        raise ConfigError(f"train is {train!r}; it must be 'full' or 'lora'")
    for name, value in {"lora_rank": lora_rank, "lora_targets": lora_targets}.items():
        if value is not None and train == "full":
            raise ConfigError(
                f"{name} is {value!r} and train is 'full', which has no adapter; give --train lora as well"
            )
    targets = ALL_LINEAR if lora_targets in (None, "all-linear") else tuple(map(str.strip, lora_targets.split(",")))
    on_cpu = chosen.name == "cpu"
    training = Training(
        element_bytes=DTYPES[dtype],
        lora_rank=0 if train == "full" else LORA_RANK if lora_rank is None else lora_rank,
        lora_targets=frozenset(targets) if train == "lora" else frozenset(),
        norm_statistic_bytes=DTYPES[dtype] if on_cpu else 4,
    )
    if swap_fraction is not None and not 0 <= swap_fraction <= 1:
        raise ConfigError(f"swap_fraction is {swap_fraction!r}; it must be a number from 0 to 1, or None")
    if qkv not in (None, "swap", "rebuild"):
        raise ConfigError(f"qkv is {qkv!r}; it must be 'swap', 'rebuild' or None")
    host_bytes = None
    if host_memory is not None:
        host_bytes = parse_memory(host_memory, "host_memory")
    elif on_cpu:
        host_bytes = host_budget_bytes()
    return Setup(
        model=_shape(model),
        device=chosen,
        seq_len=parse_count(seq_len, "seq_len"),
        batch=batch,
        training=training,
        master_weights=master_weights,
        optimizer=optimizer,
        optimizer_device=optimizer_device,
        weights_device=weights_device,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        sequence_parallel=sequence_parallel,
        shards=gpus if shards is None else shards,
        chunk_tokens=chunk_size,
        num_kept=unswapped_layers,
        chunked_loss=chunked_loss,
        accumulates=gradient_accumulation,
        host_bytes=host_bytes,
        swap_fraction=swap_fraction,
        qkv=qkv,
        is_one_memory=device_memory is None and isinstance(device, str) and on_cpu,
    )


def _shape(model) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    config = model.to_dict() if hasattr(model, "to_dict") else model
    if isinstance(config, dict):
        return ModelShape.from_config(config.get("model_type", "model"), config)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is a {type(model).__name__}; give a name, a path, or a configuration: model.config")
    return ModelShape.load(model)


def _device(device, device_memory, flops, link_bandwidth) -> Device:
    if isinstance(device, str):
        device = this_cpu(read_host_memory().free_bytes / 2) if device.lower() == "cpu" else find_device(device)
    changes = {}
    if device_memory is not None:
        changes["memory_bytes"] = float(parse_memory(device_memory, "device_memory"))
    if flops is not None:
        changes["flops"] = float(parse_flops(flops, "flops"))
    if link_bandwidth is not None:
        changes["link_bytes_per_second"] = float(parse_memory(link_bandwidth, "link_bandwidth"))
    for name, value in changes.items():
        if value <= 0:
            raise ConfigError(f"{name} is {value}; it must be positive")
    return device.with_rates(**changes)
