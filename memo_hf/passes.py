"""Counts a session's training forward passes, and says once what is odd about them. Made by the session."""

from __future__ import annotations

import logging

from memo_hf.config import MemoConfig
from memo_hf.layers.step import Step

logger = logging.getLogger("memo_hf")


class Passes:
    """A pass goes through each stack of the model, or through some of them.

    Attributes:
        num_run: passes that memo_hf ran.
        num_untouched: passes that ran untouched, being too short to gain.
        num_tokens: of both, padding included.
        chunk_size: tokens of the whole batch in a chunk, of the last pass.
        planned_bytes: what the last pass is to swap.
    """

    def __init__(self, config: MemoConfig):
        self._config = config
        self.num_run = self.num_untouched = self.num_tokens = 0
        self.chunk_size = self.planned_bytes = 0
        self._ended: set[str] = set()  # stacks that the pass which is on has been through
        self._has_warned_of_nothing = self._has_warned_of_evaluation = False

    def begin(self, stack_name: str, chunk_size: int, shape: tuple[int, int]) -> bool:
        """A pass of (batch, tokens) comes to a stack. Whether it begins there."""
        begins = stack_name in self._ended or not self._ended
        if begins:
            self._ended.clear()
            self.planned_bytes = 0
            self.num_tokens += shape[0] * shape[1]
        self.chunk_size = chunk_size
        return begins

    def end(self, stack_name: str, step: Step) -> None:
        """A pass has been through a stack. Says so, once, where it had nothing to swap."""
        self.num_run += not self._ended
        self._ended.add(stack_name)
        self.planned_bytes += step.planned_bytes
        expects_some = step.last is None or step.num_forward_only < len(step.kinds)
        expects_some &= len(step.whole_layers) < len(step.kinds)  # else they are checkpointed by plan
        if expects_some and not step.planned_bytes and not self._has_warned_of_nothing:
            self._has_warned_of_nothing = True
            logger.warning(f"memo_hf swaps nothing: {self._why_nothing(step)}")

    def skip(self, num_tokens: int) -> None:
        """A pass is too short to gain and runs untouched. Says so, the first time."""
        self.num_tokens += num_tokens
        if not self.num_untouched:
            logger.info(
                f"memo_hf: a batch has fewer than {self._config.effective_min_tokens} tokens and runs untouched "
                "(MemoConfig.min_tokens)"
            )
        self.num_untouched += 1

    def note_evaluation(self) -> None:
        """A pass with gradients ran untouched, in eval mode. Says so, once, before anything has run."""
        if not self.num_run and not self.num_untouched and not self._has_warned_of_evaluation:
            self._has_warned_of_evaluation = True
            logger.warning(
                "memo_hf: a forward pass with gradients ran untouched, since the model is in eval mode, as "
                "from_pretrained leaves it; call model.train() to train it"
            )

    def _why_nothing(self, step: Step) -> str:
        if step.last is None:
            return "none of the layers ran under memo_hf; look for what else replaces their forward"
        if not step.first_kept:
            return (
                f"MemoConfig(unswapped_layers={self._config.unswapped_layers}) keeps all {len(step.kinds)} layers "
                "on the device"
            )
        if step.num_forward_only >= step.first_kept:
            return (
                f"{step.num_forward_only} of {len(step.kinds)} layers have nothing to train in them or before them, "
                f"and the last {len(step.kinds) - step.first_kept} stay on the device (MemoConfig.unswapped_layers)"
            )
        return "the layers' inputs are not plain tensors with elements, and stay on the device"
