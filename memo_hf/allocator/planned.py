"""The planned allocator beside training: watch a step, record the next, place it in another process, serve it then.

Called by the session, which says when a step begins, which phase is on, and what the step's requests depend on. It must
not know what a phase does. Training never waits for it, and what has no planned address is served dynamically.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from memo_hf.allocator.memory import DeviceMemory, MemoryStats
from memo_hf.allocator.recording import Recording
from memo_hf.allocator.serving_plan import ServingPlan
from memo_hf.allocator.solver import Solver
from memo_hf.errors import PlanError
from memo_hf.planner.problem import Placement
from memo_hf.planner.trace import Trace
from memo_hf.units import format_bytes

logger = logging.getLogger("memo_hf")
_MAX_PLANS = 32  # shapes beyond these are served dynamically
_MAX_TRIES = 4  # recordings of one shape
_JUDGED_STEPS = 4  # after so many served steps together the plan is judged
_GOOD_SHARE = 0.999  # of requests served from the plan; below, it is made again
_USELESS_SHARE = 0.5  # a last plan below this is not used any more


@dataclass
class _Shape:
    """What is known of the steps of one shape."""

    fingerprint: str
    num_steps: int = 0
    tries: int = 0
    record_next: bool = True
    recording: Recording | None = None  # all that were made, merged
    plan: ServingPlan | None = None
    number: int | None = None  # of the plan in the allocator
    judged_steps: int = 0
    served: int = 0
    failed: int = 0


class PlannedAllocator:
    """Plans one device's memory, shape by shape, while training runs.

    A step of a new shape is watched only: it makes what lasts, such as the optimizer's state. The next one is recorded,
    and placed by a process of its own. The plan is installed where a later step begins, and saved where a folder is
    given; a run that finds a saved plan serves from it after the first step.

    Args:
        device: "cpu", or a CUDA device after `memo_hf.allocator.cuda.install()`.
        fingerprint: Of what all steps' requests depend on: model, settings, releases of the libraries.
        folder: Where plans are saved and found.
        time_limit_seconds: How long the process may look for better addresses.
        report: Takes one line of progress.

    Raises:
        NativeLibraryError: the C++ part is not built.
        MemoError: the device cannot be planned, or is planned for another model.
    """

    def __init__(
        self,
        device: torch.device | str,
        fingerprint: str,
        *,
        folder: Path | str | None = None,
        time_limit_seconds: float = 60.0,
        report: Callable[[str], None] = logger.info,
    ):
        self._fingerprint, self._time_limit, self._report = fingerprint, time_limit_seconds, report
        self._folder = None if folder is None else Path(folder)
        self._shapes: dict[str, _Shape] = {}
        self._current: _Shape | None = None
        self._served = self._recording = False
        self._solving: tuple[_Shape, Solver] | None = None
        self._memory = DeviceMemory(torch.device(device))
        self._before: MemoryStats = self._memory.stats

    def begin_step(self, shape: str) -> None:
        """A step begins; one that is on ends.

        Args:
            shape: What this step's requests depend on beyond the fingerprint: tokens, batch, whether gradients are
                added to others.
        """
        self.end_step()
        self._install_if_ready()
        known = self._shapes.get(shape) or self._add_shape(shape)
        self._current = known
        known.num_steps += 1
        # The first step of a process makes what lasts: at planned addresses it would be in the way of all later steps.
        first = known.num_steps == 1
        self._served = known.number is not None and not first
        self._recording = known.record_next and not first and self._solving is None
        if self._recording:
            self._memory.start_recording()
        if not self._memory.begin_step(known.number if self._served else None):
            self._report(
                f"memo_hf: no {format_bytes(known.plan.arena_bytes)} for planned addresses in this step; it is "
                "served without"
            )
        self._before = self._memory.stats

    def mark(self, phase: str) -> None:
        """What is requested from now on, on threads that call this, belongs to `phase`.

        Args:
            phase: "forward 3" and "backward 3" for layer 3, which the planner solves by themselves; anything else for
                what is not a layer.
        """
        self._memory.mark(phase)

    def pause(self) -> None:
        """What is requested until the next mark belongs to no phase, and is served dynamically."""
        self._memory.pause()

    def end_step(self) -> None:
        """The step that is on, if any, ends: evaluation and whatever else comes now is served dynamically."""
        shape, self._current = self._current, None
        if shape is None:
            return
        self._memory.end_step()
        if self._served:
            self._judge(shape)
        if self._recording:
            self._recording = False
            self._start_solving(shape)

    @property
    def stats(self) -> MemoryStats:
        """Counts now."""
        return self._memory.stats

    @property
    def plan(self) -> ServingPlan | None:
        """The plan that the step which is on is served from."""
        return self._current.plan if self._current and self._served else None

    @property
    def recorded_traces(self) -> list[Trace]:
        """The traces that were planned, one for each shape that has been recorded."""
        return [shape.recording.trace for shape in self._shapes.values() if shape.recording]

    @property
    def placement(self) -> Placement | None:
        """The plan that was installed last of those whose steps were recorded here, with their lifetimes."""
        for shape in reversed(self._shapes.values()):
            if shape.plan and shape.recording and len(shape.plan.requests) == len(shape.recording.requests):
                offsets = tuple(request.offset for request in shape.plan.requests)
                return Placement(shape.recording.trace.problem(), offsets, "planned", proved=shape.plan.proved)
        return None

    def finish_planning(self, timeout_seconds: float) -> bool:
        """Waits for the process that is placing a step, whose plan the next step installs. False: it takes longer."""
        return self._solving is None or self._solving[1].wait(timeout_seconds)

    def close(self) -> None:
        """Ends planning and serving. Tensors at planned addresses stay valid. May be called twice."""
        self._served = self._recording = False
        self._current = None
        if self._solving:
            self._solving[1].close()
            self._solving = None
        self._memory.close()

    def _add_shape(self, shape: str) -> _Shape:
        added = self._shapes[shape] = _Shape(f"{self._fingerprint}; {shape}")
        added.record_next = len(self._shapes) <= _MAX_PLANS
        path = self._path(added)
        if path is not None and path.exists():
            try:
                self._serve(added, ServingPlan.load(path, added.fingerprint))
                self._report(f"memo_hf: addresses of {path} are used")
            except PlanError as error:
                self._report(f"memo_hf: {error}. It is planned anew")
        return added

    def _path(self, shape: _Shape) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"addresses-{hashlib.sha256(shape.fingerprint.encode()).hexdigest()[:16]}.json"

    def _serve(self, shape: _Shape, plan: ServingPlan) -> None:
        shape.number, shape.plan, shape.record_next = self._memory.add_plan(plan), plan, False
        shape.judged_steps = shape.served = shape.failed = 0

    def _start_solving(self, shape: _Shape) -> None:
        shape.tries += 1
        shape.record_next = False
        try:
            recording = self._memory.stop_recording()
            if not recording.requests:
                raise PlanError("no request came in a marked phase")
            shape.recording = recording.merged(shape.recording) if shape.recording else recording
            self._solving = shape, Solver(shape.recording.trace, self._time_limit)
        except (PlanError, OSError) as error:
            self._report(f"memo_hf: addresses are not planned: {error}")
            return
        self._report(
            f"memo_hf: planning the addresses of {len(recording.requests)} requests beside training, "
            f"{self._time_limit:g} seconds at most"
        )

    def _install_if_ready(self) -> None:
        if self._solving is None:
            return
        shape, solver = self._solving
        try:
            placement = solver.poll()
            if placement is None:
                return
            plan = ServingPlan.of(shape.recording, placement, shape.fingerprint)
            if shape.number is not None:
                self._memory.retire_arena()
            self._serve(shape, plan)
            self._report(
                f"memo_hf: addresses planned in {solver.seconds:.1f} seconds: {format_bytes(plan.arena_bytes)}, "
                f"{plan.arena_bytes / max(1, plan.lower_bound):.4f} of what is alive at once"
                + (", the least possible" if plan.proved else "")
            )
            path = self._path(shape)
            if path is not None:
                plan.save(path)
        except (PlanError, OSError) as error:
            shape.record_next = shape.tries < _MAX_TRIES
            self._report(f"memo_hf: {error}")
        solver.close()
        self._solving = None

    def _judge(self, shape: _Shape) -> None:
        """Has a plan made again that too many requests miss: sizes changed, or blocks are freed later than recorded."""
        now, before = self._memory.stats, self._before
        shape.judged_steps += 1
        shape.served += now.num_planned - before.num_planned
        shape.failed += now.num_missed + now.num_conflicts - before.num_missed - before.num_conflicts
        if shape.judged_steps < _JUDGED_STEPS or self._recording or self._solving:
            return
        failed, asked = shape.failed, shape.served + shape.failed
        shape.judged_steps = shape.served = shape.failed = 0
        if asked - failed >= _GOOD_SHARE * asked:
            return
        if shape.tries < _MAX_TRIES:
            shape.record_next = True
        elif asked - failed < _USELESS_SHARE * asked:
            shape.number = shape.plan = None
            self._report(
                f"memo_hf: {failed} of {asked} requests miss the plan for {shape.fingerprint!r}, as others before it; "
                "these steps are served without"
            )
