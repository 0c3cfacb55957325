"""`MemoTrainerMixin` and `MemoTrainer`: memo_hf in a transformers `Trainer`, or in any subclass of it.

Called by users. It must not know how memo_hf works: it opens a session when the training loop starts, closes it when
the loop ends, however it ends, and passes the session's numbers to Trainer's own loggers in between.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from pathlib import Path

from tqdm.auto import tqdm
from transformers import Trainer

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError, MemoError
from memo_hf.integrations.accelerate import as_config, enable_under, refuse_conflicts
from memo_hf.integrations.progress import RunFigures
from memo_hf.integrations.trl_loss import small_loss_tiles
from memo_hf.paths import require_suffix
from memo_hf.units import format_bytes

# The same switch under the name of today, and under the one that older releases and TRL use.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


class MemoTrainerMixin:
    """Adds the argument `memo` to a Trainer: `class MySFTTrainer(MemoTrainerMixin, SFTTrainer)`.

    Args:
        memo: a `MemoConfig`, a dictionary of its settings, or None, which leaves the Trainer exactly as it is. So it is
            where `memo` is not given at all, with a warning.
        The others are the Trainer's own.

    Attributes:
        memo_session: the open `Session` while the training loop runs, else None.
        memo_stats, memo_report: the session's `stats` and `report()` at the end of the last training loop, or None.
            `save_memo_report` writes the latter to a file, with plots where that is an HTML page.

    memo_hf is on from the start of the training loop to its end or failure, so that evaluation outside of it, saving
    and a second `train()` find the model as it was. The first batch prints one line: mode, swap fraction, what decided
    it, host memory and the forecast. Trainer's progress bar shows tokens per second and the peak of memory. Logs that
    carry the loss also carry `memo/swapped_gib`, `memo/host_peak_gib`, `memo/swap_fraction`, `memo/tokens_per_second`,
    `memo/untouched_batches` (too short to gain), and `memo/device_peak_gib` (on a CPU `memo/process_peak_gib`).

    Raises:
        ConfigError: `memo` is wrong, or activation checkpointing, activation offloading, torch.compile or
            DataParallel is on too. The error names the switch. TRL's configurations turn activation checkpointing on
            by default; where it is on for that reason only, it is turned off, with a warning.
        UnsupportedModelError: from `train()`, for a model that memo_hf cannot run.
    """

    def __init__(self, *args, memo: MemoConfig | dict | None = ..., **kwargs):
        if isinstance(memo, bool):
            raise ConfigError(f"memo is {memo}; write memo=MemoConfig(), or memo=None to train without memo_hf")
        if memo is ...:
            warnings.warn(
                f"{type(self).__name__} was made without memo=, so it trains without memo_hf. Write memo=MemoConfig() "
                "to train with it, memo=None to be rid of this line",
                stacklevel=2,
            )
            memo = None
        self.memo_config = None if memo is None else as_config(memo)
        self.memo_session = None
        self.memo_stats = self.memo_report = self._memo_run_report = None
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
        session.say = self._say
        self._memo_figures = RunFigures(session, self.callback_handler.callbacks)
        self.add_callback(self._memo_figures)
        self._memo_checked, self._memo_phase = False, session.stats.phase
        tiles = small_loss_tiles(self.args.device.type) if config.chunked_loss else contextlib.nullcontext()
        try:
            with tiles:
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._memo_run_report = session.run_report()
            self.memo_stats, self.memo_report = self._memo_run_report.stats, self._memo_run_report.text()
            self.memo_session = None
            self.remove_callback(self._memo_figures)
            session.close()

    def save_memo_report(self, path: str | Path, device_peak_bytes: int | None = None) -> None:
        """Write what memo_hf does or did in the last training loop, from the main process.

        Args:
            path: .html for a page with plots (which needs matplotlib), .json, or .txt. Missing folders are made.
            device_peak_bytes: of a step, as you measured it. Not given: as for `session.report`.

        Raises:
            ConfigError: another suffix, or matplotlib is missing.
            MemoError: nothing was trained with memo_hf yet.
        """
        formats = {".html": "html", ".json": "json", ".txt": "text"}
        suffix = require_suffix(path, "the path of a report", tuple(formats))
        report = self.memo_session.run_report() if self.memo_session is not None else self._memo_run_report
        if report is None:
            raise MemoError("there is nothing to report: no training loop has run with memo_hf; call train() first")
        if device_peak_bytes is not None:
            report = report.with_device_peak(device_peak_bytes)
        if self.is_world_process_zero():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(report.render(formats[suffix]))

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.memo_session is not None and not self._memo_checked:
            self._memo_checked = True
            self._check_effect(self.memo_session.stats)
        if self.memo_session is not None and self._memo_phase != (phase := self.memo_session.stats.phase):
            self._memo_phase = phase
            self._say(self.memo_session.describe())  # the first step was measured, and the plan is made
        return loss

    def _check_effect(self, stats):
        """After the first training step: say what it swapped. Raise where memo_hf did nothing, for no reason given."""
        if stats.stock_forwards:
            limit = self.memo_config.effective_min_tokens
            self._say(f"memo_hf: a batch of fewer than {limit:,} tokens runs untouched (MemoConfig.min_tokens)")
        elif stats.total_swapped_bytes:
            self._say(
                f"memo_hf: the first step swapped {format_bytes(stats.swapped_bytes)} of "
                f"{format_bytes(stats.planned_bytes)} planned"
            )
        elif stats.strategy == "memo" and len(stats.layers) > self.memo_config.unswapped_layers:
            raise MemoError(
                f"the first training step swapped 0 bytes although memo_hf was enabled on {len(stats.layers)} layers: "
                "their forward was not called, or was replaced later. Look for what else patches the model"
            )

    def _say(self, line: str):
        if self.is_world_process_zero():
            tqdm.write(line)  # above a progress bar that is there

    def log(self, logs, *args, **kwargs):
        if self.memo_session is not None and "loss" in logs:
            logs.update(self._memo_figures.metrics(self.args.device))
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
    first, second = sorted(_CHECKPOINTING, key=lambda name: not getattr(args, name, False))  # what is on comes first
    if getattr(args, first, False):
        raise ConfigError(
            "activation checkpointing is on, and would recompute all that memo_hf swaps. Turn it off: "
            f"{first}=False ({second}=False) in the training arguments, or train without memo_hf: memo=None"
        )
    if getattr(args, "activation_offloading", False):
        raise ConfigError(
            "TRL's activation offloading is on, and would copy to the host what memo_hf already does. Turn it off: "
            "activation_offloading=False in the training arguments, or train without memo_hf: memo=None"
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
