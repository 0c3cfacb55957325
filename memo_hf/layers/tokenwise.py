"""An autograd node that runs a token-wise computation in chunks of tokens, forward and backward.

Used for project, finish, and the norm after the last layer. A chunk is either swapped (run with a graph, whose saved
tensors go to the swap engine) or recomputed (run again in backward from the inputs, which the swap engine holds).
Parameters are explicit inputs and their gradients are returned once, summed over the chunks in fp32, so that DDP, FSDP2
and hooks see each parameter ready exactly once. Knows no transformers model and no layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from memo_hf.errors import MemoError
from memo_hf.layers.ambient import AutocastState, RandomState, drawing_from
from memo_hf.layers.chunk_saves import ChunkSaves, SavedBytes
from memo_hf.layers.roles import substituted
from memo_hf.swap import Handle, SwapGroup


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) and whether what their graph saves is swapped or recomputed."""

    start: int
    stop: int
    swapped: bool


def cut_into_chunks(num_tokens: int, chunk_tokens: int, swap_fraction: float) -> list[Chunk]:
    """Chunks of at most `chunk_tokens`; exactly the first `round(swap_fraction * num_tokens)` tokens are swapped."""
    boundary = round(swap_fraction * num_tokens)
    return [
        Chunk(start, min(start + chunk_tokens, stop), swapped)
        for first, stop, swapped in ((0, boundary, True), (boundary, num_tokens, False))
        for start in range(first, stop, chunk_tokens)
    ]


