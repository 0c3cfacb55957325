"""The check that decides, on the layer itself, whether a decoder layer may run in token mode.

It runs one layer of each kind on a few random tokens: outside of attention output token t must depend on input token t
alone, attention must be called exactly once and be what the model's own attention computes, and the layer run in chunks
must equal the layer run whole. What fails says why. Called by the session when a model is enabled.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memo_hf.errors import MemoError, UnsupportedModelError
from memo_hf.layers.attention import attend_as_asked
from memo_hf.layers.call import LayerCall, map_tensors, tensors_in
from memo_hf.layers.locate import Stack
from memo_hf.layers.roles import (
    ATTENTION_NAME,
    AttentionReached,
    Project,
    Whole,
    attention_set_to,
    playing,
    substituted,
)
from memo_hf.layers.sequence_parallel import without_all_to_alls
from memo_hf.layers.token_mode import Recipe, TokenLayer
from memo_hf.layers.unread import can_be_unread
from memo_hf.layers.zero import full_shape, gathered

_BATCH, _TOKENS, _PERTURBED = 2, 13, 6
_CHUNKS = ((0, 5), (5, 6), (6, 13))
_OF_ZERO = ("ds_", "applied_pre_backward")  # What DeepSpeed numbers and counts on a module.
_MOVED = 1e-4  # Relative to the largest output, in fp32.


@dataclass(frozen=True, eq=False)
class Verdict:
    """Whether a layer runs in token mode (it has a recipe) or in layer mode, and why. Layers built alike share one."""

    recipe: Recipe | None
    reason: str


class _NotTokenwise(Exception):
    """The reason why a layer does not pass."""


def attention_configs(module: nn.Module) -> tuple:
    """The configurations from which `module` and what is in it choose their attention."""
    found = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    return tuple(config for config in found.values() if hasattr(config, "_attn_implementation_internal"))


@dataclass(frozen=True)
class StackVerdict:
    """What the check found out about a stack: a verdict for each layer, and the token-wise children after them."""

    layers: list[Verdict]
    after_layers: list[str]


def check_stack(stack: Stack) -> StackVerdict:
    """A verdict for each layer of `stack`; layers that are built alike are checked once.

    Runs the stack's own forward on random token ids, with the layers cut out, to see what it hands to them.
    Leaves the random state, training modes and settings as they were.
    """
    device = next(stack.module.parameters()).device
    if getattr(stack.module, "config", None) is None:
        raise UnsupportedModelError(
            f"{type(stack.module).__name__} holds decoder layers and has no config, from which memo_hf reads its "
            "attention. Train this model without memo_hf"
        )
    name = stack.module.config._attn_implementation
    if device.type == "cpu" and name not in ("sdpa", "eager"):
        name = "eager"  # The model will move; its own kernel does not run here.
    layers = [layer for _, layer in stack.layers]
    kinds = [_kind(layer) for layer in layers]
    needed = _parameters_needed(stack, layers, kinds)
    devices = [device] if device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        _evaluating(stack.module),
        without_all_to_alls(name),
        gathered(needed),
        torch.autocast(device.type, enabled=False),  # what is found must hold with it and without
    ):
        kept = [_tensor_attributes(layer) for layer in layers]
        try:
            own = _calls(stack, layers, kinds, name, {})
            after = _after_layers(stack, layers, own, name)
            ours = _calls(
                stack, layers, kinds, ATTENTION_NAME, {kind: call.wrap for kind, call in zip(kinds, own, strict=True)}
            )
        except Exception as error:  # Any model may refuse bare token ids in its own way; the reason is reported.
            return StackVerdict([Verdict(None, f"could not be tried on token ids ({_brief(error)})")] * len(layers), [])
        verdicts: dict = {}
        for layer, kind, own_call, our_call in zip(layers, kinds, own, ours, strict=True):
            if kind not in verdicts:
                verdicts[kind] = _check_layer(layer, own_call, our_call, name)
        for layer, kind, before in zip(layers, kinds, kept, strict=True):
            try:
                _require_nothing_kept(layer, before)
            except _NotTokenwise as error:
                verdicts[kind] = Verdict(None, str(error))
    return StackVerdict([verdicts[kind] for kind in kinds], after)


def _tensor_attributes(layer: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Tensors that modules hold beside parameters and buffers, by module and attribute."""
    return {
        (name, key): value
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _require_nothing_kept(layer: nn.Module, before: dict[tuple[str, str], Tensor]) -> None:
    """Raise `_NotTokenwise` where a forward of `layer` has left a tensor in a module."""
    for (name, key), tensor in _tensor_attributes(layer).items():
        if before.get((name, key)) is not tensor:
            where = f"{name}.{key}"
            raise _NotTokenwise(f"{where} keeps a tensor of its forward, which may be made a loss of")


@dataclass
class _Seen:
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


def _kind(layer: nn.Module) -> tuple:
    """Equal for layers that are built alike: module types, plain settings, parameter shapes, and patched forwards."""
    simple = (int, float, str, bool, type(None))

    def patched(module):
        forward = vars(module).get("forward")
        return getattr(forward, "__func__", forward)

    return tuple(
        (
            path,
            type(module),
            tuple(
                (key, item)
                for key, item in sorted(vars(module).items())
                if isinstance(item, simple)
                and key not in ("layer_idx", "training", "layer_index")
                and not key.startswith(_OF_ZERO)
            ),
            patched(module),
            tuple((name, full_shape(parameter)) for name, parameter in module.named_parameters(recurse=False)),
        )
        for path, module in layer.named_modules()
    )


def _parameters_needed(stack: Stack, layers: list[nn.Module], kinds: list) -> list[nn.Parameter]:
    """Those outside of the layers, and of one layer of each kind: only they run."""
    first = {kind: layer for kind, layer in reversed(list(zip(kinds, layers, strict=True)))}
    others = {parameter for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in stack.module.parameters() if parameter not in others]
    return outside + [parameter for layer in first.values() for parameter in layer.parameters()]


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {child: child.training for child in module.modules()}
    module.eval()
    for child in modes:
        # bitsandbytes repacks 4-bit weights for inference, in place and for good, when a CPU evaluates them.
        if any(not parameter.is_floating_point() for parameter in child.parameters(recurse=False)):
            child.training = True
    try:
        with torch.no_grad():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode


@contextlib.contextmanager
def _in_place_of(layers: list[nn.Module], forwards: list[Callable]) -> Iterator[None]:
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _run_on_token_ids(stack: Stack, attention_name: str) -> None:
    device = next(stack.module.parameters()).device
    # The same each time, since the arguments of the layers may depend on them.
    ids = torch.arange(3, 3 + _BATCH * _TOKENS, device=device).view(_BATCH, _TOKENS) % stack.module.config.vocab_size
    with attention_set_to(attention_name, attention_configs(stack.module)):
        stack.module(input_ids=ids, use_cache=False)


def _calls(stack: Stack, layers, kinds, name: str, wraps: dict) -> list[_Seen]:
    """Run the stack on token ids under attention `name` and note what each layer is given."""
    seen: dict[int, _Seen] = {}

    def recorder(index, forward):
        def record(*args, **kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if kinds[index] not in wraps:
                wraps[kinds[index]] = _wrapping(forward(*args, **kwargs))
            wrap = wraps[kinds[index]]
            seen[index] = _Seen(args, kwargs, wrap)
            return wrap(hidden)

        return record

    with _in_place_of(layers, [recorder(index, layer.forward) for index, layer in enumerate(layers)]):
        _run_on_token_ids(stack, name)
    if len(seen) != len(layers):
        raise RuntimeError(f"the model called {len(seen)} of its {len(layers)} layers")
    return [seen[index] for index in range(len(layers))]


def _after_layers(stack: Stack, layers, calls: list[_Seen], name: str) -> list[str]:
    """Children of the stack that take the last layer's output alone and work per token: the final norm."""
    reached, found = [], []

    def passing(call):
        def forward(*args, **kwargs):
            reached.append(call)
            return call.wrap(args[0] if args else kwargs["hidden_states"])

        return forward

    def note(child_name):
        def hook(module, args, output):
            alone = len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape[:2] == (_BATCH, _TOKENS)
            if len(reached) == len(layers) and alone and isinstance(output, Tensor) and output.shape == args[0].shape:
                moved = args[0].clone()
                moved[:, _PERTURBED] += torch.randn_like(moved[:, _PERTURBED])
                differs = (module.forward(moved) != output).flatten(2).any(-1).any(0)
                if differs.nonzero().flatten().tolist() == [_PERTURBED]:
                    found.append(child_name)

        return hook

    hooks = [child.register_forward_hook(note(child_name)) for child_name, child in stack.module.named_children()]
    try:
        with _in_place_of(layers, [passing(call) for call in calls]):
            _run_on_token_ids(stack, name)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _wrapping(output) -> Callable[[Tensor], object]:
    if isinstance(output, tuple):
        rest = output[1:]
        return lambda hidden: (hidden, *rest)
    return lambda hidden: hidden


def _check_layer(layer: nn.Module, own: _Seen, ours: _Seen, name: str) -> Verdict:
    """Try one layer, in fp32 on a copy where its weights have fewer bits, since rounding would hide what moves."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        return Verdict(None, "its weights are not loaded yet; enable memo_hf after loading them")
    floating = [parameter for parameter in layer.parameters() if parameter.is_floating_point()]
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in floating):
        with contextlib.suppress(Exception):  # A layer that cannot be copied or widened is tried as it is.
            layer = copy.deepcopy(layer).float()
    try:
        return Verdict(_Trial(layer, own, ours, name).recipe(), "passed the check")
    except _NotTokenwise as reason:
        return Verdict(None, str(reason))
    except MemoError as error:
        return Verdict(None, str(error))
    except Exception as error:  # Unknown layer code, in a role that it was not written for: the reason is reported.
        return Verdict(None, f"could not be run per token ({_brief(error)})")


class _Trial:
    """One layer under test on random tokens."""

    def __init__(self, layer: nn.Module, own: _Seen, ours: _Seen, name: str):
        self.layer, self.forward = layer, layer.forward
        self.own, self.ours, self.name = own, ours, name
        self.configs = attention_configs(layer)
        given = own.args[0] if own.args else own.kwargs["hidden_states"]
        floating = [p.dtype for p in layer.parameters() if p.is_floating_point()]
        self.dtype = floating[0] if floating else given.dtype
        # Small, so that what the layer adds is not lost beside what it passes on.
        if given.dim() != 3:
            raise _NotTokenwise(f"its input has {given.dim()} dimensions, not (batch, tokens, hidden)")
        self.hidden = (0.05 * torch.randn(given.shape, device=given.device)).to(self.dtype)

    def recipe(self) -> Recipe:
        """What token mode needs to know about the layer. Raises `_NotTokenwise` with the reason."""
        whole = self._whole()
        self._same(whole, self._stock(), "its attention is not what memo_hf computes for it")
        recipe = self._observe(whole)
        runner = TokenLayer(self.layer, self.forward, self.configs, recipe)
        parts = self._project(runner, self.hidden)
        if any(part.dim() != 4 or part.shape[1] != _TOKENS for part in parts):
            raise _NotTokenwise("its queries, keys and values are not (batch, heads, tokens, head_dim)")
        moved = self.hidden.clone()
        moved[:, _PERTURBED] += 0.05 * torch.randn_like(moved[:, _PERTURBED])
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
                moved_output = self._finish(runner, moved, attended, 0, _TOKENS)
                self._others_unmoved(chunked, moved_output, "the output after attention")
                return replace(candidate, unread=self._unread(candidate, attended))
            except Exception:
                if candidate.meta_rope:
                    continue  # Something else reads what the stubs replace: try with fewer.
                raise
        raise AssertionError("unreachable: the last candidate returns or raises")

    def _call(self, seen: _Seen, hidden: Tensor | None = None) -> LayerCall:
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
            raise _NotTokenwise(f"it calls transformers' attention interface {role.num_calls} times, not once")
        if not torch.equal(before, self.hidden):
            raise _NotTokenwise("it writes to its own input")
        if not _same_objects(_contents(kwargs), contents):
            raise _NotTokenwise("it shares state with other layers through an argument that it changes")
        if isinstance(output, tuple) and tensors_in(output[1:]):
            raise _NotTokenwise("it returns tensors beside its output")
        return output

    def _attend_as_whole(self, module, query, key, value, **arguments):
        if query.shape[2] != key.shape[2]:
            raise _NotTokenwise("it attends to keys that are not its own")
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
            raise _NotTokenwise(f"its attention reads {odd}, which the layer computes")
        around = tuple(dict.fromkeys(running))
        outermost = [(path, width) for path, width in done if path.rpartition(".")[0] in around and path not in around]
        return Recipe(
            stubs=tuple(dict((path, width) for path, width in outermost if width is not None).items()),
            meta_rope=True,
            projecting=tuple(dict.fromkeys(path for path, _ in outermost)),
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
        owners = [
            (module, name)
            for module in self.layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        stand_ins = [module._parameters[name].detach().requires_grad_() for module, name in owners]
        with substituted(owners, stand_ins):
            output = runner.finish_again(self._call(self.ours, inputs[0]), *inputs, 0, _TOKENS, fill=float("nan"))
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
            raise _NotTokenwise(f"{complaint} (shape {tuple(ours.shape)} on {ours.device})")
        difference = (ours - theirs).abs().max().item()
        if not difference <= _MOVED * theirs.abs().max().item():
            raise _NotTokenwise(f"{complaint} (difference {difference:.2g} of {theirs.abs().max().item():.2g})")

    def _others_unmoved(self, before: Tensor, after: Tensor, what: str) -> None:
        moved = (before - after).abs()
        moved[:, _PERTURBED] = 0
        if not moved.max().item() <= _MOVED * before.abs().max().item():
            token = moved.flatten(2).amax((0, 2)).argmax().item()
            raise _NotTokenwise(f"{what} of token {token} depend on the layer input of token {_PERTURBED}")


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
