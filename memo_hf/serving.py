"""Serving: a session's planned allocator, and when its steps and phases begin and end.

Made by the session, which says when forward passes begin and end. Layers get nothing of it but a function that is
told where they are. Knows the allocator and optimizers' hooks; no layer and no swap engine.

A step goes from a forward pass to the end of the optimizer's step: passes that add to the gradients of others belong to
it. Evaluation ends it.
"""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from time import monotonic

import torch
import transformers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memo_hf
from memo_hf.allocator import cuda, native
from memo_hf.allocator.memory import MemoryStats
from memo_hf.allocator.planned import PlannedAllocator
from memo_hf.config import MemoConfig
from memo_hf.errors import MemoError
from memo_hf.planner.problem import Placement
from memo_hf.planner.trace import Trace
from memo_hf.report.stats import ServingStats

PLANNING_SECONDS = 20.0  # beside training; on steps of a few thousand requests more has not helped
# A CPU that serves planned addresses gains a few percent of each step (docs/allocator.md), and planning them takes a
# core for about a second: a run that ends before would not get it back.
SECONDS_BEFORE_PLANNING = 60.0
# What is requested from these moments of layer {} on (`Step.watchers`) belongs to these phases.
_PHASES = {
    "forward begin": "forward {}",
    "forward attend": "forward {} attend",
    "forward finish": "forward {} finish",
    "backward begin": "backward {}",
    "backward attend": "backward {} attend",
    "backward attended": "backward {} project",
}


