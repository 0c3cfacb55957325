"""`MemoTrainerMixin` and `MemoTrainer`: memo_hf in a transformers `Trainer`, or in any subclass of it.

Called by users. It must not know how memo_hf works: it opens a session when the training loop starts, closes it when
the loop ends, however it ends, and passes the session's numbers to Trainer's own loggers in between.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings

from transformers import Trainer

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError, MemoError
from memo_hf.integrations.accelerate import as_config, enable_under, refuse_conflicts

_GIB = 2**30
# The same switch under the name of today, and under the one that older releases and TRL use.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


class MemoTrainerMixin:
    """Adds the argument `memo` to a Trainer: `class MySFTTrainer(MemoTrainerMixin, SFTTrainer)`.

    Args:
        memo: a `MemoConfig`, a dictionary of its settings, or None, which leaves the Trainer exactly as it is.
        The others are the Trainer's own.

    Attributes:
        memo_session: the open `Session` while the training loop runs, else None.
        memo_stats, memo_report: the session's `stats` and `report()` at the end of the last training loop, or None.

    memo_hf is on from the start of the training loop to its end or failure, so that evaluation outside of it, saving
    and a second `train()` find the model as it was. Logs that carry the loss also carry `memo/...` numbers.

    Raises:
        ConfigError: `memo` is wrong, or activation checkpointing, activation offloading, torch.compile or
            DataParallel is on too. The error names the switch. TRL's configurations turn activation checkpointing on
            by default; where it is on for that reason only, it is turned off, with a warning.
        UnsupportedModelError: from `train()`, for a model that memo_hf cannot run.
    """

    def __init__(self, *args, memo: MemoConfig | dict | None = None, **kwargs):
        self.memo_config = None if memo is None else as_config(memo)
        self.memo_session = None
        self.memo_stats = self.memo_report = None
        super().__init__(*args, **kwargs)
        if self.memo_config is not None:
            self.args = _without_checkpointing(self.args)
            _refuse_training_arguments(self.args)
            refuse_conflicts(self.accelerator)

    # The loop, not `train()`: by then Trainer has made or changed the model (model_init, Liger, a loaded checkpoint)
    # but not wrapped it, and a loop that `auto_find_batch_size` starts again gets a session of its own.
    def _inner_training_loop(self, *args, **kwargs):
        if self.memo_config is None:
            return super()._inner_training_loop(*args, **kwargs)
        config = self.memo_config
        if config.plan_file is None and config.swap_fraction is None and self.args.output_dir:
            config = dataclasses.replace(config, plan_file=os.path.join(self.args.output_dir, "memo_plan.json"))
        # As the loop itself does first: it ends DeepSpeed's engine of the loop before, which is still on the model.
        self.accelerator.free_memory()
        self.memo_session = session = enable_under(self.accelerator, self.model, config)
        self._memo_checked = False
        try:
            self._say(session.describe())
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.memo_stats, self.memo_report = session.stats, session.report()
            self.memo_session = None
            session.close()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.memo_session is not None and not self._memo_checked:
            self._memo_checked = True
            self._check_effect(self.memo_session.stats)
        return loss

    def _check_effect(self, stats):
        """After the first training step: raise where memo_hf did nothing, and say so where it stepped aside."""
        if stats.stock_forwards:
            limit = self.memo_config.effective_min_tokens
            self._say(f"memo_hf: a batch of fewer than {limit:,} tokens runs untouched (MemoConfig.min_tokens)")
        elif (
            stats.strategy == "memo"
            and not stats.total_swapped_bytes
            and len(stats.layers) > self.memo_config.unswapped_layers
        ):
            raise MemoError(
                f"the first training step swapped 0 bytes although memo_hf was enabled on {len(stats.layers)} layers: "
                "their forward was not called, or was replaced later. Look for what else patches the model"
            )

    def _say(self, line: str):
        if self.is_world_process_zero():
            print(line)

    def log(self, logs, *args, **kwargs):
        if self.memo_session is not None and "loss" in logs:
            logs.update(_metrics(self.memo_session.stats))
        return super().log(logs, *args, **kwargs)


class MemoTrainer(MemoTrainerMixin, Trainer):
    """`transformers.Trainer` with the argument `memo`; see `MemoTrainerMixin`."""


def _without_checkpointing(args):
    """`args`, or a copy with activation checkpointing off where it is on only because this class of arguments says so.

    A copy, since the user may train with the same arguments without memo_hf afterwards.
    """
    on_by_default = any(spec.name in _CHECKPOINTING and spec.default is True for spec in dataclasses.fields(args))
    if not (on_by_default and any(getattr(args, name, False) for name in _CHECKPOINTING)):
        return args
    warnings.warn(
        f"{type(args).__name__} turns activation checkpointing on by default, and it would recompute all that memo_hf "
        "swaps, so memo_hf turned it off. Write gradient_checkpointing=False to say so yourself",
        stacklevel=4,
    )
    args = copy.copy(args)
    for name in _CHECKPOINTING:
        setattr(args, name, False)
    return args


def _refuse_training_arguments(args) -> None:
    for name in _CHECKPOINTING:
        if getattr(args, name, False):
            raise ConfigError(
                f"activation checkpointing is on, and would recompute all that memo_hf swaps. Turn it off: "
                f"{name}=False in the training arguments, or train without memo_hf: memo=None"
            )
    if getattr(args, "activation_offloading", False):
        raise ConfigError(
            "TRL's activation offloading is on, and would copy to the host what memo_hf already does. Turn it off: "
            "activation_offloading=False in the training arguments"
        )
    if args.torch_compile:
        raise ConfigError(
            "torch.compile is on, and would trace around what memo_hf does at run time. Turn it off: "
            "torch_compile=False in the training arguments"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"Trainer would run nn.DataParallel over {args.n_gpu} GPUs, whose replicas memo_hf cannot follow. Start "
            "one process per GPU (accelerate launch), or let one GPU be visible"
        )


def _metrics(stats) -> dict[str, float]:
    return {
        "memo/swapped_gib": stats.swapped_bytes / _GIB,
        "memo/host_peak_gib": stats.peak_host_bytes / _GIB,
        "memo/swap_fraction": stats.swap_fraction,
        "memo/stock_forwards": stats.stock_forwards,
    }
