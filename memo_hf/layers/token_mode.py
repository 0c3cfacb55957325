"""Token mode: a decoder layer as project, attend and finish (the paper's section 4.1, with chunks).

    h --project--> q, k, v --attend--> o --finish--> layer output
       (chunks)           (whole sequence)  (chunks, reads h)

project and finish are `tokenwise.Node`s. attend is the user's own attention as ordinary autograd code: what it saves is
caught by saved-tensor hooks and swapped by storage, so any kernel works and none is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention_saves import AttentionSaves, Rebuilder
from memo_hf.layers.call import LayerCall, tensors_in
from memo_hf.layers.roles import AttentionReached, Finish, Project, playing, stubbed
from memo_hf.layers.step import WHOLE, LayerRecord, Step
from memo_hf.layers.tokenwise import Node, cut_into_chunks
from memo_hf.layers.unread import unread


@dataclass(frozen=True)
class Recipe:
    """What the check found out about one kind of layer.

    Attributes:
        stubs: (path, output width) of the modules that feed only q, k, v; finish replaces them.
        meta_rope: finish gets cos and sin as meta tensors.
        projecting: paths of the modules that have run when attention is called.
        around: paths of the modules that are running then: the layer itself and its attention.
        returns_tuple: the layer returns a tuple whose first item is its output.
        unread: paths of the linear modules whose output backward does not read.
        qkv_width: numbers per token in queries, keys and values together.
        attended_width: numbers per token in the attention output.
    """

    stubs: tuple[tuple[str, int], ...]
    meta_rope: bool
    projecting: tuple[str, ...]
    around: tuple[str, ...]
    returns_tuple: bool
    qkv_width: int
    attended_width: int
    unread: tuple[str, ...] = ()

    def nodes_using(self, path: str) -> tuple[bool, bool]:
        """Whether project, and whether finish, computes with the parameters that the module at `path` owns."""
        if path in self.around:
            return True, True
        if _is_below(path, self.projecting):
            return True, not _is_below(path, [stub for stub, _ in self.stubs])
        return False, True


class TokenLayer:
    """Runs one decoder layer in token mode.

    Args:
        layer: the decoder layer; its code and parameters are used as they are.
        forward: the layer's own forward.
        configs: the model configurations that its attention reads.
        recipe: from the check.
    """

    def __init__(self, layer: nn.Module, forward, configs: tuple, recipe: Recipe):
        self.layer, self.forward, self.configs, self.recipe = layer, forward, configs, recipe

    def __call__(self, call: LayerCall, step: Step, index: int, name: str):
        """The layer's output for `call`, of the type that the layer itself returns.

        Raises:
            UnsupportedModelError: an argument beside the layer input needs a gradient, or attention is called twice.
        """
        if beside := call.names_needing_gradients():
            raise UnsupportedModelError(
                f"{name} is given {beside} beside its input, which need gradients; token mode gives none to them"
            )
        with step.layer(index, name, self.layer, call.hidden) as record:
            output, rest = self._run(call, step, record)
        return (output, *rest) if self.recipe.returns_tuple else output

    def _run(self, call: LayerCall, step: Step, record: LayerRecord) -> tuple[Tensor, tuple]:
        hidden = call.take_hidden()
        step.require(record.index, self._least_bytes(hidden, step.settings.rebuild_qkv))
        chunks = cut_into_chunks(call.num_tokens, step.settings.chunk_tokens, step.settings.swap_fraction)
        constants = tensors_in([call.args, call.kwargs]) + list(self.layer.buffers())
        trainable, frozen = self._parameters()
        seen: dict = {}

        project = Node(
            run=lambda inputs, start, stop: self.project(call, inputs[0], start, stop, seen),
            parameters=trainable["project"],
            frozen=frozen,
            chunks=chunks,
            group=record.group,
            constants=constants,
            passes_input=hidden.requires_grad,
            turn=WHOLE,
            count_saved=record.count("project"),
            before_backward=record.begin_project,
            inputs_are_there=lambda: record.mark("backward project"),
            after_backward=record.end_backward,
        )
        finish = Node(
            run=lambda inputs, start, stop: (self.finish(call, *inputs, start, stop, seen),),
            parameters=trainable["finish"],
            frozen=frozen,
            chunks=chunks,
            group=record.group,
            constants=constants,
            turn=WHOLE,
            rerun=lambda inputs, start, stop: (self.finish_again(call, *inputs, start, stop),),
            count_saved=record.count("finish"),
            before_backward=record.begin_finish,
            inputs_are_there=lambda: record.mark("backward finish"),
            after_backward=record.begin_attend,
        )
        record.mark("forward project")
        *parts, hidden = (*project.apply(hidden), *(() if project.passes_input else (hidden,)))
        record.mark("forward attend")
        rebuilds = step.settings.rebuild_qkv and not record.group.keep and not chunks[-1].swapped
        rebuilder = Rebuilder(project, record, parts) if rebuilds else None
        attended = self._attend(step, seen, parts, record, AttentionSaves(record, rebuilder, constants))
        record.output_bytes = attended.nbytes
        record.mark("forward finish")
        (output,) = finish.apply(hidden, attended)
        return output, seen.get("rest", ())

    def _least_bytes(self, hidden: Tensor, rebuild_qkv: bool) -> int:
        """Bytes that the layer swaps at least: its input and its attention output, and q, k, v where they wait too."""
        width = self.recipe.attended_width + (0 if rebuild_qkv else self.recipe.qkv_width)
        itemsize = _dtype_in_attention(hidden).itemsize
        return hidden.nbytes + hidden.shape[:2].numel() * width * itemsize

    def project(self, call: LayerCall, hidden: Tensor, start: int, stop: int, seen: dict) -> tuple[Tensor, ...]:
        """q, k, v of tokens [start, stop), each (batch, tokens, heads, d); `seen` notes the attention's arguments."""
        args, kwargs = call.on_tokens(hidden, start, stop)
        role = Project()
        with playing(role, self.configs):
            try:
                self.forward(*args, **kwargs)
            except AttentionReached:
                pass
        seen.setdefault("module", role.module)
        seen.setdefault("arguments", role.attention_arguments)
        return tuple(_as_attention_wants(tensor).transpose(1, 2) for tensor in role.query_key_value)

    def finish(self, call: LayerCall, hidden: Tensor, attended: Tensor, start: int, stop: int, seen: dict) -> Tensor:
        """The layer's output for tokens [start, stop) from its input and its attention output there.

        `seen` notes what the layer returns beside it.
        """
        args, kwargs = call.on_tokens(hidden, start, stop, meta_rope=self.recipe.meta_rope)
        stubs = {self.layer.get_submodule(path): width for path, width in self.recipe.stubs}
        with stubbed(stubs), playing(Finish(attended), self.configs):
            output = self.forward(*args, **kwargs)
        if not self.recipe.returns_tuple:
            return output
        seen["rest"] = output[1:]
        return output[0]

    def finish_again(
        self, call: LayerCall, hidden: Tensor, attended: Tensor, start: int, stop: int, fill: float | None = None
    ) -> Tensor:
        """`finish` for the sake of its graph: what backward does not read is left unset, or set to `fill`."""
        with unread([self.layer.get_submodule(path) for path in self.recipe.unread], fill):
            return self.finish(call, hidden, attended, start, stop, {})

    def _attend(
        self, step: Step, seen: dict, parts: list[Tensor], record: LayerRecord, saves: AttentionSaves
    ) -> Tensor:
        """The attention output from `parts`, queries, keys and values (batch, tokens, heads, d), which is emptied."""
        module, arguments = seen["module"], seen["arguments"]
        arguments = {name: self._own_parameter(item) for name, item in arguments.items()}
        ranks = step.sequence
        if ranks is not None:
            parts = ranks.gather(parts)
            saves.wait_for_output()
        record.qkv_bytes = sum(part.nbytes for part in parts)
        parts[:] = [part.transpose(1, 2) for part in parts]
        with saves.hooks():
            attended = step.attend_here(module, parts, **arguments)
            if ranks is not None:
                attended = ranks.scatter(attended, saves.stand_in_for(attended))
        return attended

    def _own_parameter(self, item):
        """The layer's own parameter for the stand-in that a swapped chunk ran with (attention sinks)."""
        if not isinstance(item, Tensor) or not item.requires_grad:
            return item
        for parameter in self.layer.parameters():
            if parameter.data_ptr() == item.data_ptr() and parameter.shape == item.shape:
                return parameter
        return item

    def _parameters(self) -> tuple[dict[str, list], list]:
        """Trainable parameters by node, and the frozen ones, each as (module, name).

        Asked for at each call: adapters may have come, and parameters may have been frozen, since the last one.
        """
        trainable, frozen = {"project": [], "finish": []}, []
        for path, module in self.layer.named_modules():
            in_project, in_finish = self.recipe.nodes_using(path)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if not parameter.requires_grad:
                    frozen.append((module, name))
                    continue
                if in_project:
                    trainable["project"].append((module, name))
                if in_finish:
                    trainable["finish"].append((module, name))
        return trainable, frozen


def _as_attention_wants(tensor: Tensor) -> Tensor:
    """Autocast gives attention all of its inputs in one dtype, where rotary embedding has made some of them fp32."""
    return tensor.to(_dtype_in_attention(tensor))


def _dtype_in_attention(tensor: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(tensor.device.type) and tensor.dtype is torch.float32:
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def _is_below(path: str, others) -> bool:
    return any(path == other or path.startswith(other + ".") for other in others)
