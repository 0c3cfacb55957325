"""What the graph of a swapped chunk saves, and where it comes from in backward. Used by `tokenwise`.

Parameters are read from their modules again, constants stay, everything else goes to the swap group by storage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memo_hf.swap import SwapGroup

# Autograd functions between a parameter and a saved view or cast of it (autocast casts, Linear transposes).
_VIEWS_AND_CASTS = {"TBackward0", "ToCopyBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0"}


class ChunkSaves:
    """Saved-tensor hooks of a swapped chunk: parameters and constants stay, everything else is swapped by storage."""

    def __init__(self, node, group: SwapGroup | SavedBytes | None = None):
        self._group, self._num_parameters = group or node.group, len(node.parameters)
        self._all = node.parameters + node.frozen
        self._of_parameters = {
            module._parameters[name].untyped_storage()._cdata: (module, name) for module, name in self._all
        }
        self._frozen, self._may_be_cast = node.frozen, node.autocast.enabled
        self._stay = {tensor.untyped_storage()._cdata for tensor in node.constants}

    def hooks(self):
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor):
        storage = tensor.untyped_storage()._cdata
        if storage in self._of_parameters:
            return _ParameterView(self._of_parameters[storage], tensor)
        if storage in self._stay or tensor.numel() == 0:
            return tensor
        where = self._cast_of_trainable(tensor) if tensor.requires_grad else self._cast_of_frozen(tensor)
        return self._group.put(tensor) if where is None else _ParameterView(where, tensor)

    def _cast_of_trainable(self, tensor: Tensor):
        """The parameter that autocast cast to make `tensor`, found along the graph."""
        function, output = tensor.grad_fn, 0
        while function is not None and function.name() in _VIEWS_AND_CASTS:
            function, output = function.next_functions[0]
        if function is None or "_Sources" not in function.name():
            return None
        position = output - (len(function._input_metadata) - self._num_parameters)
        return self._all[position] if position >= 0 else None

    def _cast_of_frozen(self, tensor: Tensor):
        """The same for a frozen parameter, which has no graph: found by shape and confirmed by value."""
        # Not torch.is_autocast_enabled(): autocast is switched off where its casts are being computed with.
        if tensor.dim() != 2 or not self._may_be_cast:
            return None
        for module, name in self._frozen:
            parameter = module._parameters[name].detach()
            for view in (tensor, tensor.t()):
                if parameter.shape == view.shape and parameter.dtype != view.dtype:
                    if torch.equal(parameter.to(view.dtype), view):
                        return module, name
        return None

    @staticmethod
    def _unpack(packed):
        return packed if isinstance(packed, Tensor) else packed.get()


class SavedBytes:
    """Stands in for a swap group to count what it would be given: the inputs are there already, all else stays."""

    def __init__(self, inputs: list[Tensor]):
        self._seen = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._alive: list[Tensor] = []  # or a freed storage's identity would come again
        self.num_bytes = 0

    def put(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        tensor = tensor.detach()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor)
            # As a group does, which sends a small part of a large storage alone.
            self.num_bytes += storage.nbytes() if 2 * tensor.nbytes >= storage.nbytes() else tensor.nbytes
        return tensor


class _ParameterView:
    """A saved view or cast of a parameter: made again from the parameter, never swapped.

    Read from the module at that time, since ZeRO-3 and FSDP2 gather the weights anew for backward.
    """

    def __init__(self, where: tuple[nn.Module, str], tensor: Tensor):
        self._where = where
        self._layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self._dtype = tensor.dtype
        self._version = self._parameter()._version

    def _parameter(self) -> Tensor:
        module, name = self._where
        return module._parameters[name]

    def get(self) -> Tensor:
        parameter = self._parameter().detach()
        if parameter._version != self._version:
            raise RuntimeError(
                f"parameter {self._where[1]!r} of {type(self._where[0]).__name__} was changed in place between forward "
                "and backward, which needs its old value; step the optimizer after backward"
            )
        return parameter.to(self._dtype).as_strided(*self._layout)
