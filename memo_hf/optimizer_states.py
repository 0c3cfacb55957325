"""What optimizers hold of a model's training. Made by the session, for its planners; knows no plan."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes that this rank holds of `tensor`, of which FSDP2 leaves it a part."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


class OptimizerStates:
    """The optimizers that have stepped parameters of `model`, and what their states take.

    An optimizer makes its states in its first step, after the forward pass that is planned first.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        me = weakref.ref(self)
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: me() and me()._note(optimizer))
        self.close = weakref.finalize(self, hook.remove)

    @property
    def has_stepped(self) -> bool:
        """Some optimizer has."""
        return len(self._seen) > 0

    def num_bytes(self, device: torch.device) -> int:
        """Bytes of all states on `device`, of this rank."""
        states = (value for optimizer in self._seen for state in optimizer.state.values() for value in state.values())
        return sum(local_bytes(s) for s in states if isinstance(s, torch.Tensor) and s.device.type == device.type)

    def _note(self, optimizer: Optimizer) -> None:
        model = self._model()
        if model is None or optimizer in self._seen:
            return
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._seen.add(optimizer)
