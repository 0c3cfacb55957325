"""Layer mode: a layer that cannot run per token is checkpointed whole, and its input is swapped.

torch's own non-reentrant checkpoint recomputes the layer, with its random state and autocast; it saves its inputs
through the saved-tensor hooks that are in force when it is called, and those hand them to the swap engine.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.call import LayerCall
from memo_hf.layers.roles import Whole, playing
from memo_hf.layers.step import WHOLE, LayerRecord, Step


class WholeLayer:
    """Runs one decoder layer in layer mode.

    Args:
        layer: the decoder layer.
        forward: the layer's own forward.
        configs: the model configurations that its attention reads, or () where it attends on its own.
    """

    def __init__(self, layer: nn.Module, forward, configs: tuple):
        self.layer, self.forward, self.configs = layer, forward, configs

    def __call__(self, call: LayerCall, step: Step, index: int, name: str):
        """The layer's output for `call`, of the type that the layer itself returns."""
        hidden = call.take_hidden()
        step.require(index, hidden.nbytes)

        def run(hidden):
            args, kwargs = call.whole(hidden)
            with playing(Whole(step.attend), self.configs) as role:
                output = self.forward(*args, **kwargs)
            if step.sequence is not None and self.configs and not role.num_calls:
                raise UnsupportedModelError(
                    f"{name} mixes tokens without transformers' attention interface, so under sequence parallelism it "
                    "would see this rank's tokens alone. Train this model without sequence parallelism"
                )
            return output

        with step.layer(index, name, self.layer, hidden) as record, _InputSaves(record, hidden).hooks():
            record.mark("forward whole")
            return checkpoint(run, hidden, use_reentrant=False)


class _InputSaves:
    """Saved-tensor hooks of checkpoint's own inputs. Unpacking is the first thing that the layer's backward does."""

    def __init__(self, record: LayerRecord, hidden: Tensor):
        self._record, self._hidden = record, hidden.untyped_storage()._cdata

    def hooks(self):
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor):
        if tensor.untyped_storage()._cdata != self._hidden:
            return tensor
        return self._record.group.put(tensor, turn=WHOLE)

    def _unpack(self, packed):
        if isinstance(packed, Tensor):
            return packed
        self._record.begin_finish()
        tensor = packed.get()
        self._record.begin_project()
        self._record.end_backward()
        return tensor