class _Sources(torch.autograd.Function):
    """Turns tensors into graph inputs that the graph does not keep alive, which a leaf's accumulator would."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        # The gradients of a chunk are captured at this node and never pass through it.
        raise MemoError(
            "a tensor was taken out of a layer that memo_hf runs per token (by a hook?) and used in the loss; no "
            "gradient flows from there. Use the layer's output, or MemoConfig(mode='layer')"
        )


@dataclass
class _SwappedGraph:
    """The graph of a swapped chunk: gradient edges of its outputs, and of its inputs and parameters."""

    outputs: list
    edges: list


@dataclass
class Node:
    """What one token-wise node of one layer call computes, and where its saved tensors go.

    `run(inputs, start, stop)` takes the inputs' tokens [start, stop) and returns a tuple of tensors; dimension 1 of
    every input and output counts tokens. `parameters` are the trainable ones it may use and `frozen` the others, as
    (module, name). `constants` are tensors that outlive the step anyway (buffers, cos and sin) and are never swapped.
    `turn` is when backward fetches the inputs, among the rest of the group. `rerun` is `run` for a recompute, where the
    graph is wanted and the outputs are not. `count_saved` is told once (tokens, bytes) of what the graph of a chunk
    saves and a swapped one would send, where somebody asks.
    """

    run: Callable[[list[Tensor], int, int], tuple[Tensor, ...]]
    parameters: list[tuple[nn.Module, str]]
    frozen: list[tuple[nn.Module, str]]
    chunks: list[Chunk]
    group: SwapGroup
    constants: list[Tensor] = field(default_factory=list)
    passes_input: bool = False
    turn: int = 0
    rerun: Callable[[list[Tensor], int, int], tuple[Tensor, ...]] | None = None
    count_saved: Callable[[int, int], None] | None = None
    before_backward: Callable[[], None] = lambda: None
    inputs_are_there: Callable[[], None] = lambda: None
    after_backward: Callable[[], None] = lambda: None
    # Filled in by forward, emptied by backward.
    handles: list[Handle] = field(default_factory=list)
    random_states: list[RandomState | None] = field(default_factory=list)  # None for a chunk that drew nothing
    graphs: list[_SwappedGraph | None] = field(default_factory=list)
    autocast: AutocastState | None = None
    parameters_seen: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def apply(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs for all tokens; with `passes_input` the first input follows them, and its gradient is added to."""
        parameters = [module._parameters[name] for module, name in self.parameters]
        return _Tokenwise.apply(self, len(inputs), *inputs, *parameters)

    @property
    def num_swapped(self) -> int:
        """How many of the first tokens are in swapped chunks."""
        return max((chunk.stop for chunk in self.chunks if chunk.swapped), default=0)

    def again(self) -> list[Tensor]:
        """The outputs of the recomputed chunks, computed anew in backward from the swapped inputs and without a graph.

        They come in tensors of all tokens, in which the swapped ones are left to the caller to fill in.
        """
        self.require_same_parameters()
        inputs = [handle.get() for handle in self.handles]
        whole = None
        for chunk, random_state in zip(self.chunks, self.random_states, strict=True):
            if chunk.swapped:
                continue
            with torch.no_grad(), drawing_from(random_state), self.autocast():
                parts = self.run([tensor[:, chunk.start : chunk.stop] for tensor in inputs], chunk.start, chunk.stop)
            whole = self.gather(whole, parts, chunk, inputs[0].shape[1])
        return whole

    def gather(self, whole, parts: tuple[Tensor, ...], chunk: Chunk, num_tokens: int):
        """`whole` with the chunk's outputs in place; made at the first chunk. A single chunk's parts are the whole."""
        if len(self.chunks) == 1:
            return list(parts)
        if whole is None:
            whole = [part.new_empty((part.shape[0], num_tokens, *part.shape[2:])) for part in parts]
        for target, part in zip(whole, parts, strict=True):
            target[:, chunk.start : chunk.stop] = part
        return whole

    def note_parameters(self) -> None:
        """Remember with which parameters, at which version, forward has computed."""
        self.parameters_seen = [(parameter, _version(parameter)) for parameter in self._all_parameters()]

    def require_same_parameters(self) -> None:
        """Raise `RuntimeError` where a recompute would not find the parameters as forward had them."""
        for now, (then, version) in zip(self._all_parameters(), self.parameters_seen, strict=True):
            if now is not then:
                raise RuntimeError(
                    "a layer has other parameters in backward than it had in forward (torch.func.functional_call?), "
                    "and memo_hf would recompute with the wrong ones. Train this without memo_hf"
                )
            if _version(now) != version:
                raise RuntimeError(
                    f"a parameter of shape {tuple(now.shape)} was changed in place between forward and backward, which "
                    "recomputes with it; step the optimizer after backward"
                )

    def _all_parameters(self) -> list[Tensor]:
        return [module._parameters[name] for module, name in (*self.parameters, *self.frozen)]

    def free(self) -> None:
        """Forget what forward left: backward has used it."""
        self.handles, self.random_states, self.graphs, self.autocast = [], [], [], None
        self.parameters_seen = []

    def build(self, run, inputs: list[Tensor], chunk: Chunk, needs_grad: list[bool]):
        """Run one chunk with a graph. Returns its outputs and the gradient edges of inputs and parameters (or None)."""
        parameters = [module._parameters[name] for module, name in self.parameters]
        with torch.enable_grad():
            anchor = torch.empty(0, device=inputs[0].device, requires_grad=True)
            wanted = [tensor for tensor, needed in zip(inputs, needs_grad, strict=True) if needed]
            sources = iter(_Sources.apply(anchor, *wanted, *parameters) if wanted or parameters else ())
            inputs = [next(sources) if needed else t.detach() for t, needed in zip(inputs, needs_grad, strict=True)]
            replacements = list(sources)
            with substituted(self.parameters, replacements):
                outputs = run(inputs, chunk.start, chunk.stop)
        edges = [get_gradient_edge(t) if needed else None for t, needed in zip(inputs, needs_grad, strict=True)]
        return outputs, edges + [get_gradient_edge(t) for t in replacements]


