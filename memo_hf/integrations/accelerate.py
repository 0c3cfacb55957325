"""`MemoAccelerator`: an `accelerate.Accelerator` that turns memo_hf on for the models it prepares.

Called by users' own training loops. It must not know how memo_hf works: it calls `enable`, and closes what it opened.
`refuse_conflicts` and `enable_under` are shared with the Trainer integration: both rest on an Accelerator.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    extract_model_from_parallel,
    is_compiled_module,
    is_peft_model,
)
from transformers import PreTrainedModel

from memo_hf.api import enable
from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError
from memo_hf.layers.refusals import CONTEXT_PARALLEL, TENSOR_PARALLEL
from memo_hf.session import Session

# What these three prepare is sharded or moved by themselves, so a model is not put on the device before them.
_PLACE_THEMSELVES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def as_config(config: MemoConfig | dict) -> MemoConfig:
    """A `MemoConfig` from one or from a dictionary of its settings. Raises `ConfigError` for anything else."""
    if isinstance(config, dict):
        return MemoConfig.from_dict(config)
    if not isinstance(config, MemoConfig):
        raise ConfigError(f"expected a MemoConfig or a dictionary of its settings, got {type(config).__name__}")
    return config


def refuse_conflicts(accelerator: Accelerator) -> None:
    """Raise `ConfigError` where the accelerator does what memo_hf does too, or what memo_hf cannot run under."""
    state = accelerator.state
    fsdp = getattr(state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.activation_checkpointing:
        raise ConfigError(
            "FSDP's activation checkpointing is on, and would recompute all that memo_hf swaps. Turn it off: "
            "activation_checkpointing=False in fsdp_config (fsdp_activation_checkpointing: false for accelerate launch)"
        )
    dynamo = getattr(state, "dynamo_plugin", None)
    if dynamo is not None and dynamo.backend != DynamoBackend.NO:
        raise ConfigError(
            f"torch.compile is on (backend {dynamo.backend.value.lower()}), and would trace around what memo_hf does "
            "at run time. Turn it off: torch_compile=False for Trainer, dynamo_backend='no' for Accelerator"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.cp_enabled:
        raise ConfigError(
            f"context parallelism is on (cp_size={parallelism.cp_size}), whose ring attention cannot run: "
            f"{CONTEXT_PARALLEL}"
        )
    if parallelism is not None and parallelism.tp_enabled:
        raise ConfigError(f"tensor parallelism is on (tp_size={parallelism.tp_size}): {TENSOR_PARALLEL}")


def enable_under(accelerator: Accelerator, model: torch.nn.Module, config: MemoConfig) -> Session:
    """`memo_hf.enable(model, config)`, with the other processes known where the engine leaves no mark on the model."""
    session = enable(model, config)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        session.train_with(range(accelerator.num_processes))
    return session


@dataclass
class MemoPlugin:
    """What `MemoAccelerator` is to do: `config` is a `MemoConfig`, or a dictionary of its settings."""

    config: MemoConfig = field(default_factory=MemoConfig)

    def __post_init__(self):
        self.config = as_config(self.config)


class MemoAccelerator(Accelerator):
    """`accelerate.Accelerator` with one argument more.

    Args:
        memo_plugin: a `MemoPlugin`, or what it would hold: a `MemoConfig`, or a dictionary of its settings. None: this
            is Accelerator, and nothing else.

    Attributes:
        memo_sessions: the open `Session` of each model, in the order of the models.
        memo_report: the `report()` of each session, one below the other; once they are closed, as it was then. None
            before there are any.

    `prepare` turns memo_hf on for each transformers or PEFT model before it is wrapped; `free_memory` and
    `end_training` turn it off. The first batch prints one line, as under `MemoTrainer`.

    Raises:
        ConfigError: `memo_plugin` is something else, or the accelerator also checkpoints activations, compiles, or runs
            context or tensor parallelism.
        UnsupportedModelError: from `prepare`, for a model that memo_hf cannot run.
    """

    def __init__(self, *args, memo_plugin: MemoPlugin | MemoConfig | dict | None = None, **kwargs):
        if not (memo_plugin is None or isinstance(memo_plugin, MemoPlugin)):
            memo_plugin = MemoPlugin(memo_plugin)
        super().__init__(*args, **kwargs)
        self.memo_plugin = memo_plugin
        self.memo_sessions = []
        self._last_report = None
        if memo_plugin is not None:
            refuse_conflicts(self)

    def prepare(self, *args, device_placement=None):
        if self.memo_plugin is None:
            return super().prepare(*args, device_placement=device_placement)
        opened_before = len(self.memo_sessions)
        try:
            for obj, place in zip(args, device_placement or [None] * len(args), strict=False):
                if isinstance(obj, torch.nn.Module) and not getattr(obj, "_is_accelerate_prepared", False):
                    self._enable(obj, self.device_placement if place is None else place)
            return super().prepare(*args, device_placement=device_placement)
        except BaseException:
            self._close_sessions(opened_before)
            raise

    def _enable(self, module: torch.nn.Module, place: bool) -> None:
        model = extract_model_from_parallel(module)
        # A compiled model goes to `enable` too, which says why it cannot be.
        if not (isinstance(model, PreTrainedModel) or is_peft_model(model) or is_compiled_module(model)):
            warnings.warn(
                f"memo_hf leaves {type(model).__name__} as it is: it is neither a transformers nor a PEFT model. Where "
                "it holds one, call memo_hf.enable on that",
                stacklevel=3,
            )
            return
        # memo_hf checks the model on the device where it will train; Accelerator would move it only when it wraps it.
        if place and self.distributed_type not in _PLACE_THEMSELVES and not self.verify_device_map(module):
            model.to(self.device)
        session = enable_under(self, model, self.memo_plugin.config)
        session.say = self.print  # of one process
        self.memo_sessions.append(session)

    @property
    def memo_report(self) -> str | None:
        return "\n\n".join(session.report() for session in self.memo_sessions) or self._last_report

    def _close_sessions(self, start: int = 0) -> None:
        sessions, self.memo_sessions[start:] = self.memo_sessions[start:], []
        for session in sessions:
            session.close()

    def free_memory(self, *objects):
        self._last_report = self.memo_report
        objects = super().free_memory(*objects)  # first: an engine of DeepSpeed's has its hooks on the layers
        self._close_sessions()
        return objects

    def end_training(self):
        self._last_report = self.memo_report
        self._close_sessions()
        super().end_training()
