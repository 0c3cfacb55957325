"""`Agreement`: what several ranks that train one model tell each other, now and then and never at each step.

    ranks = ranks_training(model)                 # None in a single process, or before the model is wrapped
    agreement = Agreement.of(ranks)
    by_rank = agreement.exchange("pass 1", facts)  # {rank: facts}; every rank calls it, with the same text
    require_same({rank: facts.settings for rank, facts in by_rank.items()}, "give every rank the same settings")

It goes through the store by which the ranks found each other (`torch.distributed`'s own, on the host), so that it costs
no device memory, no process group and no order among the engine's collectives. What each rank is to tell at once must
come at a moment that all ranks reach alike, such as a numbered training forward pass: see `joint.py`. A rank that does
not come, dead or elsewhere, ends in a `RankError` that names it on all others, after the time that the process group
was given (`ddp_timeout` in TrainingArguments). Called by `joint.py`; knows nothing of sessions and plans.
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memo_hf.errors import RankError

logger = logging.getLogger("memo_hf")
_PATIENCE = timedelta(seconds=60)  # without a word about who is waited for
_numbers: Counter[str] = Counter()  # of agreements among the same ranks: one after the other, on all of them alike


class Agreement:
    """The ranks that train one model, as one of them sees it.

    Args:
        store: where they leave what they tell; shared by all of them.
        rank: this one.
        ranks: all of them.
        timeout: how long one is waited for.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, name: str = "memo_hf"):
        self.rank, self.ranks = rank, tuple(ranks)
        self._store, self._timeout, self._name = store, timeout, name
        self._round = 0

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Agreement:
        """An agreement among `ranks` of the default process group, this one included. Each of them makes one."""
        if not dist.is_initialized():
            raise RankError("torch.distributed is not initialised, so there are no ranks that could agree")
        name = "memo_hf/" + ".".join(map(str, ranks))
        _numbers[name] += 1
        store = _get_default_store()
        return cls(store, dist.get_rank(), ranks, store.timeout, f"{name}/{_numbers[name]}")

    def exchange(self, what: str, facts) -> dict[int, object]:
        """Tell `facts` (anything that pickles) and hear those of the others, by rank in ascending order.

        Waits for all ranks to come. Raises `RankError` where one does not, or comes with another `what`.
        """
        self._round += 1
        try:
            self._store.set(self._key(self.rank), pickle.dumps((what, facts)))
            self._wait_for_all(what)
            told = {rank: pickle.loads(self._store.get(self._key(rank))) for rank in self.ranks}
            if self._round > 1:  # all have come here, so all have read what was told before
                self._store.delete_key(self._key(self.rank, self._round - 1))
        except dist.DistError as error:
            raise RankError(
                f"rank {self.rank} cannot reach the others at {what}: {error}. The rank that holds their store, "
                "usually rank 0, has ended; look at its own error"
            ) from error
        require_same({rank: {"at": at} for rank, (at, _) in told.items()}, "start them anew from one checkpoint")
        return {rank: facts for rank, (_, facts) in told.items()}

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._name}/{number or self._round}/{rank}"

    def _wait_for_all(self, what: str) -> None:
        keys = [self._key(rank) for rank in self.ranks]
        first = min(_PATIENCE, self._timeout)
        for seconds in (first, self._timeout - first):
            try:
                self._store.wait(keys, max(seconds, timedelta(milliseconds=1)))
                return
            except RuntimeError:  # of a kind that differs between stores; one that is gone fails below as well
                missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self._store.check([key])]
                if not missing:
                    return
            if seconds is first:
                logger.warning(f"memo_hf: rank {self.rank} waits for {_named(missing)} at {what}")
        raise RankError(
            f"{_named(missing)} did not come to {what} within {self._timeout.total_seconds():g} s, where rank "
            f"{self.rank} waits: dead, or training another model or another number of batches. Look at its own output; "
            "a longer wait is set by the process group's timeout (ddp_timeout in TrainingArguments)"
        )


def require_same(facts: dict[int, dict], advice: str) -> None:
    """Raise `RankError`, naming the ranks and what differs, unless all dictionaries in `facts`, by rank, are equal."""
    first = next(iter(facts.values()))
    for name in sorted(set().union(*facts.values())):
        if all(told.get(name) == first.get(name) for told in facts.values()):
            continue
        by_value: dict[str, list[int]] = {}
        for rank, told in facts.items():
            by_value.setdefault(repr(told.get(name)), []).append(rank)
        values = ", ".join(f"{value} on {_named(ranks)}" for value, ranks in by_value.items())
        raise RankError(f"the ranks do not train alike: {name} is {values}; {advice}")


def ranks_training(model: nn.Module) -> list[int] | None:
    """The ranks that train `model` with this one, asked for in its forward pass; None where nobody else is known to.

    Known are DDP, FSDP2, tensor parallelism and ZeRO-3. ZeRO-1 and 2 leave no mark on the model: whoever sets them up
    says so (`Session.train_with`). Within DDP's `join` each rank is on its own: one may have more batches than others.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    replicas = DistributedDataParallel._get_active_ddp_module()
    if replicas is not None and replicas._join_config.enable:
        return None
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is not None and replicas is None:
        ranks = mesh.mesh.flatten().tolist()
    elif mesh is None and replicas is not None:
        ranks = dist.get_process_group_ranks(replicas.process_group)
    elif mesh is not None or any(isinstance(module, FSDPModule) for module in model.modules()):
        ranks = list(range(dist.get_world_size()))
    elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        ranks = list(range(dist.get_world_size()))
    else:
        return None
    return sorted(ranks) if len(ranks) > 1 else None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
