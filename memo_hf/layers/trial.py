"""One decoder layer, tried on a few random tokens: what token mode needs to know about it, or why it may not run so.

Outside of attention output token t must depend on input token t alone, attention must be called exactly once and be
what the model's own attention computes, and the layer run in chunks must equal the layer run whole. Used by `check`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memo_hf.layers.attention import attend_as_asked
from memo_hf.layers.call import LayerCall, map_tensors, tensors_in
from memo_hf.layers.roles import (
    AttentionReached,
    Project,
    Whole,
    attention_set_to,
    playing,
    substituted,
)
from memo_hf.layers.token_mode import Recipe, TokenLayer
from memo_hf.layers.unread import can_be_unread

BATCH, TOKENS, PERTURBED = 2, 13, 6  # and the token that is moved
_CHUNKS = ((0, 5), (5, 6), (6, 13))
_MOVED = 1e-4  # Relative to the largest output, in fp32.


class NotTokenwise(Exception):
    """The reason why a layer does not pass."""


def attention_configs(module: nn.Module) -> tuple:
    """The configurations from which `module` and what is in it choose their attention."""
    found = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    return tuple(config for config in found.values() if hasattr(config, "_attn_implementation_internal"))


@dataclass
class Seen:
    """What the stack handed to one layer, and how the layer wraps its output."""

    args: tuple
    kwargs: dict
    wrap: Callable[[Tensor], object]

    def call(self, hidden: Tensor, dtype: torch.dtype) -> LayerCall:
        def fit(tensor):
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = map_tensors(fit, self.args), map_tensors(fit, self.kwargs)
        if args:
            return LayerCall((hidden, *args[1:]), kwargs)
        return LayerCall((), {**kwargs, "hidden_states": hidden})


class Trial:
    """One layer under test on random tokens."""

    def __init__(self, layer: nn.Module, own: Seen, ours: Seen, name: str):
        self.layer, self.forward = layer, layer.forward
        self.own, self.ours, self.name = own, ours, name
        self.configs = attention_configs(layer)
        given = own.args[0] if own.args else own.kwargs["hidden_states"]
        floating = [p.dtype for p in layer.parameters() if p.is_floating_point()]
        self.dtype = floating[0] if floating else given.dtype
        # Small, so that what the layer adds is not lost beside what it passes on.
        if given.dim() != 3:
            raise NotTokenwise(f"its input has {given.dim()} dimensions, not (batch, tokens, hidden)")
        self.hidden = (0.05 * torch.randn(given.shape, device=given.device)).to(self.dtype)

    def recipe(self) -> Recipe:
        """What token mode needs to know about the layer. Raises `NotTokenwise` with the reason."""
        whole = self._whole()
        self._same(whole, self._stock(), "its attention is not what memo_hf computes for it")
        recipe = self._observe(whole)
        runner = TokenLayer(self.layer, self.forward, self.configs, recipe)
        recipe = replace(recipe, projecting=self._projecting(runner))
        parts = self._project(runner, self.hidden)
        if any(part.dim() != 4 or part.shape[1] != TOKENS for part in parts):
            raise NotTokenwise("its queries, keys and values are not (batch, heads, tokens, head_dim)")
        moved = self.hidden.clone()
        moved[:, PERTURBED] += 0.05 * torch.randn_like(moved[:, PERTURBED])
        for part, moved_part in zip(parts, self._project(runner, moved), strict=True):
            self._others_unmoved(part, moved_part, "queries, keys and values")
        attended = self._attend(parts)
        widths = dict(qkv_width=sum(part[0, 0].numel() for part in parts), attended_width=attended[0, 0].numel())
        recipe = replace(recipe, **widths)
        for candidate in self._candidates(recipe):
            runner = TokenLayer(self.layer, self.forward, self.configs, candidate)
            try:
                chunked = torch.cat([self._finish(runner, self.hidden, attended, *chunk) for chunk in _CHUNKS], 1)
                self._same(chunked, _output(whole), "run in chunks it does not equal itself run whole")
                moved_output = self._finish(runner, moved, attended, 0, TOKENS)
                self._others_unmoved(chunked, moved_output, "the output after attention")
                return replace(candidate, unread=self._unread(candidate, attended))
            except Exception:
                if candidate.meta_rope:
                    continue  # Something else reads what the stubs replace: try with fewer.
                raise
        raise AssertionError("unreachable: the last candidate returns or raises")

    def _call(self, seen: Seen, hidden: Tensor | None = None) -> LayerCall:
        return seen.call(self.hidden if hidden is None else hidden, self.dtype)

    def _stock(self):
        args, kwargs = self._call(self.own).whole(self.hidden)
        with attention_set_to(self.name, self.configs):
            return self.forward(*args, **kwargs)

    def _whole(self):
        call, before = self._call(self.ours), self.hidden.clone()
        args, kwargs = call.whole(self.hidden)
        contents = _contents(kwargs)
        role = Whole(self._attend_as_whole)
        try:
            with playing(role, self.configs):
                output = self.forward(*args, **kwargs)
        except Exception:
            if role.num_calls:
                raise
        if role.num_calls != 1:
            raise NotTokenwise(f"it calls transformers' attention interface {role.num_calls} times, not once")
        if not torch.equal(before, self.hidden):
            raise NotTokenwise("it writes to its own input")
        if not _same_objects(_contents(kwargs), contents):
            raise NotTokenwise("it shares state with other layers through an argument that it changes")
        if isinstance(output, tuple) and tensors_in(output[1:]):
            raise NotTokenwise("it returns tensors beside its output")
        return output

    def _attend_as_whole(self, module, query, key, value, **arguments):
        if query.shape[2] != key.shape[2]:
            raise NotTokenwise("it attends to keys that are not its own")
        return attend_as_asked(module, query, key, value, implementation=self.name, documents=None, **arguments)

    def _observe(self, whole) -> Recipe:
        """Which modules have run, and which are running, when attention is called."""
        running, done = [], []
        paths = {module: path for path, module in self.layer.named_modules()}
        hooks = []
        for module, path in paths.items():

            def enter(module, args, path=path):
                running.append(path)

            def leave(module, args, output, path=path):
                # A module that failed to leave is the attention itself; everything else leaves in order.
                running.remove(path)
                width = output.shape[-1] if isinstance(output, Tensor) and output.dim() else None
                given = args[0] if args and isinstance(args[0], Tensor) else None
                fits = width is not None and given is not None and given.shape[:-1] == output.shape[:-1]
                done.append((path, width if fits else None))

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        role = Project()
        try:
            args, kwargs = self._call(self.ours).whole(self.hidden)
            with playing(role, self.configs):
                try:
                    self.layer(*args, **kwargs)
                except AttentionReached:
                    pass
        finally:
            for hook in hooks:
                hook.remove()
        odd = [
            name
            for name, item in role.attention_arguments.items()
            if isinstance(item, Tensor) and not self._is_given(item)
        ]
        if odd:
            raise NotTokenwise(f"its attention reads {odd}, which the layer computes")
        around = tuple(dict.fromkeys(running))
        # Of a module whose methods are called, and not itself, or of a list, all that is in it may feed attention.
        projecting = (_child_of(around, path) for path, _ in done if path not in around)
        outermost = [(path, width) for path, width in done if path.rpartition(".")[0] in around and path not in around]
        return Recipe(
            stubs=tuple(dict((path, width) for path, width in outermost if width is not None).items()),
            meta_rope=True,
            projecting=tuple(dict.fromkeys(projecting)),
            around=around,
            returns_tuple=isinstance(whole, tuple),
            qkv_width=0,  # Not seen yet, nor is the next.
            attended_width=0,
        )

    def _is_given(self, item: Tensor) -> bool:
        """Whether the layer passes on an argument or a parameter of its own, rather than something that it made."""
        known = tensors_in([self.ours.args, self.ours.kwargs]) + list(self.layer.parameters())
        return any(item is tensor or item.shape == tensor.shape and torch.equal(item, tensor) for tensor in known)

    @staticmethod
    def _candidates(recipe: Recipe) -> Iterator[Recipe]:
        yield recipe
        inner = tuple(stub for stub in recipe.stubs if "." in stub[0])
        if inner != recipe.stubs:
            yield replace(recipe, stubs=inner)
        yield replace(recipe, stubs=(), meta_rope=False)

    def _project(self, runner: TokenLayer, hidden: Tensor) -> list[Tensor]:
        call = self._call(self.ours, hidden)
        cut = [runner.project(call, hidden[:, start:stop], start, stop, {}) for start, stop in _CHUNKS]
        return [torch.cat(parts, 1) for parts in zip(*cut, strict=True)]

    def _projecting(self, runner: TokenLayer) -> tuple[str, ...]:
        """What runs before attention, and what has a parameter that queries, keys and values are made with: a layer may
        take the weight of a module that it does not call."""
        paths, owners, stand_ins = self._trainable()
        with torch.enable_grad(), substituted(owners, stand_ins):
            parts = runner.project(self._call(self.ours), self.hidden, 0, TOKENS, {})
        used = _leaves(parts, stand_ins)
        feeding = [path for path, stand_in in zip(paths, stand_ins, strict=True) if stand_in in used]
        around, known = runner.recipe.around, runner.recipe.projecting
        return tuple(dict.fromkeys([*known, *(_child_of(around, path) for path in feeding if path not in around)]))

    def _trainable(self) -> tuple[list[str], list[tuple[nn.Module, str]], list[Tensor]]:
        """For each parameter that may be trained: its module's path, (module, name), and a stand-in to train."""
        found = [
            (path, (module, name), parameter.detach().requires_grad_())
            for path, module in self.layer.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        return [list(column) for column in zip(*found, strict=True)] or ([], [], [])

    def _finish(self, runner: TokenLayer, hidden: Tensor, attended: Tensor, start: int, stop: int) -> Tensor:
        call = self._call(self.ours, hidden)
        return runner.finish(call, hidden[:, start:stop], attended[:, start:stop], start, stop, {})

    def _unread(self, recipe: Recipe, attended: Tensor) -> tuple[str, ...]:
        """Linear modules whose output may be anything in a recompute: with NaN there, gradients stay what they are."""
        with torch.enable_grad():
            try:
                expected = self._gradients(recipe, attended)
            except RuntimeError:  # Its own backward fails, as the user's first step is to say.
                return ()
            linear = [path for path, module in self.layer.named_modules() if can_be_unread(module)]
            return tuple(
                path
                for path in linear
                if not any(path == stub or path.startswith(f"{stub}.") for stub in recipe.projecting)
                and all(map(torch.equal, self._gradients(replace(recipe, unread=(path,)), attended), expected))
            )

    def _gradients(self, recipe: Recipe, attended: Tensor) -> list[Tensor]:
        """Of layer input, attention output and parameters. Hooks on the parameters themselves see nothing of it."""
        runner = TokenLayer(self.layer, self.forward, self.configs, recipe)
        inputs = [tensor.detach().requires_grad_() for tensor in (self.hidden, attended)]
        _, owners, stand_ins = self._trainable()
        with substituted(owners, stand_ins):
            output = runner.finish_again(self._call(self.ours, inputs[0]), *inputs, 0, TOKENS, fill=float("nan"))
        _leaves([output], [*inputs, *stand_ins])
        found = torch.autograd.grad(output, [*inputs, *stand_ins], torch.ones_like(output), allow_unused=True)
        return [torch.zeros((), device=output.device) if gradient is None else gradient for gradient in found]

    def _attend(self, parts: list[Tensor]) -> Tensor:
        role = Project()
        args, kwargs = self._call(self.ours).whole(self.hidden)
        with playing(role, self.configs), contextlib.suppress(AttentionReached):
            self.forward(*args, **kwargs)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return self._attend_as_whole(role.module, query, key, value, **role.attention_arguments)

    def _same(self, ours, theirs, complaint: str) -> None:
        ours, theirs = _output(ours), _output(theirs)
        if ours.is_meta or ours.shape != theirs.shape:
            raise NotTokenwise(f"{complaint} (shape {tuple(ours.shape)} on {ours.device})")
        difference = (ours - theirs).abs().max().item()
        if not difference <= _MOVED * theirs.abs().max().item():
            raise NotTokenwise(f"{complaint} (difference {difference:.2g} of {theirs.abs().max().item():.2g})")

    def _others_unmoved(self, before: Tensor, after: Tensor, what: str) -> None:
        moved = (before - after).abs()
        moved[:, PERTURBED] = 0
        if not moved.max().item() <= _MOVED * before.abs().max().item():
            token = moved.flatten(2).amax((0, 2)).argmax().item()
            raise NotTokenwise(f"{what} of token {token} depend on the layer input of token {PERTURBED}")


def _child_of(around: tuple[str, ...], path: str) -> str:
    """The module at `path`, or what holds it, whose own holder is among `around`."""
    while path and path.rpartition(".")[0] not in around:
        path = path.rpartition(".")[0]
    return path


def _leaves(outputs: list[Tensor], known: list[Tensor]) -> set[Tensor]:
    """The tensors of `known` that `outputs` are made with. Raises `NotTokenwise` where they need others trained."""
    found, seen, ahead = set(), set(), [output.grad_fn for output in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
        if hasattr(node, "variable"):
            found.add(node.variable)
    if strangers := found - set(known):
        shapes = [tuple(tensor.shape) for tensor in strangers]
        raise NotTokenwise(f"it computes with parameters that it does not hold, of shapes {shapes}")
    return found


def _output(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _contents(value) -> list:
    """What the dictionaries, lists and plain objects in the arguments hold, and the versions of tensors."""
    if isinstance(value, Tensor):
        return [value, value._version]
    if isinstance(value, dict):
        return [value, *(part for item in value.values() for part in _contents(item))]
    if isinstance(value, list | tuple):
        return [value, *(part for item in value for part in _contents(item))]
    return [value, *vars(value).values()] if hasattr(value, "__dict__") else [value]


def _same_objects(some: list, others: list) -> bool:
    if len(some) != len(others):
        return False
    return all(a is b or type(a) is int and a == b for a, b in zip(some, others, strict=True))
