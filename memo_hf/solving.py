"""Solves for how the steps of one stack run, from what was measured and the memory that there is.

Asked by `planning`, which remembers the answers, and by `step_forecast` for the seconds of one. Knows the model's sizes
and no layer's code.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import torch
from torch import nn

from memo_hf.config import MemoConfig
from memo_hf.errors import DeviceMemoryError, HostMemoryError
from memo_hf.forecasting.running import Held, RunForecast, describe_run, run_peaks
from memo_hf.layers.zero import held_bytes
from memo_hf.optimizer_states import local_bytes
from memo_hf.planner.budgets import device_budget_bytes
from memo_hf.planner.chunks import default_chunk_tokens
from memo_hf.planner.layer_costs import Budgets, LayerCosts, estimated_peaks, predict
from memo_hf.planner.plan import Measurement, Shape
from memo_hf.planner.swap_fraction import SwapPlan, least_plan, solve_swap_plan

logger = logging.getLogger("memo_hf")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What steps of a stack find, whatever their shape.

    Attributes:
        held: of the device's memory.
        device_bytes: of it that training may take in all; infinite where nothing bounds it.
        host_bytes: for what this stack swaps.
    """

    held: Held = Held(0.0, 0.0)
    device_bytes: float = float("inf")
    host_bytes: float = 0.0

    @property
    def static_bytes(self) -> float:
        """Of the device's memory, once all gradients are there."""
        return self.held.static_bytes + self.held.gradient_bytes


def read_device(model: nn.Module, config: MemoConfig, device: torch.device, state_bytes: int) -> Memory:
    """What `device` holds now, `state_bytes` of it optimizers' states, and may hold in all, as set or as it is free."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        limit = device_budget_bytes(free + torch.cuda.memory_reserved(device), total_bytes=total)
    else:
        held, limit = sum(held_bytes(p) for p in model.parameters()), float("inf")
        held += sum(local_bytes(p.grad) for p in parameters if p.grad is not None) + state_bytes
    asked = config.bytes_of("device_memory")
    gradients = float(sum(local_bytes(p) for p in parameters if p.grad is None))
    return Memory(held=Held(float(held), gradients), device_bytes=float(limit if asked is None else min(asked, limit)))


class StackSolver:
    """The plans of one stack.

    Args:
        config: the settings.
        model: the whole model.
        layers: the decoder layers of the stack.

    Attributes:
        sequence_parallel: how many ranks share a sequence; shapes are of one of them.
    """

    def __init__(self, config: MemoConfig, model: nn.Module, layers: list[nn.Module]):
        self._config, self._model, self._layers = config, model, layers
        self.sequence_parallel = 1

    @property
    def qkv(self) -> str | None:
        """What may become of q, k and v; None: either. To rebuild them would take all-to-alls in backward."""
        return "swap" if self.sequence_parallel > 1 else self._config.qkv

    def solve(self, measured: Measurement, shape: Shape, memory: Memory) -> SwapPlan:
        """The plan with the shortest predicted step at `shape`.

        Where none is predicted to fit, says so and returns the one that comes nearest, with the reason as its limit.
        """
        layers, checkpoint_bytes = self._costs(measured, shape, memory, self._config.unswapped_layers)
        moved, _ = self._costs(measured, shape, memory, 0)
        budgets = _budgets(measured, memory)
        options = dict(
            rest_seconds=measured.rest_seconds_at(shape), qkv=self.qkv, checkpoint_device_bytes=checkpoint_bytes
        )
        try:
            return solve_swap_plan(layers, budgets, without_kept=moved, **options)
        except (HostMemoryError, DeviceMemoryError) as error:
            logger.warning(f"memo_hf: no plan is predicted to fit; the nearest is tried: {error}")
            plan = least_plan(layers, moved, budgets=budgets, **options)
            return dataclasses.replace(plan, binding_limit=str(error))

    def layers_seconds(self, plan: SwapPlan, measured: Measurement, shape: Shape, memory: Memory) -> float:
        """What the layers take of a step at `shape` by `plan`, as predicted."""
        layers = measured.layers_at(shape)
        return predict(layers, _budgets(measured, memory), plan.qkv, plan.kinds).step_seconds

    def forecast(
        self, shape: Shape, memory: Memory, *, swap_fraction: float, rebuilds_qkv: bool, num_kept: int
    ) -> RunForecast | None:
        """Bytes of a step at `shape` that runs so, or None for a model that the forecast does not describe."""
        run = describe_run(self._model, self._config, shape, swap_fraction, self.sequence_parallel)
        return run and run.forecast("rebuild" if rebuilds_qkv else "swap", num_kept, memory.held)

    def own_window(self, layer: nn.Module) -> int | None:
        """How far back the attention of `layer` looks, or None; of this rank's tokens, by which shapes are known."""
        found = (getattr(module, "sliding_window", None) for module in layer.modules())
        window = next((window for window in found if isinstance(window, int) and window > 0), None)
        return window and max(1, window // self.sequence_parallel)

    def _costs(
        self, measured: Measurement, shape: Shape, memory: Memory, num_kept: int
    ) -> tuple[list[LayerCosts], float]:
        """The layers' costs at `shape`, with what the device holds at worst, and the peak of checkpointing.

        Args:
            num_kept: 0 where no layer stays on the device; otherwise those stay that did when it was measured.
        """
        layers = measured.layers_at(shape)
        if not num_kept:
            layers = tuple(dataclasses.replace(costs, num_kept=0) for costs in layers)
        config = dataclasses.replace(self._config, unswapped_layers=num_kept)
        run = describe_run(self._model, config, shape, sequence_parallel=self.sequence_parallel)
        if run is None:
            # Not a model that the forecast describes. Checkpointing: h of all layers, and one layer with its gradients.
            tokens, device_type = shape.batch * shape.seq_len, next(self._layers[0].parameters()).device.type
            chunk = min(tokens, self._config.chunk_size or default_chunk_tokens(tokens, device_type))
            sums = max(sum(4 * p.numel() for p in layer.parameters() if p.requires_grad) for layer in self._layers)
            peaks = estimated_peaks(layers, memory.static_bytes + sums, chunk / tokens)
            at_work = max(c.whole_bytes("swap") + c.others_bytes for c in layers)
            checkpoint_bytes = memory.static_bytes + sum(c.num_layers * c.input_bytes for c in layers) + 2 * at_work
        else:
            peaks, checkpoint_bytes = run_peaks(run, memory.held)
        return [dataclasses.replace(costs, device_peaks=peaks) for costs in layers], checkpoint_bytes


def _budgets(measured: Measurement, memory: Memory) -> Budgets:
    return Budgets(
        host_bytes=memory.host_bytes,
        device_bytes=memory.device_bytes,
        to_host_bytes_per_second=measured.to_host_bytes_per_second,
        to_device_bytes_per_second=measured.to_device_bytes_per_second,
    )
