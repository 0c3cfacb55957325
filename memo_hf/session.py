"""A session: memo_hf on one model, from `enable` to `disable`.

It alone knows all parts: it checks the layers, has their `forward` patched, owns the swap engine and the figures, and
puts everything back.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from memo_hf.allocator.peak_watch import PeakWatch
from memo_hf.config import MemoConfig
from memo_hf.errors import HostMemoryError, MemoError, UnsupportedModelError
from memo_hf.joint import JointDecisions
from memo_hf.layers.attention import register
from memo_hf.layers.check import StackVerdict, Verdict, check_stack
from memo_hf.layers.locate import Stack, find_stacks
from memo_hf.layers.loss import install_chunked_loss
from memo_hf.layers.patch import Patch
from memo_hf.layers.refusals import refuse_replicas, refuse_tensor_parallelism, refuse_what_cannot_be
from memo_hf.layers.step import Step
from memo_hf.layers.zero import Leaves, Offload, refuse_late_enabling, refuse_settings
from memo_hf.optimizer_states import OptimizerStates
from memo_hf.passes import Passes
from memo_hf.patched_stack import PatchedStack, enabled_layers
from memo_hf.planner.budgets import host_budget_bytes
from memo_hf.planning import Planner
from memo_hf.report.run_report import LayerShares, RunReport
from memo_hf.report.stats import LayerStats, SessionStats
from memo_hf.report.summary import start_line
from memo_hf.serving import Serving
from memo_hf.swap import SwapEngine
from memo_hf.units import format_bytes

logger = logging.getLogger("memo_hf")
# Of enabled models, by id; a session holds its model, so an id cannot be another model's while its session lives.
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


class Session:
    """memo_hf on one model. Made by `memo_hf.enable`.

    Args:
        model: a transformers model, or a peft model around one.
        config: the settings.

    Attributes:
        say: takes the line that a run begins with, once its first batch is seen; a log entry unless set otherwise.

    Raises:
        UnsupportedModelError: no decoder layers, a compiled model, one that is already enabled, or one that is split by
            tensor parallelism.
        ConfigError: activation checkpointing is on as well.
        MemoError: the planned allocator is asked for and cannot be.
    """

    def __init__(self, model: nn.Module, config: MemoConfig):
        self.model, self.config = model, config
        self.say: Callable[[str], None] = logger.info
        self._has_begun = False
        self._engine: SwapEngine | None = None
        # What `tracing` sets: how to swap what has no bytes, and that no tensor of a batch has values to look at.
        self.engine_options: dict = {}
        self.has_values = True
        self._patches: list[Patch] = []
        self.planners: list[Planner] = []
        self._undo_loss = None
        self._leaves: Leaves | None = None
        self._layers: list[LayerStats] = []
        self.host_budget_bytes: int | None = None
        self.joint = JointDecisions(self)
        self._stacks: list[PatchedStack] = []
        self._total_swapped_bytes = 0
        self._passes = Passes(config)
        register()
        refuse_what_cannot_be(model)
        refuse_tensor_parallelism(model)
        refuse_settings()
        stacks = find_stacks(model)
        layers = [layer for stack in stacks for layer in stack.layers]
        refuse_late_enabling(layers)
        if any(layer in enabled_layers for _, layer in layers):
            raise UnsupportedModelError(
                f"memo_hf is already enabled on the layers of this {type(model).__name__}; call memo_hf.disable on the "
                "model that it was enabled on first"
            )
        self._offload = Offload(model)
        self.serving = Serving(model, config)
        self._device_peak = PeakWatch()
        self._states = OptimizerStates(model)
        try:
            self._leaves = Leaves([layer for _, layer in layers])
            for index, stack in enumerate(stacks):
                self._install(stack, share=(index, len(stacks)))
            if config.chunked_loss:
                self._undo_loss = install_chunked_loss(model, min_tokens=config.effective_min_tokens)
        except BaseException:
            self.close()
            raise
        _sessions[id(model)] = self
        logger.info(self.describe())

    @property
    def swap_fraction(self) -> float:
        """The fraction of tokens that is swapped rather than recomputed."""
        return self.planners[0].choice.swap_fraction

    @property
    def layers(self) -> tuple[LayerStats, ...]:
        """Every decoder layer with its mode and the reason for it."""
        return tuple(self._layers)

    @property
    def stats(self) -> SessionStats:
        """Frozen figures of this moment."""
        traffic = self._engine.stats if self._engine else None
        swapped = traffic.swapped_bytes if traffic else 0
        return SessionStats(
            layers=self.layers,
            phase="measuring" if self.planners[0].is_measuring else "running",
            swap_fraction=self.swap_fraction,
            qkv="rebuild" if self.planners[0].choice.rebuild_qkv else "swap",
            strategy=self.planners[0].strategy,
            binding_limit=self.planners[0].binding_limit,
            chunk_size=self._passes.chunk_size,
            planned_bytes=self._passes.planned_bytes,
            swapped_bytes=swapped,
            prefetched_bytes=traffic.prefetched_bytes if traffic else 0,
            total_swapped_bytes=self._total_swapped_bytes + swapped,
            host_bytes=traffic.host_bytes if traffic else 0,
            peak_host_bytes=traffic.peak_host_bytes if traffic else 0,
            host_reserved_bytes=traffic.host_reserved_bytes if traffic else 0,
            host_budget_bytes=self.host_budget_bytes,
            forwards=self._passes.num_run,
            stock_forwards=self._passes.num_untouched,
            total_tokens=self._passes.num_tokens,
            serving=self.serving.stats,
        )

    def describe(self) -> str:
        """One line: how many layers run in which mode, the swap fraction, and what limits it."""
        return self.stats.describe()

    def report(self, device_peak_bytes: int | None = None, format: str = "text") -> str:
        """Modes with reasons, bytes planned, swapped and prefetched, and forecast beside measured.

        Args:
            device_peak_bytes: of a step, as you measured it. Not given: on a GPU what torch counted in steps of the
                last shape, if nothing before them took more; on a CPU `AllocatorMeter` measures it, as the report says.
            format: "text" for several lines, "json", or "html" for one page with plots, which needs matplotlib.

        Raises:
            ConfigError: another format, or matplotlib is missing for "html".
        """
        return self.run_report(device_peak_bytes).render(format)

    def run_report(self, device_peak_bytes: int | None = None) -> RunReport:
        """What `report` renders, as figures of this moment, which stay when the session closes."""
        stats = self.stats
        if device_peak_bytes is None:
            device_peak_bytes = self._device_peak.num_bytes
        shares = [share for planner in self.planners for share in planner.shares()]
        report = RunReport(
            stats=stats,
            min_tokens=self.config.effective_min_tokens,
            compared=tuple(f for p in self.planners for f in p.compare(stats.swapped_bytes)),
            layers=tuple(
                LayerShares(name=layer.name, mode=layer.mode, **(share if layer.mode == "token" else {"whole": 1.0}))
                for layer, share in zip(stats.layers, shares, strict=True)
            ),
            forecast=self.planners[0].forecast(),
            device_budget_bytes=self.planners[0].device_budget_bytes,
            address_map=self.serving.address_map,
        )
        return report if device_peak_bytes is None else report.with_device_peak(device_peak_bytes)

    def close(self) -> None:
        """Leave the model as it was found and free all host memory. A second call does nothing."""
        for patch in reversed(self._patches):
            patch.undo()
            enabled_layers.discard(patch.module)
        self._patches.clear()
        if self._undo_loss:
            self._undo_loss()
            self._undo_loss = None
        if self._leaves:
            self._leaves.undo()
            self._leaves = None
        self._close_engine()
        self.joint.close()
        self.serving.close()
        self._states.close()
        _sessions.pop(id(self.model), None)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._total_swapped_bytes += self._engine.stats.swapped_bytes
            self._engine.close()
            self._engine = None

    def _install(self, stack: Stack, share: tuple[int, int]) -> None:
        checked = self._checked(stack)
        attends = any(verdict.recipe for verdict in checked.layers)
        layers = [layer for _, layer in stack.layers]
        self.planners.append(Planner(self.config, self.model, layers, self._states, attends=attends, share=share))
        patched = PatchedStack(self, stack, checked.layers, self.planners[-1])
        self._stacks.append(patched)
        for index, ((name, layer), verdict) in enumerate(zip(stack.layers, checked.layers, strict=True)):
            self._layers.append(LayerStats(name, "token" if verdict.recipe else "layer", verdict.reason))
            self._patches.append(Patch(layer, patched.layer_forward(index, name, layer, verdict)))
            enabled_layers.add(layer)
        for name in checked.after_layers if patched.attends else ():
            module = stack.module.get_submodule(name)
            self._patches.append(Patch(module, patched.module_forward(module)))
        self._patches.append(Patch(stack.module, patched.forward))
        self._patches.append(Patch(stack.module, refuse_replicas, "_replicate_for_data_parallel"))

    def _checked(self, stack: Stack) -> StackVerdict:
        if self.config.mode == "layer":
            return StackVerdict([Verdict(None, "mode='layer' was asked for")] * len(stack.layers), [])
        return check_stack(stack)

    def engine(self, device: torch.device) -> SwapEngine:
        """The swap engine of `device`, made when the model has its place, and anew where it has moved."""
        if self._engine is not None and self._engine.device != device:
            self._close_engine()
        if self._engine is None:
            self.host_budget_bytes = self._host_budget_bytes()
            self._engine = SwapEngine(device, self.host_budget_bytes, **self.engine_options)
        return self._engine

    def _host_budget_bytes(self) -> int:
        if self.joint.host_share is not None:
            return self.joint.host_share.num_bytes
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by the launcher
        others = self.host_bytes_for_others()
        return host_budget_bytes(self.config.host_memory_bytes, local_ranks=local_ranks, other_bytes=others)

    def host_bytes_for_others(self) -> int:
        """Host bytes of this node that others will still take: as set, or what DeepSpeed offloads to."""
        declared = self.config.bytes_of("host_memory_for_others")
        if declared is not None:
            return declared
        # A budget set by hand is not what is free now.
        return self._offload.num_bytes() if self.config.host_memory_bytes is not None else self._offload.bytes_to_come()

    def require_host(self, num_bytes_per_layer: int, num_layers: int) -> None:
        """Have ready what every swapped layer needs at least; raise `HostMemoryError` where it exceeds the budget."""
        needed = num_bytes_per_layer * num_layers
        share = self.joint.host_share
        whose = "this rank's budget" if share is None else f"the budget of rank {share.rank}, the least of all,"
        if self.host_budget_bytes is not None and needed > self.host_budget_bytes:
            raise HostMemoryError(
                f"host memory does not suffice: one step swaps at least {format_bytes(needed)} ({needed} bytes), "
                f"{format_bytes(num_bytes_per_layer)} ({num_bytes_per_layer} bytes) for each of the {num_layers} "
                f"layers that are swapped, and {whose} is {format_bytes(self.host_budget_bytes)} "
                f"({self.host_budget_bytes} bytes). "
                "Raise MemoConfig(host_memory=...), shorten the sequence, or split it over more ranks."
            )
        self._engine.reserve(needed)

    def begin_pass(self, stack: Stack, device: torch.device) -> None:
        """A training forward pass of `stack` begins, which may be too short to gain.

        Of several stacks the last one counts: a vision tower does not run in each pass, the decoder does.
        """
        if stack.name == self._stacks[-1].name:
            self.joint.begin_forward(device)

    def begin_forward(self, stack: Stack, engine: SwapEngine, chunk_size: int, shape: tuple[int, int]) -> None:
        """A training forward pass of `stack` begins. Figures are of one pass through each stack of the model."""
        if self._passes.begin(stack.name, chunk_size, shape):
            engine.let_go()  # what a pass that failed has left
            self.serving.begin_forward(engine.device, *shape)
            self._device_peak.begin_step(engine.device, shape)
            self._total_swapped_bytes += engine.stats.swapped_bytes
            engine.reset_stats()

    def decided(self, planner: Planner, shape: tuple[int, int]) -> None:
        """How the forward pass that has begun runs is decided: says so once, where a run begins."""
        if not self._has_begun:
            self._has_begun = True
            self.say(start_line(self.stats, *shape, planner.forecast(), self._states.has_stepped))

    def note_evaluation(self) -> None:
        """A forward pass with gradients ran untouched, in eval mode."""
        self._passes.note_evaluation()

    def skip_forward(self, num_tokens: int) -> None:
        """A training forward pass is too short to gain and runs untouched."""
        self.serving.end_step()
        self._device_peak.begin_other()
        self._passes.skip(num_tokens)

    def fall_back(self, stack: Stack, reason: str) -> None:
        """From now on every layer of `stack` runs in layer mode."""
        self._note_whole({name: reason for name, _ in stack.layers})

    def train_with(self, ranks: Sequence[int]) -> None:
        """This model is trained together with these ranks of the default process group, which agree from the next
        training forward pass on. Only for engines that leave no mark on the model (ZeRO-1 and 2); others are seen."""
        self.joint.train_with(ranks)

    def run_whole(self, reasons: dict[str, str]) -> None:
        """From now on the layers named in `reasons` run in layer mode, for these reasons, of which it warns."""
        for reason, number in Counter(reasons.values()).items():
            logger.warning(f"memo_hf: {number} layers fall back to layer mode with those of other ranks: {reason}")
        for stack in self._stacks:
            stack.run_whole(set(reasons))
        self._note_whole(reasons)

    def _note_whole(self, reasons: dict[str, str]) -> None:
        self._layers = [LayerStats(s.name, "layer", reasons[s.name]) if s.name in reasons else s for s in self._layers]

    def end_forward(self, stack: Stack, step: Step) -> None:
        """A training forward pass of `stack` is over."""
        self.serving.mark("after the layers")
        self._passes.end(stack.name, step)


def session_of(model: nn.Module) -> Session:
    """The session of an enabled model. Raises `MemoError` where there is none."""
    session = _sessions.get(id(model))
    if session is None:
        raise MemoError(f"memo_hf is not enabled on this {type(model).__name__}; call memo_hf.enable(model) first")
    return session
