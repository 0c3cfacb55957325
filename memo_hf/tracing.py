"""The trace of a training step without running it: FakeTensors stand in for all activations and gradients.

Called by whoever plans addresses, or looks at a step's memory, before there is memory for the step. The layers are
checked on the model's real parameters first, as always; then the step runs on tensors that have sizes and no values,
with the verdicts of that check. The most bytes alive are those of the step itself. What differs: memory within one
kernel, random states and the optimizer (which reads its step count) are not seen, and autograd adds gradients of a
FakeTensor out of place where it adds others in place. Knows sessions; no layer and no planner.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_hf.config import MemoConfig
from memo_hf.errors import ConfigError, UnsupportedModelError
from memo_hf.planner.trace import Event, Trace
from memo_hf.serving import Serving
from memo_hf.session import Session
from memo_hf.swap.copy_backend import Copy


def trace_step(model: nn.Module, inputs: dict[str, Tensor], config: MemoConfig) -> Trace:
    """Every request and free of a forward and a backward pass, and of the gradients' end.

    Args:
        model: on the CPU, in training mode and not enabled; nothing of it is changed.
        inputs: of its forward, with `labels`. Each row is taken for one document without padding.
        config: with `swap_fraction` set, since nothing can be measured.

    Raises:
        ConfigError: `swap_fraction` is not set.
        UnsupportedModelError: a layer runs in layer mode, where transformers makes a mask for every pair of tokens
            under FakeTensors and not otherwise; or as the step itself would.
        HostMemoryError: as the step itself would.
    """
    if config.swap_fraction is None:
        raise ConfigError("a step that does not run cannot be measured; set MemoConfig(swap_fraction=...) to trace it")
    session = Session(model, config)
    try:
        log, mode = _Log(), FakeTensorMode(allow_non_fake_inputs=True)
        session.serving = _Phases(model, config, log)
        session.has_values = False
        session.engine_options = {"backend": _NoCopies(), "tensor_types": (FakeTensor, nn.Parameter)}
        with _without_memory(model, mode) as standing, mode:
            inputs = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
            log.begin([*standing, *inputs.values()])
            with log:
                model(**inputs).loss.backward()
            for parameter in standing:
                parameter.grad = None
        for layer in session.stats.layers:
            if layer.mode != "token":
                raise UnsupportedModelError(
                    f"{layer.name} runs in layer mode ({layer.reason}), whose trace under FakeTensors would be of "
                    "another step; record a step with MemoConfig(allocator='planned') instead"
                )
        return log.end()
    finally:
        session.close()


class _Log(TorchDispatchMode):
    """Notes each storage that an operator makes, and its end."""

    def begin(self, standing: list[Tensor]) -> None:
        """What `standing` holds is there before the step and after it."""
        self._events: list[Event] = []
        self._phase = ""
        self._num_requests = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in standing}

    def mark(self, phase: str) -> None:
        """See `Serving.mark`."""
        self._phase = phase

    def end(self) -> Trace:
        """The trace. What is freed from now on is not in it."""
        events, self._events = tuple(self._events), []
        return Trace(events)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.set_:
            FakeTensorMode.cache_clear()  # its keys hold the arguments, and this one's is a storage
        if not any(returned.alias_info for returned in func._schema.returns):
            for tensor in tree_leaves(output):
                if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":  # token mode's stubs are
                    self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or not storage.nbytes():
            return
        self._known.add(storage._cdata)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        self._events.append(Event("malloc", number, storage.nbytes(), self._phase, 0, 0))
        weakref.finalize(storage, self._note_end, storage._cdata, number)

    def _note_end(self, identity: int, number: int) -> None:
        self._known.discard(identity)
        self._events.append(Event("free", number, 0, self._phase, 0, 0))


class _Phases(Serving):
    """Tells the log which phase is on, in place of an allocator."""

    def __init__(self, model: nn.Module, config: MemoConfig, log: _Log):
        super().__init__(model, config)
        self._log = log

    def begin_forward(self, device: torch.device, batch_size: int, num_tokens: int) -> None:
        self._log.mark("before the layers")

    def mark(self, phase: str) -> None:
        self._log.mark(phase)


class _NoCopies:
    """A `CopyBackend` whose copies are over at once, since there is nothing to copy."""

    timings = None
    copies_are_short = True

    def offload(self, source: Tensor, target: Tensor) -> Copy:
        return Copy(source)

    def fetch(self, source: Tensor, target: Tensor, after: Copy) -> Copy:
        return Copy(target)

    def wait(self, copy: Copy, buffer: Tensor | None = None) -> None:
        copy.buffer = None

    def finish(self, copy: Copy) -> None:
        copy.buffer = None

    def done(self, copy: Copy) -> bool:
        copy.buffer = None
        return True

    def pin(self, buffer: Tensor) -> bool:
        return False

    def unpin(self, buffer: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _without_memory(model: nn.Module, mode: FakeTensorMode):
    """The model with FakeTensors for its parameters and buffers, which are put back; yields the former."""
    stand_ins: dict[int, Tensor] = {}
    places = []

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in stand_ins:
            fake = mode.from_tensor(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            stand_ins[id(tensor)] = fake
        return stand_ins[id(tensor)]

    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        places.append((tensors, name, tensor))
        for tensors, name, tensor in places:
            tensors[name] = stand_in(tensor)
        yield list(stand_ins.values())
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor
