"""What runs in place of a stack's and its layers' own forward: it decides for each forward pass whether and how.

Made by the session, which it tells what happens. Knows no optimizer, no Trainer and no backward pass.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref

import torch
import torch.distributed as dist
from torch import nn
from transformers import Cache

from memo_hf.errors import ConfigError, HostMemoryError, UnsupportedModelError
from memo_hf.layers.call import LayerCall
from memo_hf.layers.check import Verdict
from memo_hf.layers.documents import Documents, find_documents
from memo_hf.layers.layer_mode import WholeLayer
from memo_hf.layers.locate import Stack, layers_of
from memo_hf.layers.refusals import refuse_compilation, refuse_what_cannot_be, warn_of_hooks
from memo_hf.layers.roles import ATTENTION_NAME, attention_set_to
from memo_hf.layers.sequence_parallel import SequenceGroup, sequence_group
from memo_hf.layers.step import Step, StepSettings
from memo_hf.layers.token_mode import TokenLayer
from memo_hf.layers.token_module import TokenModule
from memo_hf.layers.trial import attention_configs
from memo_hf.layers.zero import refuse_no_leaf
from memo_hf.planner.chunks import default_chunk_tokens
from memo_hf.planner.plan import Shape
from memo_hf.planning import Planner

logger = logging.getLogger("memo_hf")
enabled_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class PatchedStack:
    """The forward of a stack and of its layers while memo_hf is enabled.

    Args:
        session: whose configuration, swap engine and figures these are.
        stack: the stack.
        verdicts: of the check, one for each layer.
        planner: decides how each forward pass runs.
    """

    def __init__(self, session, stack: Stack, verdicts: list[Verdict], planner: Planner):
        self._session, self._stack, self._planner = session, stack, planner
        self._own_forward = stack.module.forward
        self._configs = attention_configs(stack.module)
        self._takes_use_cache = "use_cache" in inspect.signature(stack.module.forward).parameters
        self._running = threading.local()
        self._has_warned_of_hooks = self._has_warned_of_cache = False
        self._given_up: set[int] = set()  # layers that pass the check here, and run whole as on another rank
        self._sequence: SequenceGroup | None = None
        self.kinds = verdicts  # Layers built alike share theirs.
        self.attends = any(verdict.recipe is not None for verdict in verdicts)

    @property
    def name(self) -> str:
        """The path of the stack in the model."""
        return self._stack.name

    def run_whole(self, names: set[str]) -> None:
        """From now on the layers of these names run in layer mode."""
        self._given_up.update(index for index, (name, _) in enumerate(self._stack.layers) if name in names)
        layers = range(len(self.kinds))
        self.attends &= any(self.kinds[index].recipe is not None for index in layers if index not in self._given_up)

    def forward(self, *args, **kwargs):
        """The stack's own forward, with memo_hf's attention in force and a step for its layers, where memo_hf runs."""
        module = self._stack.module
        if not (module.training and torch.is_grad_enabled()):
            self._session.serving.end_step()
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
                self._session.note_evaluation()
            return self._own_forward(*args, **kwargs)
        given = kwargs.get("inputs_embeds")
        if given is None:
            given = kwargs.get("input_ids")
        if given is None and args:
            given = args[0]
        if given is None or given.dim() < 2:
            return self._own_forward(*args, **kwargs)
        session = self._session
        if torch.compiler.is_compiling():
            refuse_compilation()
        refuse_what_cannot_be(module)
        self._refuse_other_layers()
        if self.attends and not self._has_warned_of_hooks:
            self._has_warned_of_hooks = any(warn_of_hooks(layer, name) for name, layer in self._stack.layers)
        self._find_sequence()
        session.begin_pass(self._stack, given.device)
        if given.shape[:2].numel() < session.config.effective_min_tokens or given.shape[1] < 2:
            session.skip_forward(given.shape[:2].numel())
            return self._own_forward(*args, **kwargs)
        return self._forward(given, args, self._without_cache(args, kwargs))

    def _forward(self, given: torch.Tensor, args: tuple, kwargs: dict):
        """One forward pass that memo_hf runs on `given`, once more where it has to be run in another way."""
        module, (batch_size, num_tokens) = self._stack.module, given.shape[:2]
        if self.attends and (reason := _why_not_per_token(module, kwargs)):
            self._fall_back(reason)
        step = self._step(batch_size, num_tokens, given.device, kwargs)
        try:
            return self._run(step, args, kwargs)
        except HostMemoryError:
            if step.last is not None or not self._planner.retreat():
                raise
            return self._forward(given, args, kwargs)
        except UnsupportedModelError as error:
            if not self.attends or step.last is not None:
                raise
            # No layer has ended yet: the mask is one that token mode has no kernel for, or the layers are given more
            # than in the check.
            self._fall_back(str(error))
            return self._run(self._step(batch_size, num_tokens, given.device, kwargs), args, kwargs)

    def _without_cache(self, args, kwargs: dict) -> dict:
        """A training forward has no use for a cache, and a recompute must not extend one."""
        for given in (*args, *kwargs.values()):
            if isinstance(given, Cache) and _num_cached(given):
                raise UnsupportedModelError(
                    f"{type(self._stack.module).__name__} is given a cache that holds {_num_cached(given)} tokens "
                    "(prefix tuning?); under memo_hf a token attends to tokens of its own batch only. Train this "
                    "model without memo_hf"
                )
        if kwargs.get("use_cache") and not self._has_warned_of_cache:
            self._has_warned_of_cache = True
            logger.warning(
                "memo_hf: use_cache=True is ignored in a training forward pass, which returns no cache; a token "
                "attends to tokens of its own batch only"
            )
        return {**kwargs, "use_cache": False} if self._takes_use_cache else kwargs

    def _fall_back(self, reason: str) -> None:
        if self._sequence is not None:
            # In layer mode the engine's own attention would run, which drops masks.
            raise UnsupportedModelError(
                f"{reason}. Under sequence parallelism memo_hf does not fall back to layer mode"
            )
        logger.warning(f"memo_hf: all layers of {self._stack.name or 'the model'} fall back to layer mode: {reason}")
        self.attends = False
        self._session.fall_back(self._stack, reason)

    def _run(self, step: Step, args, kwargs):
        before = getattr(self._running, "step", None)
        self._running.step = step
        try:
            with attention_set_to(ATTENTION_NAME, self._configs if self.attends else ()):
                output = self._own_forward(*args, **kwargs)
        finally:
            self._running.step = before
        self._session.end_forward(self._stack, step)
        return output

    def _refuse_other_layers(self) -> None:
        """Raise where a layer came after memo_hf was enabled: only memo_hf's attention would reach it."""
        for name, layer in layers_of(self._stack.module, self._stack.name):
            if layer not in enabled_layers:
                raise UnsupportedModelError(
                    f"{name} was put there after memo_hf was enabled; call memo_hf.disable(model) and enable it again"
                )
            refuse_no_leaf(name, layer)

    def _step(self, batch_size: int, num_tokens: int, device: torch.device, kwargs: dict) -> Step:
        session, config = self._session, self._session.config
        engine = session.engine(device)
        chunk_size = config.chunk_size or default_chunk_tokens(batch_size * num_tokens, device.type)
        chunk_tokens = min(max(1, chunk_size // batch_size), num_tokens)
        session.begin_forward(self._stack, engine, chunk_tokens * batch_size, (batch_size, num_tokens))
        implementation = self._stack.module.config._attn_implementation
        choice = self._planner.choose(engine, Shape(batch_size, num_tokens), session.host_budget_bytes)
        session.decided(self._planner, (batch_size, num_tokens))
        return Step(
            engine=engine,
            settings=StepSettings(choice.swap_fraction, chunk_tokens, choice.rebuild_qkv),
            implementation=implementation,
            documents=self._documents(batch_size, num_tokens, device, kwargs) if self.attends else None,
            first_kept=choice.first_kept,
            kinds=self.kinds,
            require_host=session.require_host,
            sequence=self._sequence,
            whole_layers=choice.whole_layers | self._given_up,
            observer=choice.observer,
            watchers=(*([choice.observer.mark] if choice.observer else []), session.serving.layer_comes_to),
        )

    def _find_sequence(self) -> None:
        """Find the ranks that share a sequence: at each forward pass, since engines are set up after `enable`."""
        self._sequence = sequence_group(self._stack.module.config._attn_implementation) if self.attends else None
        if self._sequence is None:
            return
        if self._session.config.qkv == "rebuild":
            raise ConfigError(
                "MemoConfig(qkv='rebuild') under sequence parallelism would send queries, keys and values through "
                "all-to-alls again in backward. Leave qkv at None, or set 'swap'"
            )
        self._planner.sequence_parallel = self._sequence.size
        self._session.train_with(range(dist.get_world_size()))  # the engine may leave no mark on the model

    def _documents(self, batch_size: int, num_tokens: int, device: torch.device, kwargs: dict) -> Documents | None:
        if not self._session.has_values:
            return None
        sequence = self._sequence
        mask, positions, bounds = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
        if sequence is not None:
            if positions is None or bounds is not None:
                raise UnsupportedModelError(
                    "under sequence parallelism each rank needs the position_ids of its tokens, which also say where "
                    "packed documents start. Pass position_ids, and no cu_seq_lens_q"
                )
            mask, positions = sequence.all_tokens(batch_size, num_tokens, device, mask, positions)
            num_tokens *= sequence.size
        return find_documents(
            batch_size,
            num_tokens,
            attention_mask=mask,
            position_ids=positions,
            cu_seqlens=bounds,
            implementation=self._stack.module.config._attn_implementation,
            device=device,
        )

    def layer_forward(self, index: int, name: str, layer: nn.Module, verdict: Verdict):
        """The forward of one layer: in its mode within a step, its own outside of one."""
        own_forward, configs = layer.forward, attention_configs(layer)
        per_token = verdict.recipe and TokenLayer(layer, own_forward, configs, verdict.recipe)
        # Beside layers in token mode the masks are memo_hf's, which only its own attention reads.
        among_others, alone = WholeLayer(layer, own_forward, configs), WholeLayer(layer, own_forward, ())

        def forward(*args, **kwargs):
            step = getattr(self._running, "step", None)
            if step is None:
                return own_forward(*args, **kwargs)
            chosen = among_others if index in step.whole_layers else per_token or among_others
            runner = chosen if self.attends else alone
            return runner(LayerCall(args, kwargs), step, index, name)

        return forward

    def module_forward(self, module: nn.Module):
        """The forward of a token-wise module after the layers."""
        own_forward = module.forward
        runner = TokenModule(module, own_forward)

        def forward(hidden):
            step = getattr(self._running, "step", None)
            if step is None or not self.attends or not hidden.requires_grad:
                return own_forward(hidden)
            return runner(hidden, step)

        return forward


def _num_cached(cache: Cache) -> int:
    try:
        return cache.get_seq_length()
    except ValueError:  # It has no attention layers, and recurrent ones do not count tokens.
        return 0


def _why_not_per_token(stack: nn.Module, kwargs: dict) -> str | None:
    """Why this forward pass of a stack cannot run its layers per token, though they passed the check."""
    recordable = set(getattr(stack, "_can_record_outputs", None) or ()) | {"attentions", "router_logits"}
    for name in sorted(f"output_{key}" for key in recordable - {"hidden_states"}):
        asked = kwargs.get(name)
        if getattr(stack.config, name, False) if asked is None else asked:
            return f"{name} asks for tensors from inside of the layers, which token mode does not make whole"
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or isinstance(mask, torch.Tensor) and mask.dim() > 2:
        return "its attention mask comes ready made, for every pair of tokens"
    return None
