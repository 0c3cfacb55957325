"""What the ranks that train one model decide together: the mode of each layer, the host budget, the profile, plans.

Made by the session, which tells it of each training forward pass; a single process never gets past that. The ranks tell
each other what they know at forward passes 1, 2, 4, 8, ... and at the first one after an optimizer's first step, which
all of them reach alike. In between each decides for itself from what was agreed and from the shape of its own batch:
ranks with the same shape decide the same, and ranks with other shapes may differ, since neither chunks nor fractions
issue a collective under DDP, FSDP2 and ZeRO. Knows the agreement and the planners; no layer.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook

import memo_hf
from memo_hf.agreement import Agreement, ranks_training, require_same
from memo_hf.config import MemoConfig
from memo_hf.errors import HostMemoryError
from memo_hf.planner.budgets import host_budget_bytes
from memo_hf.planning import PlannerFacts

logger = logging.getLogger("memo_hf")
# Of MemoConfig: what is the machine's own, where ranks may differ and the least counts.
_OF_A_MACHINE = {"host_memory", "host_memory_for_others", "device_memory", "plan_file", "plan_folder"}


@dataclass(frozen=True)
class _Facts:
    """What one rank tells."""

    settings: dict
    whole_layers: dict[str, str]  # in layer mode: name and reason
    node: str
    node_bytes: int  # of host memory, for all of its ranks; 0 with the reason beside it where none is left
    why_none: str
    planners: list[PlannerFacts]


@dataclass(frozen=True)
class HostShare:
    """The host bytes that every rank may take: those of `rank`, which may take the least."""

    num_bytes: int
    rank: int


class JointDecisions:
    """What one session decides with the sessions of the other ranks.

    Args:
        session: whose model is trained.

    Attributes:
        host_share: as agreed, or None in a single process.
    """

    def __init__(self, session):
        self._session = weakref.ref(session)
        self._ranks: Sequence[int] | None = None
        self._agreement: Agreement | None = None
        self._node: tuple[str, int, str] | None = None
        self._passes, self._has_stepped, self._knows_of_step = 0, False, False
        self._remove_hook = lambda: None
        self.host_share: HostShare | None = None

    @property
    def ranks(self) -> Sequence[int] | None:
        """The ranks that agree, or None where this process trains alone or has not trained yet."""
        return None if self._agreement is None else self._agreement.ranks

    def train_with(self, ranks: Sequence[int]) -> None:
        """`ranks` train this model together, as from the next forward pass; for engines that leave no mark on it."""
        if len(ranks) > 1:
            self._ranks = sorted(ranks)

    def begin_forward(self, device: torch.device) -> None:
        """A training forward pass begins on `device`, whether memo_hf runs it or it is too short to gain.

        Raises:
            RankError: ranks disagree, or one does not come.
            HostMemoryError: one has no host memory left.
        """
        session = self._session()
        if self._agreement is None:
            ranks = self._ranks or ranks_training(session.model)
            if ranks is None:
                return
            self._agreement = Agreement.of(ranks)
            self._watch_optimizers()
        self._passes += 1
        stepped = self._has_stepped and not self._knows_of_step
        if self._passes & (self._passes - 1) and not stepped:
            return
        self._knows_of_step |= stepped
        told = self._agreement.exchange(f"training forward pass {self._passes}", self._facts(device))
        require_same({rank: facts.settings for rank, facts in told.items()}, "give every rank the same")
        self._agree_on_modes(told)
        self._agree_on_host(told)
        for planner, *facts in zip(session.planners, *(facts.planners for facts in told.values()), strict=True):
            planner.agree(facts)

    def close(self) -> None:
        """Forget the others; they hear nothing of it."""
        self._remove_hook()
        self._agreement = None

    def _facts(self, device: torch.device) -> _Facts:
        session, config = self._session(), self._session().config
        if self._node is None:
            self._node = _node(config, session.host_bytes_for_others())
        node, node_bytes, why_none = self._node
        reads_plans = self._agreement.rank == self._agreement.ranks[0]
        return _Facts(
            settings=_settings(session),
            whole_layers={layer.name: layer.reason for layer in session.layers if layer.mode == "layer"},
            node=node,
            node_bytes=node_bytes,
            why_none=why_none,
            planners=[planner.facts(device, reads_plans=reads_plans) for planner in session.planners],
        )

    def _agree_on_modes(self, told: dict[int, _Facts]) -> None:
        """A layer that one rank runs whole, for whatever reason, is run whole by all."""
        here = told[self._agreement.rank].whole_layers
        for rank, facts in told.items():
            others = {name: f"rank {rank}: {why}" for name, why in facts.whole_layers.items() if name not in here}
            if others:
                here = {**here, **others}
                self._session().run_whole(others)

    def _agree_on_host(self, told: dict[int, _Facts]) -> None:
        if self.host_share is not None:
            return  # What is free now is less by what this run has taken.
        for rank, facts in told.items():
            if facts.why_none:
                raise HostMemoryError(f"rank {rank} has no host memory left: {facts.why_none}")
        on_node = Counter(facts.node for facts in told.values())
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by launchers; some do not
        shares = {rank: facts.node_bytes // max(on_node[facts.node], local_ranks) for rank, facts in told.items()}
        least = min(shares, key=shares.get)
        self.host_share = HostShare(shares[least], least)

    def _watch_optimizers(self) -> None:
        me = weakref.ref(self)

        def stepped(optimizer, *_):  # any of the process; another one's may step on some ranks alone
            session = me() and me()._session()
            if session is None or me()._has_stepped:
                return
            ours = {id(parameter) for parameter in session.model.parameters()}
            me()._has_stepped = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

        self._remove_hook = weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)


def _node(config: MemoConfig, other_bytes: int) -> tuple[str, int, str]:
    try:
        return socket.gethostname(), host_budget_bytes(config.host_memory_bytes, other_bytes=other_bytes), ""
    except HostMemoryError as error:  # Told to the others, who would wait for this rank.
        return socket.gethostname(), 0, str(error)


def _settings(session) -> dict:
    """What all ranks must have alike."""
    chosen = {name: value for name, value in dataclasses.asdict(session.config).items() if name not in _OF_A_MACHINE}
    return {
        "the model": type(session.model).__name__,
        "the number of its layers": len(session.layers),
        "the number of its stacks of layers": len(session.planners),
        "memo_hf": memo_hf.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{f"MemoConfig.{name}": value for name, value in chosen.items()},
    }