class Serving:
    """The planned allocator of one session, where `config` asks for it or leaves it open and it pays.

    Left open, memory is planned on a CPU once training has lasted `SECONDS_BEFORE_PLANNING`, and on CUDA where its
    allocator has been put in charge; whatever stands in the way leaves the stock allocator, and the reason in `stats`.

    Args:
        model: whose steps these are.
        config: the settings.

    Raises:
        NativeLibraryError: the planned allocator is asked for and the C++ part is not built.
        MemoError: the model is on CUDA, and CUDA's allocator was not put in charge before CUDA was used.
    """

    def __init__(self, model: nn.Module, config: MemoConfig):
        self._model, self._config = model, config
        self._is_on = config.allocator != "stock"
        self._is_asked_for = config.allocator == "planned"
        self._first_began: float | None = None
        self._allocator: PlannedAllocator | None = None
        self._device: torch.device | None = None
        self._in_step = self._has_stepped = False
        self._began: MemoryStats | None = None
        waits = f"addresses are planned after {SECONDS_BEFORE_PLANNING:g} seconds of training on a CPU"
        self._last = ServingStats(config.allocator or "stock", "asked for" if config.allocator else waits)
        self._end = lambda: None  # of the allocator
        self._remove_hooks = lambda: None
        if not self._is_on:
            return
        if self._is_asked_for:
            self._require_libraries()
        # All optimizers' hooks: weak, since they would keep the model alive.
        me = weakref.ref(self)
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: me() and me()._optimizer_begins()),
            register_optimizer_step_post_hook(lambda *_: me() and me()._optimizer_ends()),
        )
        self._remove_hooks = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def begin_forward(self, device: torch.device, batch_size: int, num_tokens: int) -> None:
        """A training forward pass begins: of the step that is on, where it adds to gradients, or of a new one."""
        if not self._is_on:
            return
        if self._device != device:
            self._close_allocator()
            self._device = device
        if self._allocator is None and not self._open_allocator():
            return
        adds = any(parameter.grad is not None for parameter in self._model.parameters())
        if not (self._in_step and adds) or self._has_stepped:
            self._has_stepped, self._in_step = False, True
            # Gradients that are there are added to, which asks for other memory than making them.
            there = ", gradients are there" if adds else ""
            self._allocator.begin_step(f"{batch_size} x {num_tokens} tokens{there}")
        self._allocator.mark("before the layers")

    def _require_libraries(self) -> None:
        if next(self._model.parameters()).is_cuda:
            cuda.installed_library()
            return
        native.load_cpu_library()
        if torch.cuda.is_available() and not torch.cuda.is_initialized():
            cuda.install()  # the model may move there before it is trained

    def _open_allocator(self) -> bool:
        """Puts the planned allocator in charge. False where it is left open whether to, and it is not the time."""
        now = monotonic()
        self._first_began = now if self._first_began is None else self._first_began
        is_early = self._device.type == "cpu" and now - self._first_began < SECONDS_BEFORE_PLANNING
        if is_early and not self._is_asked_for:
            return False
        try:
            self._allocator = PlannedAllocator(
                self._device,
                self._fingerprint(),
                folder=self._folder(),
                time_limit_seconds=PLANNING_SECONDS,
            )
        except MemoError as error:
            if self._is_asked_for:
                raise
            self._is_on, self._last = False, ServingStats("stock", str(error))
            return False
        self._end = weakref.finalize(self, self._allocator.close)
        self._began = self._allocator.stats
        return True

    def mark(self, phase: str) -> None:
        """What is requested from now on belongs to `phase`. Nothing happens outside of steps."""
        if self._in_step:
            self._allocator.mark(phase)

    def layer_comes_to(self, index: int, moment: str) -> None:
        """Layer `index` is at `moment` of its forward or backward pass: see `Step.watchers`."""
        if moment in _PHASES:
            self.mark(_PHASES[moment].format(index))

    def end_step(self) -> None:
        """Evaluation or another pass that memo_hf does not run begins: it is served dynamically."""
        if self._in_step:
            self._in_step = False
            self._allocator.end_step()

    def finish_planning(self, timeout_seconds: float) -> bool:
        """Ends the step, and waits for addresses that are being planned. False: it takes longer."""
        self.end_step()
        return self._allocator is None or self._allocator.finish_planning(timeout_seconds)

    @property
    def stats(self) -> ServingStats:
        """Counts now, or as they were when the session closed."""
        if self._allocator is None:
            return self._last
        now, began = self._allocator.stats, self._began
        served = now.num_planned - began.num_planned
        asked = served + now.num_missed + now.num_conflicts - began.num_missed - began.num_conflicts
        return ServingStats(
            "planned",
            "asked for" if self._is_asked_for else "it pays",
            served / asked if asked else None,
            now.arena_bytes,
            now.planned_bytes - began.planned_bytes,
            now.dynamic_bytes - began.dynamic_bytes,
        )

    @property
    def recorded_traces(self) -> list[Trace]:
        """What was recorded in this session, a trace for each shape of step, for whoever studies it."""
        return [] if self._allocator is None else self._allocator.recorded_traces

    @property
    def address_map(self) -> Placement | None:
        """The planned addresses of the step that was served last, where its lifetimes were recorded in this process."""
        return None if self._allocator is None else self._allocator.placement

    def close(self) -> None:
        """Puts back the allocator that was there. A second call does nothing."""
        self._remove_hooks()
        self._close_allocator()
        self._is_on = False

    def _close_allocator(self) -> None:
        if self._allocator is not None:
            self._last = self.stats
            self._end()
            self._allocator, self._in_step = None, False

    def _optimizer_begins(self) -> None:
        if not _is_in_backward():
            self.mark("optimizer")

    def _optimizer_ends(self) -> None:
        # What comes until the next forward pass, such as the next batch, has no fixed place. A second optimizer has.
        if self._in_step and not _is_in_backward():
            self._has_stepped = True
            self._allocator.pause()

    def _folder(self) -> Path:
        chosen = self._config.plan_folder
        return Path.home() / ".cache" / "memo_hf" if chosen is None else Path(chosen)

    def _fingerprint(self) -> str:
        """All that the requests of this model's steps depend on, but for the shape of the batch."""
        parts = [type(self._model).__name__, repr(self._config), str(getattr(self._model, "config", ""))]
        parts += [f"{name} {p.dtype} {tuple(p.shape)} {p.requires_grad}" for name, p in self._model.named_parameters()]
        what = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        releases = f"memo_hf {memo_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{type(self._model).__name__} {what}, {self._device}, {torch.get_num_threads()} threads, {releases}"


def _is_in_backward() -> bool:
    """Optimizers may step parameter by parameter within backward, which is then one step with it."""
    return torch._C._current_graph_task_id() != -1
