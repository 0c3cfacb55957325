"""The file in which a run's plans are kept for the next one, and what they depend on. Used by `planning`."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import torch
import transformers
from torch import nn

import memo_hf
from memo_hf.config import MemoConfig
from memo_hf.errors import PlanError
from memo_hf.layers.zero import full_shape
from memo_hf.planner.plan import PlanBook

logger = logging.getLogger("memo_hf")


class PlanFile:
    """Plans of one stack of a model.

    Args:
        config: the settings.
        model: the whole model.
        layers: the decoder layers of the stack.
        is_kept: plans of this stack go into the file; those of others last as long as the run.
    """

    def __init__(self, config: MemoConfig, model: nn.Module, layers: list[nn.Module], *, is_kept: bool):
        self._config, self._model, self._layers = config, model, layers
        self._path = Path(config.plan_file) if config.plan_file and is_kept else None

    def load(self, device: torch.device, sequence_parallel: int) -> PlanBook:
        """What an earlier run has left, or an empty book where that is nothing, or stale, which is said."""
        fingerprint = self.fingerprint(device, sequence_parallel)
        if self._path is not None and self._path.exists():
            try:
                return PlanBook.load(self._path, fingerprint)
            except PlanError as error:
                logger.warning(f"memo_hf: {error}. The first step is measured again and the file replaced")
        return PlanBook(fingerprint)

    def save(self, book: PlanBook) -> None:
        if self._path is not None and os.environ.get("RANK", "0") == "0":  # set by the launcher
            self._path.parent.mkdir(parents=True, exist_ok=True)
            book.save(self._path)

    def fingerprint(self, device: torch.device, sequence_parallel: int) -> dict:
        """What plans depend on."""
        settings = {k: v for k, v in dataclasses.asdict(self._config).items() if k != "plan_file"}
        on_cuda = device.type == "cuda"
        return {
            "model": type(self._model).__name__,
            "parameters": sum(full_shape(p).numel() for p in self._model.parameters()),
            "trainable parameters": sum(full_shape(p).numel() for p in self._model.parameters() if p.requires_grad),
            "layers": len(self._layers),
            "dtype": str(next(self._layers[0].parameters()).dtype),
            **settings,
            "memo_hf": memo_hf.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name(device) if on_cuda else f"cpu, {torch.get_num_threads()} threads",
            "ranks of a sequence": sequence_parallel,
            "ranks on this node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        }
