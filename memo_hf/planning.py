"""How each training forward pass of a stack runs: profiles the first one, solves for the rest, remembers plans.

Made by the session, one for each stack, and asked by the patched stack before each pass. What is set by hand is left
alone. Knows no layer's code: what it hands out are numbers, and who measures.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from memo_hf.config import MemoConfig
from memo_hf.errors import DeviceMemoryError, HostMemoryError
from memo_hf.forecasting.running import Held, RunForecast, describe_run, run_peaks
from memo_hf.layers.zero import held_bytes
from memo_hf.plan_file import PlanFile
from memo_hf.planner.budgets import device_budget_bytes
from memo_hf.planner.chunks import default_chunk_tokens
from memo_hf.planner.layer_costs import Budgets, LayerCosts, estimated_peaks, predict
from memo_hf.planner.plan import Measurement, PlanBook, Shape, joint_measurement
from memo_hf.planner.step_times import StepTimes
from memo_hf.planner.swap_fraction import SwapPlan, solve_swap_plan
from memo_hf.profiler import Profile
from memo_hf.swap import SwapEngine

logger = logging.getLogger("memo_hf")
# Of the host budget, for what blocks of unequal size leave unused between them.
_USABLE_HOST = 0.95
# Forward passes that may begin before the profiled one's backward has ended; then another is profiled.
_PATIENCE = 8
# Ranks tell each other this often before those that have a profile go on without those that have none.
_ROUNDS = 3
# A plan is made again where the device holds this much more than when it was made (optimizer states came).
_GROWTH = 1.02
_CPU_LIMIT = "CPU: fraction 0 takes the least memory; set device_memory to have it solved for"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one forward pass runs; fields as in `Step` and `StepSettings`."""

    swap_fraction: float
    rebuild_qkv: bool
    first_kept: int
    whole_layers: frozenset[int] = frozenset()
    observer: Profile | None = None


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
        attends: some of them run in token mode, so that there is something to choose.
        share: of the host budget and of the plan file; the first stack alone keeps plans in a file.
    """

    def __init__(self, config: MemoConfig, model: nn.Module, layers: list[nn.Module], *, attends: bool, share=(0, 1)):
        self._config, self._model, self._layers = config, model, layers
        self._file = PlanFile(config, model, layers, is_kept=share[0] == 0)
        self._num_stacks = share[1]
        self._solves = config.swap_fraction is None and attends
        self._first_kept = max(0, len(layers) - config.unswapped_layers)
        self._book: PlanBook | None = None
        self._profile = lambda: None  # a weak reference to the one under way
        self._done: tuple[Profile, Shape, float] | None = None
        self._retreats = self._waited = 0
        self._static_bytes = 0.0
        self._made_at: dict[Shape, float] = {}  # static bytes when the plan was made, or checked if it came from a file
        self._held = Held(0.0, 0.0)
        self._device_bytes = float("inf")
        self._times = StepTimes()
        self._rest_per_token: float | None = None  # seconds outside of the layers, by steps after the measured one
        self._host_bytes = 0.0
        self._is_alone = True  # no other rank trains with this one, as far as it knows
        self._num_agreed = 0
        self._found: Measurement | None = None  # by this rank
        self.sequence_parallel = 1  # how many ranks share a sequence; shapes are of one of them
        self.plan: SwapPlan | None = None
        self.choice = Choice(
            swap_fraction=config.swap_fraction or 0.0, rebuild_qkv=config.qkv == "rebuild", first_kept=self._first_kept
        )
        self.binding_limit = "not known yet: the first training step is measured at fraction 0"
        # A plan is to be made from a measured step, and is not made yet.
        self.is_measuring = self._solves
        if self._solves and config.device_memory is None and not torch.accelerator.is_available():
            self.is_measuring, self.binding_limit = False, _CPU_LIMIT
        if config.swap_fraction is not None:
            self.binding_limit = f"swap_fraction: set to {config.swap_fraction:g} by hand"
        elif not attends:
            self.binding_limit = "layers: none runs in token mode, so there is no fraction to choose"

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
        if shape != self._times.shape:
            self._learn_rest()
            if not self._solves_on(engine.device):
                self._set_device(*self._read_device(engine.device))  # for the forecast alone
        self._times.begin(shape, now)
        if not self._solves:
            return self.choice
        if not self._solves_on(engine.device):
            self.is_measuring, self.binding_limit = False, _CPU_LIMIT
            return self.choice
        self._host_bytes = _USABLE_HOST * host_bytes / self._num_stacks
        if self._is_alone:
            self._set_device(*self._know(engine.device))
            self._book.measurement = self._book.measurement or self._found
        if self._book.measurement is None:
            chosen = self._profiled(engine, shape, now)
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
            self._found, self._book = self._book.measurement, None
            self._made_at.clear()
        self._is_alone = False
        if not self._solves_on(device):
            return None
        held, device_bytes = self._know(device, reads_plans=reads_plans)
        book = self._book if reads_plans and self._book.measurement is not None else None
        return PlannerFacts(held=held, device_bytes=device_bytes, measurement=self._found, book=book)

    def agree(self, facts: list[PlannerFacts | None]) -> None:
        """Take what holds for every rank: the slowest and the largest of their profiles, the least of their memories.

        Args:
            facts: of all ranks, in the same order on each.
        """
        if None in facts:
            if any(facts) and self._solves:
                self._solves = self.is_measuring = False
                self.binding_limit = "another rank has nothing to choose, so the swap fraction stays 0 on all"
            return
        self._num_agreed += 1
        held = Held(max(f.held.static_bytes for f in facts), max(f.held.gradient_bytes for f in facts))
        self._set_device(held, min(f.device_bytes for f in facts))
        if self._book.measurement is not None:
            return
        books = [f.book for f in facts if f.book is not None]
        found = [f.measurement for f in facts if f.measurement is not None]
        if books:
            self._book = books[0]
        elif len(found) == len(facts) or found and self._num_agreed > _ROUNDS:
            self._book.measurement = joint_measurement(found)
            self._times.restart()

    @property
    def measurement(self) -> Measurement | None:
        """What the profiled step found, once it has been read."""
        return None if self._book is None else self._book.measurement

    @property
    def _qkv(self) -> str | None:
        """What may become of q, k and v; None: either. To rebuild them would take all-to-alls in backward."""
        return "swap" if self.sequence_parallel > 1 else self._config.qkv

    def retreat(self) -> bool:
        """The host budget does not suffice for the pass to be profiled: whether a smaller one is left to try."""
        levels = 1 if self._qkv == "swap" else 2
        if not self._solves or (self._book is not None and self._book.measurement) or self._retreats >= levels:
            return False
        self._retreats += 1
        self._profile = lambda: None
        return True

    def _profiled(self, engine: SwapEngine, shape: Shape, now: float) -> Choice:
        """Fraction 0, under measurement unless an earlier pass's backward is still to come."""
        last = 2 if self._qkv != "swap" else 1
        whole = self._retreats == last and self._retreats > 0
        rebuilds = self._qkv == "rebuild" or (self._retreats > 0 and self.sequence_parallel == 1)
        profile = self._profile()
        if self._found is not None or self._done is not None:
            profile = None  # measured; other ranks are not that far
        elif profile is not None and self._waited < _PATIENCE:
            self._waited += 1
            profile = None
        else:
            self._waited = 0
            profile = Profile(
                engine,
                shape.batch * shape.seq_len,
                rebuilds_qkv=rebuilds,
                on_end=lambda ended: self._note(ended, shape, now),
            )
            self._profile = weakref.ref(profile)
        return Choice(
            swap_fraction=0.0,
            rebuild_qkv=rebuilds,
            first_kept=self._first_kept,
            whole_layers=frozenset(range(self._first_kept)) if whole else frozenset(),
            observer=profile,
        )

    def _note(self, profile: Profile, shape: Shape, began: float) -> None:
        """The profiled pass has been through backward. What it found is read later: a GPU may not be there yet."""
        self._done = (profile, shape, began)

    def _learn(self, held: Held) -> None:
        profile, shape, began = self._done
        self._done = None
        layers = profile.costs(self._first_kept)
        to_host, to_device = profile.rates()
        rest = time.perf_counter() - began - profile.layers_seconds()
        self._found = Measurement(
            shape=shape,
            layers=layers,
            windows=tuple(self._own_window(self._layers[indices[0]]) for indices in profile.kinds),
            static_bytes=held.static_bytes + held.gradient_bytes,
            rest_seconds=max(0.0, rest),
            to_host_bytes_per_second=to_host,
            to_device_bytes_per_second=to_device,
            indices=tuple(tuple(indices) for indices in profile.kinds),
        )
        self._times.restart()  # the profiled step was slower than others

    def _plan_for(self, shape: Shape) -> SwapPlan:
        plan, made_at = self._book.get(shape), self._made_at.get(shape.bucket())
        if plan is not None and made_at is None:
            if plan.host_bytes <= self._host_bytes and plan.device_bytes <= self._device_bytes:
                made_at = self._made_at[shape.bucket()] = self._static_bytes
        if made_at is not None and self._static_bytes <= _GROWTH * made_at:
            return plan
        plan = self._solve(shape.bucket())
        self._made_at[shape.bucket()] = self._static_bytes
        self._book.put(shape, plan)
        self.binding_limit = plan.binding_limit
        logger.info(
            f"memo_hf: plan for {shape.batch} x {shape.bucket().seq_len} tokens: {plan.strategy}, swap fraction "
            f"{plan.swap_fraction:.3f}, q/k/v {plan.qkv}; {plan.binding_limit}"
        )
        self._file.save(self._book)
        return plan

    def _solve(self, shape: Shape) -> SwapPlan:
        measured = self._book.measurement
        layers, checkpoint_bytes = self._costs(shape)
        options = dict(
            rest_seconds=measured.rest_seconds_at(shape),
            qkv=self._qkv,
            checkpoint_device_bytes=checkpoint_bytes,
        )
        try:
            try:
                return solve_swap_plan(layers, self._budgets(), **options)
            except (HostMemoryError, DeviceMemoryError):
                # Layers that stay on the device are given up where that is what it takes.
                moved = [dataclasses.replace(costs, num_kept=0) for costs in layers]
                return solve_swap_plan(moved, self._budgets(), **options)
        except (HostMemoryError, DeviceMemoryError) as error:
            logger.warning(f"memo_hf: no plan is predicted to fit, so the swap fraction stays 0: {error}")
            unlimited = dataclasses.replace(self._budgets(), host_bytes=float("inf"), device_bytes=float("inf"))
            qkv = self._qkv or "rebuild"
            plan = solve_swap_plan(layers, unlimited, **{**options, "qkv": qkv}, swap_fraction=0.0)
            return dataclasses.replace(plan, binding_limit=str(error))

    def _costs(self, shape: Shape) -> tuple[list[LayerCosts], float]:
        """The layers' costs at `shape`, with what the device holds at worst, and the peak of checkpointing."""
        layers = self._book.measurement.layers_at(shape)
        run = describe_run(self._model, self._config, shape, sequence_parallel=self.sequence_parallel)
        if run is None:
            # Not a model that the forecast describes. Checkpointing: h of all layers, and one layer with its gradients.
            tokens, device_type = shape.batch * shape.seq_len, next(self._layers[0].parameters()).device.type
            chunk = min(tokens, self._config.chunk_size or default_chunk_tokens(tokens, device_type))
            sums = max(sum(4 * p.numel() for p in layer.parameters() if p.requires_grad) for layer in self._layers)
            peaks = estimated_peaks(layers, self._static_bytes + sums, chunk / tokens)
            at_work = max(c.whole_bytes("swap") + c.others_bytes for c in layers)
            checkpoint_bytes = self._static_bytes + sum(c.num_layers * c.input_bytes for c in layers) + 2 * at_work
        else:
            peaks, checkpoint_bytes = run_peaks(run, self._held)
        return [dataclasses.replace(costs, device_peaks=peaks) for costs in layers], checkpoint_bytes

    def _budgets(self) -> Budgets:
        measured = self._book.measurement
        return Budgets(
            host_bytes=self._host_bytes,
            device_bytes=self._device_bytes,
            to_host_bytes_per_second=measured.to_host_bytes_per_second,
            to_device_bytes_per_second=measured.to_device_bytes_per_second,
        )

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
        tokens = self._times.shape.seq_len
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

    def _know(self, device: torch.device, *, reads_plans: bool = True) -> tuple[Held, float]:
        """Read what this rank can: plans, the profile where there is one, and the device's memory, as returned."""
        held = self._read_device(device)
        if self._book is None:
            if reads_plans:
                self._book = self._file.load(device, self.sequence_parallel)
            else:
                self._book = PlanBook(self._file.fingerprint(device, self.sequence_parallel))
        if self._done is not None:
            self._learn(held[0])
        return held

    def _set_device(self, held: Held, device_bytes: float) -> None:
        self._held, self._device_bytes = held, device_bytes
        self._static_bytes = held.static_bytes + held.gradient_bytes

    def _read_device(self, device: torch.device) -> tuple[Held, float]:
        """What the device holds whatever the shape, and what it may hold in all."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)
            free, total = torch.cuda.mem_get_info(device)
            limit = device_budget_bytes(free + torch.cuda.memory_reserved(device), total_bytes=total)
        else:
            held, limit = sum(held_bytes(p) for p in self._model.parameters()), float("inf")
            held += sum(p.grad.nbytes for p in parameters if p.grad is not None)
        asked = self._config.bytes_of("device_memory")
        gradients = float(sum(p.nbytes for p in parameters if p.grad is None))
        return Held(float(held), gradients), float(limit if asked is None else min(asked, limit))

    def _own_window(self, layer: nn.Module) -> int | None:
        """How far back the attention of `layer` looks, or None; of this rank's tokens, by which shapes are known."""
        window = _window(layer)
        return window and max(1, window // self.sequence_parallel)

    # Forecast beside measured.

    @property
    def device_budget_bytes(self) -> float | None:
        """What training may take on the device, or None where that is not known or not bounded."""
        return self._device_bytes if 0 < self._device_bytes < float("inf") else None

    def forecast(self) -> RunForecast | None:
        """What a step of the last shape takes as `choice` has it, or None where that cannot be said."""
        choice = self.choice
        shape = self._times.shape
        run = shape and describe_run(self._model, self._config, shape, choice.swap_fraction, self.sequence_parallel)
        if run is None or choice.whole_layers:
            return None
        qkv = "rebuild" if choice.rebuild_qkv else "swap"
        found = run.forecast(qkv, len(self._layers) - choice.first_kept, self._held)
        return dataclasses.replace(found, step_seconds=self._predicted_seconds())

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

    def compare(self, swapped_bytes: int, device_peak_bytes: int | None) -> list[tuple[str, str, float, float]]:
        """(what, unit, forecast, measured) of the last shape that ran, for what is known.

        Args:
            swapped_bytes: by the last forward pass.
            device_peak_bytes: as somebody measured it, or None.
        """
        forecast, found = self.forecast(), []
        if forecast is not None:
            found.append(("host bytes", "B", forecast.host_bytes, swapped_bytes))
            if device_peak_bytes is not None:
                found.append(("device peak", "B", forecast.device_bytes, device_peak_bytes))
        measured, predicted = self._times.median, self._predicted_seconds()
        if measured is not None and predicted is not None:
            found.append(("step", "s", predicted, measured))
        return found

    def _predicted_seconds(self) -> float | None:
        if self.plan is None or self.plan.strategy != "memo" or self._book.measurement is None:
            return None
        rest = self._book.measurement.rest_seconds_at(self._times.shape)
        if self._rest_per_token is not None:
            rest = min(rest, self._rest_per_token * self._times.shape.num_tokens)
        return self._predicted_layers() + rest

    def _predicted_layers(self) -> float:
        layers = self._book.measurement.layers_at(self._times.shape)
        return predict(layers, self._budgets(), self.plan.qkv, self.plan.kinds).step_seconds

    def _learn_rest(self) -> None:
        """Steps of a shape end. What they took beside the layers was more in the measured step, a process's first."""
        measured = self._times.median
        if measured is not None and self._predicted_seconds() is not None:
            beside = max(0.0, measured - self._predicted_layers())
            self._rest_per_token = beside / self._times.shape.num_tokens


def _window(layer: nn.Module) -> int | None:
    """How far back the attention of `layer` looks, or None."""
    found = (getattr(module, "sliding_window", None) for module in layer.modules())
    return next((window for window in found if isinstance(window, int) and window > 0), None)
