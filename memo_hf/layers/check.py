"""The check that decides, on the layer itself, whether a decoder layer may run in token mode.

It runs the stack on a few token ids to see what it hands to its layers, and tries one layer of each kind (`trial`).
What fails says why. Called by the session when a model is enabled.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memo_hf.errors import MemoError
from memo_hf.layers.locate import Stack
from memo_hf.layers.roles import (
    ATTENTION_NAME,
    attention_set_to,
)
from memo_hf.layers.sequence_parallel import without_all_to_alls
from memo_hf.layers.token_mode import Recipe
from memo_hf.layers.trial import BATCH, PERTURBED, TOKENS, NotTokenwise, Seen, Trial, attention_configs
from memo_hf.layers.zero import full_shape, gathered

_OF_ZERO = ("ds_", "applied_pre_backward")  # What DeepSpeed numbers and counts on a module.


@dataclass(frozen=True, eq=False)
class Verdict:
    """Whether a layer runs in token mode (it has a recipe) or in layer mode, and why. Layers built alike share one."""

    recipe: Recipe | None
    reason: str


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
            except NotTokenwise as error:
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
    """Raise `NotTokenwise` where a forward of `layer` has left a tensor in a module."""
    for (name, key), tensor in _tensor_attributes(layer).items():
        if before.get((name, key)) is not tensor:
            where = f"{name}.{key}"
            raise NotTokenwise(f"{where} keeps a tensor of its forward, which may be made a loss of")


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
    ids = torch.arange(3, 3 + BATCH * TOKENS, device=device).view(BATCH, TOKENS) % stack.module.config.vocab_size
    with attention_set_to(attention_name, attention_configs(stack.module)):
        stack.module(input_ids=ids, use_cache=False)


def _calls(stack: Stack, layers, kinds, name: str, wraps: dict) -> list[Seen]:
    """Run the stack on token ids under attention `name` and note what each layer is given."""
    seen: dict[int, Seen] = {}

    def recorder(index, forward):
        def record(*args, **kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if kinds[index] not in wraps:
                wraps[kinds[index]] = _wrapping(forward(*args, **kwargs))
            wrap = wraps[kinds[index]]
            seen[index] = Seen(args, kwargs, wrap)
            return wrap(hidden)

        return record

    with _in_place_of(layers, [recorder(index, layer.forward) for index, layer in enumerate(layers)]):
        _run_on_token_ids(stack, name)
    if len(seen) != len(layers):
        raise RuntimeError(f"the model called {len(seen)} of its {len(layers)} layers")
    return [seen[index] for index in range(len(layers))]


def _after_layers(stack: Stack, layers, calls: list[Seen], name: str) -> list[str]:
    """Children of the stack that take the last layer's output alone and work per token: the final norm."""
    reached, found = [], []

    def passing(call):
        def forward(*args, **kwargs):
            reached.append(call)
            return call.wrap(args[0] if args else kwargs["hidden_states"])

        return forward

    def note(child_name):
        def hook(module, args, output):
            alone = len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape[:2] == (BATCH, TOKENS)
            if len(reached) == len(layers) and alone and isinstance(output, Tensor) and output.shape == args[0].shape:
                moved = args[0].clone()
                moved[:, PERTURBED] += torch.randn_like(moved[:, PERTURBED])
                differs = (module.forward(moved) != output).flatten(2).any(-1).any(0)
                if differs.nonzero().flatten().tolist() == [PERTURBED]:
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


def _check_layer(layer: nn.Module, own: Seen, ours: Seen, name: str) -> Verdict:
    """Try one layer, in fp32 on a copy where its weights have fewer bits, since rounding would hide what moves."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        return Verdict(None, "its weights are not loaded yet; enable memo_hf after loading them")
    floating = [parameter for parameter in layer.parameters() if parameter.is_floating_point()]
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in floating):
        with contextlib.suppress(Exception):  # A layer that cannot be copied or widened is tried as it is.
            layer = copy.deepcopy(layer).float()
    try:
        return Verdict(Trial(layer, own, ours, name).recipe(), "passed the check")
    except NotTokenwise as reason:
        return Verdict(None, str(reason))
    except MemoError as error:
        return Verdict(None, str(error))
    except Exception as error:  # Unknown layer code, in a role that it was not written for: the reason is reported.
        return Verdict(None, f"could not be run per token ({_brief(error)})")
