"""What a session says of itself at one moment: plain values, frozen. Made by the session; rendered by `run_report`."""

from __future__ import annotations

from dataclasses import dataclass

from memo_hf.planner.swap_fraction import QKV_IN_WORDS
from memo_hf.units import format_bytes


@dataclass(frozen=True)
class LayerStats:
    """One layer: its path in the model, 'token' or 'layer', and why."""

    name: str
    mode: str
    reason: str


@dataclass(frozen=True)
class ServingStats:
    """Who serves a session's memory, and how, since the session began.

    Attributes:
        allocator: 'planned' or 'stock'; the figures say nothing under 'stock'.
        reason: why it is that one.
        served_share: of the requests in steps that have a plan, how many got the planned address; None before that.
        arena_bytes: device memory held for planned addresses now.
        planned_bytes: bytes requested that got a planned address, summed up.
        dynamic_bytes: bytes requested that did not, steps without a plan and evaluation included, summed up.
    """

    allocator: str = "stock"
    reason: str = "asked for"
    served_share: float | None = None
    arena_bytes: int = 0
    planned_bytes: int = 0
    dynamic_bytes: int = 0

    def describe(self) -> str:
        """One line."""
        if self.allocator == "stock":
            return f"stock allocator: {self.reason}"
        if self.served_share is None:
            return "planned allocator: no step has been served from a plan yet"
        return (
            f"planned allocator: {format_bytes(self.arena_bytes)} at planned addresses, "
            f"{self.served_share:.2%} of requests served there"
        )


@dataclass(frozen=True)
class SessionStats:
    """What a session does and has done, at one moment.

    Attributes:
        layers: every decoder layer with its mode and the reason for it.
        phase: "measuring" while the first training step is measured and no plan is made from it yet, else "running".
        swap_fraction: fraction of tokens that is swapped rather than recomputed, in the last forward pass.
        qkv: "swap" or "rebuild", in the last forward pass.
        strategy: "memo", or "checkpoint" where activation checkpointing is predicted to be as fast and runs instead.
        binding_limit: in words, what keeps the step from being shorter.
        chunk_size: tokens of the whole batch in a chunk, of the last forward pass (0 before the first).
        planned_bytes: bytes that a forward pass of the last one's shape is to swap.
        swapped_bytes: bytes that the last forward pass has swapped to the host.
        prefetched_bytes: bytes that came back since that forward pass began.
        total_swapped_bytes: bytes swapped since the session began.
        host_bytes: bytes of swapped activations on the host now.
        peak_host_bytes: the most there has been.
        host_reserved_bytes: host memory taken for them, never more than the budget.
        host_budget_bytes: the budget of this rank; None before the first forward pass.
        forwards: training forward passes that memo_hf ran.
        stock_forwards: training forward passes that ran untouched, being too short to gain.
        total_tokens: tokens of both kinds of forward passes, padding included.
        serving: who serves the device's memory, and how much of it at planned addresses.
    """

    layers: tuple[LayerStats, ...]
    phase: str
    swap_fraction: float
    qkv: str
    strategy: str
    binding_limit: str
    chunk_size: int
    planned_bytes: int
    swapped_bytes: int
    prefetched_bytes: int
    total_swapped_bytes: int
    host_bytes: int
    peak_host_bytes: int
    host_reserved_bytes: int
    host_budget_bytes: int | None
    forwards: int
    stock_forwards: int
    total_tokens: int
    serving: ServingStats

    def untouched(self, min_tokens: int) -> str | None:
        """What ran without memo_hf, being shorter than `min_tokens`, in words; None where nothing was."""
        if not self.stock_forwards:
            return None
        batches = self.stock_forwards + self.forwards
        return (
            f"untouched: {self.stock_forwards:,} of {batches:,} batch{'es' if batches > 1 else ''} "
            f"{'were' if self.stock_forwards > 1 else 'was'} shorter than min_tokens={min_tokens:,}"
        )

    def describe(self) -> str:
        """One line: how many layers run in which mode, the swap fraction, and what decided it."""
        if self.strategy == "checkpoint":
            way = f"{len(self.layers)} layers under activation checkpointing, nothing swapped"
        else:
            modes = [layer.mode for layer in self.layers]
            counted = ", ".join(f"{modes.count(mode)} layers in {mode} mode" for mode in dict.fromkeys(modes))
            way = f"{counted}; swap fraction {self.swap_fraction:.3g}, {QKV_IN_WORDS[self.qkv]}"
        return f"memo_hf: {way}; decided by {self.binding_limit}"
