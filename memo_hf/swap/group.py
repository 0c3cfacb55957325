"""What one layer's forward saves: groups of storages, and the handles that get tensors back.

Groups are made by `SwapEngine.open_group` and used by `layers`. They know which storages belong together and how
tensors lie in them; when copies run and when memory may be used again is the engine's part, and its lock guards both.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from memo_hf.errors import MemoError
from memo_hf.swap.copy_backend import Copy
from memo_hf.swap.host_pool import Block
from memo_hf.swap.storage import (
    VersionWatch,
    View,
    can_swap,
    dense_part,
    dense_view,
    is_small_part,
    memoryless_alias,
    storage_key,
)

if TYPE_CHECKING:
    from memo_hf.swap.engine import SwapEngine


class Stored:
    """The bytes of one storage: on the host, on the device, or both. Lives as long as a handle does."""

    __slots__ = ("__weakref__", "_retired", "block", "device", "fetch", "nbytes", "offload", "turn")

    def __init__(self, block: Block, offload: Copy, retired: deque):
        self.block, self.nbytes, self.offload, self._retired = block, block.nbytes, offload, retired
        self.fetch: Copy | None = None  # the last one
        self.device: Tensor | None = None  # flat uint8; handles hand out views of it
        self.turn: int | None = None  # the lowest of all puts of it

    def __del__(self):
        self._retired.append((self.block, [copy for copy in (self.offload, self.fetch) if copy is not None]))


class SwapGroup:
    """What one layer's forward saves. Made by `SwapEngine.open_group`."""

    def __init__(self, engine: SwapEngine, serial: int, keep: bool, label: str):
        self.keep, self.label = keep, label
        self._engine, self._serial, self._sealed = engine, serial, False
        # Weak references: handles alone decide how long anything lives.
        self._by_key: dict[tuple, weakref.ref[Stored]] = {}
        self._stored: list[weakref.ref[Stored]] = []

    def put(self, tensor: Tensor, *, turn: int = 0) -> Handle:
        """Start to copy the storage of `tensor` to the host, once per group, and return what gets it back.

        A tensor that reads less than half of a storage which this group does not hold is copied to a dense one first,
        so that the rest does not move with it: `get` then returns it with offset 0 and dense strides. Kept on the
        device: everything where `keep` is set, tensors of another device, subclasses, and tensors without elements.

        Args:
            turn: parts of a group that backward wants at different times may be fetched apart, by this number.

        Raises:
            MemoError: the group is sealed, the engine is closed, or an earlier copy failed.
            HostMemoryError: the host budget does not suffice.
        """
        engine = self._engine
        with engine._lock:
            engine._require_open()
            if self._sealed:
                raise MemoError(f"put into the sealed group {self.label!r}: the forward it belongs to is over")
            if self.keep or not can_swap(tensor, engine.device, engine.tensor_types):
                # An empty tensor may be the last view of a large storage, which it does not need.
                return Handle(engine, self.label, kept=tensor.detach() if tensor.numel() else tensor.detach().clone())
            # A write between two puts makes two contents of one storage, so the version belongs to the key.
            identity = (storage_key(tensor), tensor._version)
            stored = self._find((*identity, None))
            if stored is None and is_small_part(tensor):
                # Not the same storage any more, so writes to the original do not matter and are not watched.
                part_key = (*identity, View.of(tensor))
                stored = self._find(part_key) or self._offload(part_key, dense_part(tensor))
                stored.turn = turn if stored.turn is None else min(turn, stored.turn)
                return Handle(engine, self.label, stored=stored, view=dense_view(tensor))
            stored = stored or self._offload((*identity, None), tensor)
            stored.turn = turn if stored.turn is None else min(turn, stored.turn)
            watch = VersionWatch(memoryless_alias(tensor))
            return Handle(engine, self.label, stored=stored, view=View.of(tensor), watch=watch)

    def during_work(self):
        """As `SwapEngine.during_work`."""
        return self._engine.during_work()

    def seal(self) -> None:
        """The layer's forward is over: further `put` raises `MemoError`."""
        with self._engine._lock:
            self._sealed = True
            self._by_key.clear()

    def prefetch(self, *, turn: int | None = None) -> None:
        """Start to bring back what handles still want, last put first, as backward will ask for it.

        Args:
            turn: only what was put with this turn.
        """
        engine = self._engine
        with engine._lock:
            engine._require_open()
            engine._reap()
            for stored in self._live():
                if turn is None or stored.turn == turn:
                    engine._start_fetch(stored)
            # Backward has begun: no forward is left to hide copies behind.
            engine.let_go()

    def release(self) -> None:
        """Let go of the device copies. The host copies stay as long as their handles, and can be fetched again."""
        engine = self._engine
        with engine._lock:
            engine._require_open()
            for stored in self._live():
                stored.device = None
                if stored.fetch is not None:
                    # Perhaps nobody waited for it: then its buffer must outlive the copy, which this entry sees to.
                    engine._retired.append((None, [stored.fetch]))
            engine._reap()

    def _live(self) -> list[Stored]:
        return [stored for ref in reversed(self._stored) if (stored := ref()) is not None]

    def _find(self, key: tuple) -> Stored | None:
        ref = self._by_key.get(key)
        return None if ref is None else ref()

    def _offload(self, key: tuple, tensor: Tensor) -> Stored:
        stored = self._engine._offload(tensor, self._serial)
        self._by_key[key] = weakref.ref(stored)
        self._stored.append(self._by_key[key])
        return stored


class Handle:
    """Gets one tensor back. Made by `SwapGroup.put`; what it stands for lives as long as it does."""

    __slots__ = ("_engine", "_kept", "_label", "_stored", "_view", "_watch", "nbytes")

    def __init__(self, engine, label, *, kept=None, stored=None, view=None, watch=None):
        self._engine, self._label, self._kept, self._stored, self._view = engine, label, kept, stored, view
        self._watch = watch if kept is None else VersionWatch(kept)
        # A subclass may have no storage to ask.
        self.nbytes: int = kept.numel() * kept.element_size() if stored is None else stored.nbytes

    def get(self) -> Tensor:
        """The tensor that was put, without gradient, on the device. Several calls return views of one device copy.

        Raises:
            MemoError: the tensor was written to in place since, the engine is closed, or a copy failed.
        """
        if self._stored is None:
            self._engine._require_open()
            tensor = self._kept.detach()
        else:
            tensor = self._view.on(self._engine._on_device(self._stored))
        if self._watch is not None:
            self._watch.check(self._label)
        return tensor
