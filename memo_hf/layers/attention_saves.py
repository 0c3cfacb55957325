"""What the attention of a layer saves for backward, and where it comes from then: swapped, rebuilt, or stood in for.

Used by token mode around the attention, which is ordinary autograd code. Everything is known by its storage. It knows
no kernel and no model.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memo_hf.layers.sequence_parallel import AlongGradient
from memo_hf.layers.step import ATTENTION, LayerRecord
from memo_hf.layers.tokenwise import Node


class AttentionSaves:
    """Saved-tensor hooks of attend: everything that its autograd code saves is swapped by storage."""

    def __init__(self, record: LayerRecord, rebuilder: Rebuilder | None, stay: list[Tensor]):
        self._group, self._rebuilder = record.group, rebuilder
        self._stay = {tensor.untyped_storage()._cdata for tensor in stay}
        self._waiting: list[_Waiting] | None = None

    def hooks(self):
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor):
        if tensor.untyped_storage()._cdata in self._stay or tensor.numel() == 0:
            return tensor
        if self._waiting is not None:
            self._waiting.append(_Waiting(tensor))
            return self._waiting[-1]
        rebuilt = self._rebuilder and self._rebuilder.view_of(tensor)
        return rebuilt or self._group.put(tensor, turn=ATTENTION)

    def wait_for_output(self) -> None:
        """Put nothing yet: the attention output is not to be saved, and is known when the attention is through."""
        self._waiting = []

    def stand_in_for(self, output: Tensor) -> AlongGradient | None:
        """What to read for `output` in backward, where it was saved; everything else that was is put now."""
        along, waiting, self._waiting = None, self._waiting, None
        for saved in waiting:
            if saved.tensor.untyped_storage()._cdata == output.untyped_storage()._cdata:
                along = along or AlongGradient()
                saved.becomes(_OutputView(along, output, saved.tensor))
            else:
                saved.becomes(self._group.put(saved.tensor, turn=ATTENTION))
        return along

    @staticmethod
    def _unpack(packed):
        return packed if isinstance(packed, Tensor) else packed.get()


class _Waiting:
    """A saved tensor of which is not known yet what becomes of it."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor

    def becomes(self, packed) -> None:
        self.tensor, self.get = None, packed.get


class _OutputView:
    """A view of the storage of the attention output, with the output's stand-in in its place."""

    def __init__(self, along: AlongGradient, output: Tensor, saved: Tensor):
        self._along, self._num_items = along, output.untyped_storage().nbytes() // output.element_size()
        self._is_whole = output.is_contiguous() and output.numel() == self._num_items
        self._output, self._saved = (
            (tensor.size(), tensor.stride(), tensor.storage_offset()) for tensor in (output, saved)
        )
        along.num_readers += 1

    def get(self) -> Tensor:
        part = self._along.take()
        if not self._is_whole:
            whole = part.new_zeros(self._num_items)
            whole.as_strided(*self._output).copy_(part)
            part = whole
        return part.as_strided(*self._saved)


class Rebuilder:
    """Brings queries, keys and values back in backward, once for all that saved them.

    Those of the swapped tokens are swapped too, as in the paper; those of the others are computed again.
    """

    def __init__(self, project: Node, record: LayerRecord, outputs: list[Tensor]):
        self._project, self._record = project, record
        self._swapped = project.num_swapped
        # Copied, or the whole tensors would move.
        first = [tensor[:, : self._swapped].clone() for tensor in outputs] if self._swapped else ()
        self._handles = [record.group.put(tensor, turn=ATTENTION) for tensor in first]
        self._positions = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(outputs)}

    def view_of(self, tensor: Tensor) -> _RebuiltView | None:
        position = self._positions.get(tensor.untyped_storage()._cdata)
        return None if position is None else _RebuiltView(self, position, tensor)

    def get(self, position: int) -> Tensor:
        if not self._record.rebuilt:
            rebuilt = self._project.again()
            for tensor, handle in zip(rebuilt, self._handles, strict=False):
                tensor[:, : self._swapped] = handle.get()
            self._record.rebuilt.extend(rebuilt)
        return self._record.rebuilt[position]


class _RebuiltView:
    def __init__(self, rebuilder: Rebuilder, position: int, tensor: Tensor):
        self._rebuilder, self._position = rebuilder, position
        self._layout = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def get(self) -> Tensor:
        return self._rebuilder.get(self._position).as_strided(*self._layout)
