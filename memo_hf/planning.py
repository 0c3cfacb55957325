"""How each training forward pass of a stack runs: profiles the first one, solves for the rest, remembers plans.

Made by the session, one for each stack, and asked by the patched stack before each pass. What is set by hand is left
alone. Knows no layer's code: what it hands out are numbers, and who measures.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from memo_hf.config import MemoConfig
from memo_hf.first_step import Choice, FirstStep
from memo_hf.forecasting.running import Held, RunForecast
from memo_hf.optimizer_states import OptimizerStates
from memo_hf.plan_file import PlanFile
from memo_hf.planner.plan import Measurement, PlanBook, Shape, joint_measurement
from memo_hf.planner.swap_fraction import HOST_IS_SHORT, QKV_IN_WORDS, SwapPlan
from memo_hf.solving import Memory, StackSolver, read_device
from memo_hf.step_forecast import Planned, StepForecast
from memo_hf.swap import SwapEngine

logger = logging.getLogger("memo_hf")
# Of the host budget, for what blocks of unequal size leave unused between them.
_USABLE_HOST = 0.95
# Ranks tell each other this often before those that have a profile go on without those that have none.
_ROUNDS = 3
# A plan is made again where the device holds this much more than when it was made (optimizer states came).
_GROWTH = 1.02
_CPU_LIMIT = "the CPU, where fraction 0 takes the least memory; set device_memory to have it solved for"


@dataclass(frozen=True, kw_only=True)
class PlannerFacts:
    """What the planner of one rank knows, for those of the others.

    Attributes:
        held: of the device's memory, whatever the shape.
        device_bytes: of it that training may take.
        measurement: of this rank's profiled step, or None before that.
        book: measurement and plans of an earlier run, on the rank that reads them.
    """

    held: Held
    device_bytes: float
    measurement: Measurement | None
    book: PlanBook | None


class Planner:
    """Decides for one stack.

    Args:
        config: the settings.
        model: the whole model.
        layers: the decoder layers of the stack.
        states: of the model's optimizers.
        attends: some of them run in token mode, so that there is something to choose.
        share: of the host budget and of the plan file; the first stack alone keeps plans in a file.
    """

    def __init__(
        self,
        config: MemoConfig,
        model: nn.Module,
        layers: list[nn.Module],
        states: OptimizerStates,
        *,
        attends: bool,
        share=(0, 1),
    ):
        self._config, self._model, self._layers, self._states = config, model, layers, states
        self._file = PlanFile(config, model, layers, is_kept=share[0] == 0)
        self._solver = StackSolver(config, model, layers)
        self._steps = StepForecast(self._solver)
        self._num_stacks = share[1]
        self._solves = config.swap_fraction is None and attends
        self._first_kept = max(0, len(layers) - config.unswapped_layers)
        self._book: PlanBook | None = None
        self._first = FirstStep(self._solver, layers, self._first_kept)
        self._memory = Memory()
        self._made_at: dict[Shape, float] = {}  # static bytes when the plan was made, or checked if it came from a file
        self._is_alone = True  # no other rank trains with this one, as far as it knows
        self._num_agreed = 0
        self.plan: SwapPlan | None = None
        self.choice = Choice(
            swap_fraction=config.swap_fraction or 0.0, rebuild_qkv=config.qkv == "rebuild", first_kept=self._first_kept
        )
        self.binding_limit = "nothing yet: the first training step is measured at fraction 0"
        # A plan is to be made from a measured step, and is not made yet.
        self.is_measuring = self._solves
        if self._solves and config.device_memory is None and not torch.accelerator.is_available():
            self.is_measuring, self.binding_limit = False, _CPU_LIMIT
        if config.swap_fraction is not None:
            self.binding_limit = f"swap_fraction: set to {config.swap_fraction:g} by hand"
        elif not attends:
            self.binding_limit = "the layers: none runs in token mode, so there is no fraction to choose"

    @property
    def sequence_parallel(self) -> int:
        """How many ranks share a sequence; shapes are of one of them."""
        return self._solver.sequence_parallel

    @sequence_parallel.setter
    def sequence_parallel(self, num_ranks: int) -> None:
        self._solver.sequence_parallel = num_ranks

    @property
    def strategy(self) -> str:
        """ "memo", or "checkpoint" where activation checkpointing is predicted to be as fast."""
        return "memo" if self.plan is None else self.plan.strategy

    def choose(self, engine: SwapEngine, shape: Shape, host_bytes: int) -> Choice:
        """How the forward pass that begins now runs.

        Args:
            shape: of its batch, with the tokens of this rank.
            host_bytes: the budget of this rank.
        """
        now = time.perf_counter()
        if shape != self._steps.shape:
            self._steps.learn_rest(self._planned)
        if not self._solves_on(engine.device):
            self._take(self._read_device(engine.device))  # for the forecast alone
        self._steps.times.begin(shape, now)
        if not self._solves:
            return self.choice
        if not self._solves_on(engine.device):
            self.is_measuring, self.choice = False, self._first.way()
            self.binding_limit = HOST_IS_SHORT if self._first.has_retreated else _CPU_LIMIT
            return self.choice
        self._memory = dataclasses.replace(self._memory, host_bytes=_USABLE_HOST * host_bytes / self._num_stacks)
        if self._is_alone:
            self._take(self._know(engine.device))
            self._book.measurement = self._book.measurement or self._first.found
        if self._book.measurement is None:
            chosen = self._first.choice(engine, shape, now)
            # Only the graph of the pass may hold the profile.
            self.choice = dataclasses.replace(chosen, observer=None)
            return chosen
        else:
            self.plan = self._plan_for(shape)
            engine.reserve(int(self.plan.host_bytes))
            self.choice, self.is_measuring = self._as_choice(self.plan), False
        return self.choice

    def facts(self, device: torch.device, *, reads_plans: bool) -> PlannerFacts | None:
        """What this rank knows, for `agree`; None where nothing is solved for. From now on nothing is decided alone.

        Args:
            reads_plans: this rank reads the plan file, for all.
        """
        if self._is_alone and self._book is not None:  # it has trained before the model was wrapped
            self._first.found, self._book = self._book.measurement, None
            self._made_at.clear()
        self._is_alone = False
        if not self._solves_on(device):
            return None
        memory = self._know(device, reads_plans=reads_plans)
        book = self._book if reads_plans and self._book.measurement is not None else None
        return PlannerFacts(
            held=memory.held, device_bytes=memory.device_bytes, measurement=self._first.found, book=book
        )

    def agree(self, facts: list[PlannerFacts | None]) -> None:
        """Take what holds for every rank: the slowest and the largest of their profiles, the least of their memories.

        Args:
            facts: of all ranks, in the same order on each.
        """
        if None in facts:
            if any(facts) and self._solves:
                self._solves = self.is_measuring = False
                self.binding_limit = "another rank, which has nothing to choose, so the swap fraction stays 0 on all"
            return
        self._num_agreed += 1
        held = Held(max(f.held.static_bytes for f in facts), max(f.held.gradient_bytes for f in facts))
        self._take(Memory(held=held, device_bytes=min(f.device_bytes for f in facts)))
        if self._book.measurement is not None:
            return
        books = [f.book for f in facts if f.book is not None]
        found = [f.measurement for f in facts if f.measurement is not None]
        if books:
            self._book = books[0]
        elif len(found) == len(facts) or found and self._num_agreed > _ROUNDS:
            self._book.measurement = joint_measurement(found)
            self._steps.times.restart()

    @property
    def measurement(self) -> Measurement | None:
        """What the profiled step found, once it has been read."""
        return None if self._book is None else self._book.measurement

    def retreat(self) -> bool:
        """The host budget does not suffice for a pass that is not planned: whether a smaller one is left to try."""
        if not (self._solves and self.measurement is None and self._first.retreat()):
            return False
        instead = "q, k, v are recomputed"
        if self._first.way().whole_layers:
            instead = "the layers' inputs alone are swapped, and attention is recomputed too"
        logger.warning(f"memo_hf: host memory has no room for all that is swapped at fraction 0: {instead}")
        return True

    def _plan_for(self, shape: Shape) -> SwapPlan:
        plan, made_at = self._book.get(shape), self._made_at.get(shape.bucket())
        if plan is not None and made_at is None:
            if plan.host_bytes <= self._memory.host_bytes and plan.device_bytes <= self._memory.device_bytes:
                made_at = self._made_at[shape.bucket()] = self._memory.static_bytes
        if made_at is not None and self._memory.static_bytes <= _GROWTH * made_at:
            return plan
        plan = self._solver.solve(self._book.measurement, shape.bucket(), self._memory)
        self._made_at[shape.bucket()] = self._memory.static_bytes
        self._book.put(shape, plan)
        self.binding_limit = plan.binding_limit
        logger.info(
            f"memo_hf: plan for {shape.batch} x {shape.bucket().seq_len} tokens: {plan.strategy}, swap fraction "
            f"{plan.swap_fraction:.3f}, {QKV_IN_WORDS[plan.qkv]}; decided by {plan.binding_limit}"
        )
        self._file.save(self._book)
        return plan

    def _as_choice(self, plan: SwapPlan) -> Choice:
        self.binding_limit = plan.binding_limit
        if plan.strategy == "checkpoint":
            return Choice(
                swap_fraction=0.0,
                rebuild_qkv=False,
                first_kept=0,
                whole_layers=frozenset(range(len(self._layers))),
            )
        first_kept = self._first_kept if plan.num_kept else len(self._layers)
        whole: set[int] = set()
        for indices, kind in zip(self._book.measurement.indices, plan.kinds, strict=True):
            whole.update([index for index in indices if index < first_kept][: kind.num_input_only])
        tokens = self._steps.shape.seq_len
        return Choice(
            # Whole tokens, and no more of them than there is room for.
            swap_fraction=math.floor(plan.swap_fraction * tokens + 1e-6) / tokens,
            rebuild_qkv=plan.qkv == "rebuild",
            first_kept=first_kept,
            whole_layers=frozenset(whole),
        )

    def _solves_on(self, device: torch.device) -> bool:
        # On a CPU host and device share one memory: swapping more would only copy more.
        return self._solves and (device.type != "cpu" or self._config.device_memory is not None)

    def _know(self, device: torch.device, *, reads_plans: bool = True) -> Memory:
        """Read what this rank can: plans, the profile where there is one, and the device's memory, as returned."""
        memory = self._read_device(device)
        if self._book is None:
            if reads_plans:
                self._book = self._file.load(device, self.sequence_parallel)
            else:
                self._book = PlanBook(self._file.fingerprint(device, self.sequence_parallel))
        if self._first.read(memory.static_bytes):
            self._steps.times.restart()  # it was slower than others
        return memory

    def _read_device(self, device: torch.device) -> Memory:
        state_bytes = self._states.num_bytes(device)
        self._read = device, state_bytes
        return read_device(self._model, self._config, device, state_bytes)

    def _memory_with_states(self) -> Memory:
        """With the states of optimizers that have made them since the last pass began."""
        device, num_bytes = self._read
        came, held = self._states.num_bytes(device) - num_bytes, self._memory.held
        return dataclasses.replace(self._memory, held=Held(held.static_bytes + came, held.gradient_bytes))

    def _take(self, device: Memory) -> None:
        self._memory = dataclasses.replace(device, host_bytes=self._memory.host_bytes)

    @property
    def device_budget_bytes(self) -> float | None:
        """What training may take on the device, or None where that is not known or not bounded."""
        limit = self._memory.device_bytes
        return limit if 0 < limit < float("inf") else None

    def forecast(self) -> RunForecast | None:
        """What a step of the last shape takes as `choice` has it, or None where that cannot be said."""
        choice = self.choice
        if self._steps.shape is None or choice.whole_layers:
            return None
        found = self._solver.forecast(
            self._steps.shape,
            self._memory_with_states(),
            swap_fraction=choice.swap_fraction,
            rebuilds_qkv=choice.rebuild_qkv,
            num_kept=len(self._layers) - choice.first_kept,
        )
        return found and dataclasses.replace(found, step_seconds=self._steps.seconds(self._planned))

    def shares(self) -> list[dict[str, float]]:
        """For each layer, shares of its tokens as in `LayerShares`, were it in token mode."""
        found, fraction = [], self.choice.swap_fraction
        for index in range(len(self._layers)):
            if index in self.choice.whole_layers:
                found.append({"whole": 1.0})
            else:
                kept = index >= self.choice.first_kept
                found.append({"kept" if kept else "swapped": fraction, "recomputed": 1.0 - fraction})
        return found

    def compare(self, swapped_bytes: int) -> list[tuple[str, str, float, float]]:
        """(what, unit, forecast, measured) of the last shape that ran, for what is known.

        Args:
            swapped_bytes: by the last forward pass.
        """
        seconds = self._steps.seconds(self._planned)
        return self._steps.compare(self.forecast(), seconds, swapped_bytes)

    @property
    def _planned(self) -> Planned | None:
        """What steps follow now, where they follow a plan of memo_hf's own way of running."""
        if self.plan is None or self.plan.strategy != "memo" or self.measurement is None:
            return None
        return Planned(plan=self.plan, measured=self.measurement, memory=self._memory)
