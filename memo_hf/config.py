"""`MemoConfig`: every setting of memo_hf, checked when it is made. Help texts live here and feed CLI and docs."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from memo_hf.errors import ConfigError, did_you_mean
from memo_hf.paths import require_suffix
from memo_hf.units import parse_memory

MIN_TOKENS = 2048  # of a batch that gains, where `MemoConfig.min_tokens` is not set


def _option(default, help_text, **metadata):
    return field(default=default, metadata={"help": help_text, **metadata})


def _refuse_unknown_names(config):
    """Class decorator: a dataclass answers a name that is no field with `TypeError`; `config` raises `ConfigError`."""
    known = [spec.name for spec in dataclasses.fields(config)]
    make = config.__init__

    @functools.wraps(make)
    def __init__(self, *args, **settings):
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown MemoConfig keys {unknown}{did_you_mean(unknown[0], known)}; the known keys are {known}"
            )
        make(self, *args, **settings)

    config.__init__ = __init__
    return config


@_refuse_unknown_names
@dataclass(frozen=True, kw_only=True)
class MemoConfig:
    """Settings of one model. Nothing needs to be set; each field's help is its documentation.

    Parses with `transformers.HfArgumentParser` beside `TrainingArguments`.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """

    swap_fraction: float | None = _option(
        None,
        "Share of the tokens, 0 to 1, whose activations are swapped to host memory rather than recomputed (the paper's "
        "alpha, section 4.1). 0 takes the least memory on the device and the most recomputing; more saves time and "
        "takes host memory, and more of the device's. Not set: chosen for you.",
    )
    chunk_size: int | None = _option(
        None, "Tokens, over the whole batch, that go through project or finish at once. Not set: chosen for you."
    )
    qkv: str | None = _option(
        None,
        "Where queries, keys and values wait for the backward pass: 'swap' sends them to host memory, 'rebuild' sends "
        "those of the swapped tokens and computes the others again from the layer input. Not set: chosen for you, or "
        "'swap' when swap_fraction is set by hand.",
        choices=["swap", "rebuild"],
    )
    host_memory: str | None = _option(
        None,
        "Host memory that swapped activations may take on this node, for example '64GiB', shared by its ranks. "
        "Not set: what the cgroup and the machine have free, less a tenth.",
    )
    host_memory_for_others: str | None = _option(
        None,
        "Host memory of this node that others will still take, for example an offloaded optimizer: '60GiB'. It is "
        "taken off what activations may use. Not set: what the DeepSpeed config offloads to the CPU, else nothing.",
    )
    device_memory: str | None = _option(
        None,
        "Device memory that training may take in all, for example '70GiB'; the swap fraction is chosen to fit. Not "
        "set: what a GPU has free, less a twentieth; on a CPU, whose memory is the host's, the fraction stays 0.",
    )
    plan_file: str | None = _option(
        None,
        "JSON file that keeps the measured step and the plans made from it, for the next run. One made for another "
        "model, setting, version or machine is refused with a warning that names what differs, and replaced. Not set: "
        "kept for this run only; Trainer keeps it as memo_plan.json in its output_dir.",
    )
    min_tokens: int | None = _option(
        None,
        "Below this many tokens in a batch the model runs untouched, since nothing would be gained. Not set: 2048, "
        "or 0 when swap_fraction or chunk_size is set by hand.",
    )
    unswapped_layers: int = _option(
        2, "How many of the last layers keep their activations on the device, since backward starts with them."
    )
    mode: str = _option(
        "auto",
        "'auto': token mode for each layer that passes the check, layer mode for the rest. 'layer': for all.",
        choices=["auto", "layer"],
    )
    allocator: str | None = _option(
        None,
        "Who serves the device's memory: 'stock' is torch's own allocator. 'planned' records a training step, plans an "
        "address for each of its requests beside training (the paper's section 4.2) and serves them from then on. Not "
        "set: 'planned' where it pays, which is on a CPU after a minute, where memo_hf's C++ part is built, and on "
        "CUDA where memo_hf.allocator.cuda.install() was called.",
        choices=["stock", "planned"],
    )
    plan_folder: str | None = _option(
        None, "Where plans are saved and found again by the next run. Not set: .cache/memo_hf in the home folder."
    )
    chunked_loss: bool = _option(True, "Compute the loss in chunks, so that the logits never exist in full.")

    def __post_init__(self):
        fraction = self.swap_fraction
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 <= fraction <= 1):
            raise ConfigError(f"swap_fraction is {fraction!r}; it must be a number from 0 to 1, or None")
        for name in ("chunk_size", "min_tokens", "unswapped_layers"):
            value, least = getattr(self, name), 1 if name == "chunk_size" else 0
            if value is None and name != "unswapped_layers":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        for spec in dataclasses.fields(self):
            choices = spec.metadata.get("choices")
            if choices and getattr(self, spec.name) not in (*choices, spec.default):
                raise ConfigError(f"{spec.name} is {getattr(self, spec.name)!r}; it must be one of {choices}")
        for name in ("host_memory", "device_memory"):
            if getattr(self, name) is not None and parse_memory(getattr(self, name), name) == 0:
                raise ConfigError(f"{name} is 0; leave it unset for what is free, or give the bytes to use")
        self.bytes_of("host_memory_for_others")
        if self.plan_file is not None:
            require_suffix(self.plan_file, "plan_file, written as JSON,", (".json",))
        for name in ("device_memory", "plan_file") if fraction is not None else ():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r} and has no effect beside swap_fraction={fraction}, which it "
                    "serves to choose. Leave one of them unset"
                )

    @classmethod
    def from_dict(cls, values: dict) -> MemoConfig:
        """A config from a dictionary (JSON, YAML). Raises `ConfigError` that names unknown keys and lists the known."""
        return cls(**{str(name): value for name, value in values.items()})

    @property
    def host_memory_bytes(self) -> int | None:
        """`host_memory` in bytes, or None where it is to be read from the machine."""
        return self.bytes_of("host_memory")

    def bytes_of(self, name: str) -> int | None:
        """The bytes that the setting `name` is written for, or None where it is not set. Raises `ConfigError`."""
        value = getattr(self, name)
        return None if value is None else parse_memory(value, name)

    @property
    def effective_min_tokens(self) -> int:
        """The number of tokens below which the stock path runs: settings by hand mean that the user has decided."""
        if self.min_tokens is not None:
            return self.min_tokens
        return MIN_TOKENS if self.swap_fraction is None and self.chunk_size is None else 0