class _Tokenwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, node: Node, num_inputs: int, *tensors: Tensor):
        ctx.set_materialize_grads(False)
        inputs = list(tensors[:num_inputs])
        device, num_tokens = inputs[0].device, inputs[0].shape[1]
        ctx.node, ctx.needs_grad = node, [tensor.requires_grad for tensor in inputs]
        node.autocast = AutocastState(device.type)
        node.note_parameters()
        node.handles = [node.group.put(tensor, turn=node.turn) for tensor in inputs]
        saved_tensors = ChunkSaves(node)
        whole, before = None, RandomState(device)
        for chunk in node.chunks:
            # Detached, since hooks of modules may ask a tensor that needs a gradient where it came from.
            cut = [tensor.detach()[:, chunk.start : chunk.stop] for tensor in inputs]
            with node.group.during_work(), node.autocast():
                if chunk.swapped:
                    with saved_tensors.hooks():
                        outputs, edges = node.build(node.run, cut, chunk, ctx.needs_grad)
                    ends = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
                    node.graphs.append(_SwappedGraph(ends, edges))
                    outputs = tuple(tensor.detach() for tensor in outputs)
                else:
                    outputs = node.run(cut, chunk.start, chunk.stop)
                    node.graphs.append(None)
            after = RandomState.now(device, before)
            node.random_states.append(None if after is before else before)
            before = after
            whole = node.gather(whole, outputs, chunk, num_tokens)
            del outputs, cut
        return (*whole, inputs[0]) if node.passes_input else tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        node = ctx.node
        if not node.handles:
            raise RuntimeError(
                "Trying to backward through the graph of a memo_hf layer a second time; its activations were freed. "
                "Specify retain_graph=True in the first backward call."
            )
        if None in node.graphs:
            node.require_same_parameters()
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        node.before_backward()
        gradients, passed = (gradients[:-1], gradients[-1]) if node.passes_input else (gradients, None)
        inputs = [handle.get() for handle in node.handles]
        node.inputs_are_there()
        # Finish made `passed` for this node alone, so adding to it in place disturbs nobody.
        targets = [None] * len(inputs)
        for position, needed in enumerate(ctx.needs_grad):
            if needed:
                adds = position == 0 and passed is not None
                targets[position] = passed if adds else torch.zeros_like(inputs[position])
        sums = _ParameterGradients(node, ctx.needs_input_grad[2 + len(inputs) :])
        for index, chunk in enumerate(node.chunks):
            found = _chunk_gradients(node, index, inputs, ctx.needs_grad, gradients, keep_graph)
            for target, gradient in zip(targets, found[: len(inputs)], strict=True):
                if target is not None and gradient is not None:
                    target[:, chunk.start : chunk.stop].add_(gradient)
            sums.add(found[len(inputs) :])
            del found
        if not keep_graph:
            node.free()
        node.after_backward()
        return (None, None, *targets, *sums.result())


def _version(parameter: Tensor) -> int | None:
    """Of a trainable parameter. Frozen ones get a new one without a change where peft parametrizes them in forward."""
    return parameter._version if parameter.requires_grad and not parameter.is_inference() else None


def _chunk_gradients(node: Node, index: int, inputs, needs_grad, gradients, keep_graph: bool) -> list[Tensor | None]:
    """Gradients of one chunk: of the inputs' tokens, then of the parameters; None where there is none."""
    chunk, graph = node.chunks[index], node.graphs[index]
    if graph is None:
        cut = [tensor[:, chunk.start : chunk.stop] for tensor in inputs]
        counted = SavedBytes(inputs) if node.count_saved is not None and index == 0 else None
        hooks = contextlib.nullcontext() if counted is None else ChunkSaves(node, counted).hooks()
        run = node.run if counted is not None else node.rerun or node.run
        with drawing_from(node.random_states[index]), node.autocast(), hooks:
            tensors, edges = node.build(run, cut, chunk, needs_grad)
        if counted is not None:
            node.count_saved(chunk.stop - chunk.start, counted.num_bytes)
        outputs = [tensor if tensor.requires_grad else None for tensor in tensors]
        del tensors
    else:
        outputs, edges = graph.outputs, graph.edges
        if not keep_graph:
            node.graphs[index] = None
    used = [
        (output, gradient[:, chunk.start : chunk.stop])
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and gradient is not None
    ]
    wanted = [edge for edge in edges if edge is not None]
    if not used or not wanted:
        return [None] * len(edges)
    found = iter(
        torch.autograd.grad(
            [output for output, _ in used],
            wanted,
            [gradient for _, gradient in used],
            allow_unused=True,
            retain_graph=graph is not None and keep_graph,
        )
    )
    return [next(found) if edge is not None else None for edge in edges]


class _ParameterGradients:
    """Sums the chunks' parameter gradients, in fp32 where the parameter has fewer bits."""

    def __init__(self, node: Node, needed):
        self._parameters = [module._parameters[name] for module, name in node.parameters]
        self._needed = needed
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._num_added = [0] * len(self._parameters)

    def add(self, gradients):
        for index, gradient in enumerate(gradients):
            if gradient is None or not self._needed[index]:
                continue
            total = self._sums[index]
            if total is None:
                # Kept as it is: autograd may hand one tensor out for two parameters, so it is never added to in place.
                self._sums[index] = gradient
            elif self._num_added[index] == 1:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[index] = total.to(wide) + gradient
            else:
                total.add_(gradient)
            self._num_added[index] += 1

    def result(self):
        return [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(self._sums, self._parameters, strict=True)
        ]
