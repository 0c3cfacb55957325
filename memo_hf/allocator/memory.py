"""`DeviceMemory`: one device's allocator in csrc/, with phases by name and plans as tables.

Called by `planned`. Knows no model and decides nothing: it records, serves and counts what it is told to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from memo_hf.allocator import cuda, native
from memo_hf.allocator.recording import PhaseLabel, Recording, to_recording
from memo_hf.allocator.serving_plan import ServingPlan
from memo_hf.errors import MemoError, PlanError

_MAX_EVENTS = 1 << 22  # 128 MiB of log; a step has tens of thousands


# Of which device memory is being planned: two sessions' steps on one device would cut each other short.
_taken: set[torch.device] = set()


@dataclass(frozen=True)
class MemoryStats:
    """Counts of one device's allocator since it was loaded; the peak since the last `DeviceMemory.take_peak`.

    Attributes:
        live_bytes: Requested and not freed.
        peak_bytes: The most there have been.
        planned_live_bytes: The part of `live_bytes` at planned addresses.
        arena_bytes: Held for planned addresses now.
        planned_bytes: Requested bytes that got a planned address, summed up.
        dynamic_bytes: Requested bytes that did not.
        num_planned: Requests that got a planned address.
        num_missed: Requests that the plan does not know, or knows with another size.
        num_conflicts: Requests whose planned address was still in use.
        num_outside: Requests outside planned steps, or of threads that mark no phase.
        misses_by_phase: Missed requests and conflicts of each phase that has any.
    """

    live_bytes: int
    peak_bytes: int
    planned_live_bytes: int
    arena_bytes: int
    planned_bytes: int
    dynamic_bytes: int
    num_planned: int
    num_missed: int
    num_conflicts: int
    num_outside: int
    misses_by_phase: dict[str, int]


class DeviceMemory:
    """The allocator of one device. On the CPU it is put in charge here, and what was there put back by `close`.

    Args:
        device: "cpu", or a CUDA device after `memo_hf.allocator.cuda.install()`.

    Raises:
        NativeLibraryError: the C++ part is not built.
        MemoError: the device is neither, its allocator is not installed, or its memory is being planned already.
    """

    def __init__(self, device: torch.device):
        self._device = _known_device(device)
        if self._device in _taken:
            raise MemoError(
                f"the memory of {self._device} is being planned for another model; close that one's session first, or "
                "leave this one with the stock allocator"
            )
        self._is_cpu = device.type == "cpu"
        if self._is_cpu:
            self._library = native.load_cpu_library()
            self._core = self._library.memo_cpu_core()
            self._library.memo_cpu_install()
        else:
            self._library = cuda.installed_library()
            self._core = self._library.memo_cuda_core(self._device.index)
        _taken.add(self._device)
        self._open = True
        self._phases: list[PhaseLabel] = []
        self._number_of: dict[PhaseLabel, int] = {}
        self._visits: dict[str, int] = {}

    def begin_step(self, plan: int | None) -> bool:
        """A step begins, and ends one that is on. False where the plan's arena found no memory: the step is dynamic."""
        self._visits.clear()
        return bool(self._library.memo_core_begin_step(self._core, native.NO_PLAN if plan is None else plan))

    def mark(self, phase: str) -> None:
        """What is requested from now on belongs to this phase; one that comes again in a step is kept apart."""
        visit = self._visits.get(phase, 0)
        self._visits[phase] = visit + 1
        self._library.memo_core_mark(self._core, self._number(PhaseLabel(phase, visit)))

    def pause(self) -> None:
        """What is requested until the next mark belongs to no phase."""
        self._library.memo_core_mark(self._core, native.NO_PHASE)

    def end_step(self) -> None:
        """The step is over: requests are served dynamically until the next one begins."""
        self._library.memo_core_end_step(self._core)

    def start_recording(self) -> None:
        """Logs every request from now on."""
        self._library.memo_core_start_recording(self._core, _MAX_EVENTS)

    def stop_recording(self) -> Recording:
        """What was logged. Raises `PlanError` where it was too much."""
        count = self._library.memo_core_stop_recording(self._core)
        events = (native.Event * count)()
        self._library.memo_core_read_events(self._core, events, count)
        if count == _MAX_EVENTS:
            raise PlanError(f"a step has more than {_MAX_EVENTS} requests and frees, too many to plan")
        return to_recording(events, self._phases)

    def add_plan(self, plan: ServingPlan) -> int:
        """Number of the plan for `begin_step`. Raises `PlanError` where the allocator finds it wrong."""
        table = (native.PlannedRequest * len(plan.requests))()
        for entry, request in zip(table, plan.requests, strict=True):
            entry.phase, entry.stream = self._number(request.phase), request.stream
            entry.bytes, entry.offset = request.num_bytes, request.offset
        number = ctypes.c_uint32()
        error = self._library.memo_core_add_plan(self._core, table, len(table), plan.arena_bytes, ctypes.byref(number))
        if error is not None:
            raise PlanError(f"the plan for {plan.fingerprint!r} cannot be served: {error.decode()}; plan again")
        return number.value

    def retire_arena(self) -> None:
        """The next planned step gets a new arena, without the blocks that stay in this one."""
        self._library.memo_core_retire_arena(self._core)

    @property
    def stats(self) -> MemoryStats:
        """Counts now."""
        counts = native.Statistics()
        self._library.memo_core_statistics(self._core, ctypes.byref(counts))
        size = len(self._phases)
        phases, misses = (ctypes.c_uint32 * size)(), (ctypes.c_uint64 * size)()
        found = min(size, self._library.memo_core_misses(self._core, phases, misses, size))
        by_phase: dict[str, int] = {}
        for number, count in zip(phases[:found], misses[:found], strict=True):
            if number < size:
                name = self._phases[number].name
                by_phase[name] = by_phase.get(name, 0) + count
        names = [name for name in MemoryStats.__dataclass_fields__ if name != "misses_by_phase"]
        return MemoryStats(**{name: getattr(counts, name) for name in names}, misses_by_phase=by_phase)

    def take_peak(self) -> int:
        """`peak_bytes`; the peak starts again from what is there now."""
        return self._library.memo_core_take_peak(self._core)

    def close(self) -> None:
        """Forgets all plans and puts back the CPU's allocator. Living tensors stay valid. May be called twice."""
        if not self._open:
            return
        self._open = False
        _taken.discard(self._device)
        self._library.memo_core_stop_recording(self._core)
        self.end_step()
        self._library.memo_core_clear_plans(self._core)
        if self._is_cpu:
            self._library.memo_cpu_uninstall()

    def _number(self, label: PhaseLabel) -> int:
        number = self._number_of.get(label)
        if number is None:
            number = self._number_of[label] = len(self._phases)
            self._phases.append(label)
        return number


def _known_device(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise MemoError(f"memory cannot be planned on {str(device)!r}; it can on 'cpu' and 'cuda'")
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
