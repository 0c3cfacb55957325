"""What the layers of one forward pass of a stack share: sizes, settings, documents, and who comes before whom.

Made by the session for each forward pass. Knows no particular layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention import attend_as_asked
from memo_hf.layers.documents import Documents
from memo_hf.layers.sequence_parallel import SequenceGroup
from memo_hf.swap import SwapEngine, SwapGroup

# When backward fetches what a layer has swapped, in the order in which there is room for it: see `LayerRecord`.
CHUNKS, WHOLE, ATTENTION = 0, 1, 2

Watcher = Callable[[int, str], None]  # told of a layer, by its index, and a moment: see `Step.watchers`


@dataclass(frozen=True)
class StepSettings:
    """How token mode runs in one forward pass.

    Attributes:
        swap_fraction: fraction of tokens, 0 to 1, whose skeletal activations are swapped rather than recomputed.
        chunk_tokens: tokens of one sequence that go through project or finish at once.
        rebuild_qkv: swap queries, keys and values of the swapped tokens alone, and compute the others' in backward.
    """

    swap_fraction: float
    chunk_tokens: int
    rebuild_qkv: bool


class Observer(Protocol):
    """Who measures a step is told what its layers have. Kinds of layers are known by their records' `alike`."""

    def count(self, record: LayerRecord, part: str) -> Callable[[int, int], None] | None:
        """Told (tokens, bytes) of what one chunk of `part` saves, or None where that is known or not wanted."""

    def sizes(self, record: LayerRecord, input_bytes: int, swapped_bytes: int | None) -> None:
        """What the layer of `record` has; `swapped_bytes` is None where it keeps all. Not told of frozen ones."""


@dataclass
class Step:
    """One forward pass of one stack.

    Attributes:
        engine: where saved tensors go.
        settings: how token mode runs.
        implementation: the attention that the user asked for, by transformers' name.
        documents: which tokens may attend to which, or None; of all ranks that share the sequence.
        kinds: for each layer, an object that it shares with the layers built alike.
        first_kept: layers from this index on keep their activations on the device.
        require_host: told (bytes per layer, layers) before the copies of a layer start; raises where they cannot fit.
        sequence: the ranks that share the sequence, or None where this one has all of it.
        whole_layers: indices of layers that run in layer mode by plan, though they could run per token.
        observer: who measures this step, or None.
        watchers: each is told (3, moment) when layer 3 comes to "forward begin", "forward project", "forward attend",
            "forward finish", "forward end", "backward begin", "backward finish", "backward attend", "backward
            attended", "backward project" and "backward end". In layer mode the forward pass is "forward whole" between
            its begin and its end, and backward comes to "backward end" as it begins.
        planned_bytes: what this forward pass is to swap, from what the first layer of each kind has swapped.
        last: the last layer that has run.
        num_forward_only: layers that have run with nothing to train in them or before them, so that nothing is swapped.
    """

    engine: SwapEngine
    settings: StepSettings
    implementation: str
    documents: Documents | None
    first_kept: int
    kinds: list
    require_host: Callable[[int, int], None]
    sequence: SequenceGroup | None = None
    whole_layers: Collection[int] = ()
    observer: Observer | None = None
    watchers: tuple[Watcher, ...] = ()
    planned_bytes: int = 0
    last: LayerRecord | None = None
    num_forward_only: int = 0
    _seen: dict = field(default_factory=dict)

    def attend(self, module, query, key, value, **arguments) -> torch.Tensor:
        """The user's own attention, of a rank's tokens: (batch, heads, tokens, d) in, (batch, tokens, heads, d) out."""
        if self.sequence is None:
            return self.attend_here(module, [query, key, value], **arguments)
        parts = self.sequence.gather([tensor.transpose(1, 2) for tensor in (query, key, value)])
        parts = [tensor.transpose(1, 2) for tensor in parts]
        return self.sequence.scatter(self.attend_here(module, parts, **arguments))

    def attend_here(self, module, parts: list[torch.Tensor], **arguments) -> torch.Tensor:
        """`attend` once all tokens are here. `parts`, queries, keys and values, is emptied."""
        query, key, value = parts
        parts.clear()
        if self.sequence is not None and arguments.get("s_aux") is not None:
            arguments["s_aux"] = self.sequence.own_heads(arguments["s_aux"])
        return attend_as_asked(
            module, query, key, value, implementation=self.implementation, documents=self.documents, **arguments
        )

    @contextmanager
    def layer(self, index: int, name: str, layer: torch.nn.Module, hidden: torch.Tensor) -> Iterator[LayerRecord]:
        """The record of the next layer, for the body that runs it on `hidden`; its group is where saved tensors go.

        Raises `UnsupportedModelError` where the layer is on another device than the model's input.
        """
        if hidden.device != self.engine.device:
            raise UnsupportedModelError(
                f"{name} is on {hidden.device} and the model's input on {self.engine.device}; memo_hf runs a model "
                "that is on one device. Load it without a device_map, or split it with FSDP"
            )
        trained = tuple(parameter.requires_grad for parameter in layer.parameters())
        has_backward = hidden.requires_grad or any(trained)
        keep = index >= self.first_kept or not has_backward
        self.num_forward_only += not has_backward
        # Frozen embeddings: the first layer's input needs no gradient, so its graphs save less. So do those of layers
        # without adapters.
        alike = (index in self.whole_layers, id(self.kinds[index]), hidden.requires_grad, trained)
        before = self.engine.stats.swapped_bytes
        _tell(self.watchers, index, "forward begin")
        group = self.engine.open_group(keep=keep, label=name)
        record = LayerRecord(group, self.last, index, alike, self.observer, self.watchers)
        yield record
        record.group.seal()
        record.mark("forward end")
        self.last = record
        swapped = None if keep else self.engine.stats.swapped_bytes - before
        if not keep:
            self.planned_bytes += self._seen.setdefault(alike, swapped)
        if self.observer is not None and has_backward:
            self.observer.sizes(record, hidden.nbytes, swapped)

    def require(self, index: int, num_bytes: int) -> None:
        """Raise `HostMemoryError` where layer `index`, and the others like it, cannot swap `num_bytes` each."""
        if index < self.first_kept:
            number = sum(i < self.first_kept for i in self.whole_layers)
            self.require_host(num_bytes, number if index in self.whole_layers else self.first_kept - number)


@dataclass
class LayerRecord:
    """One layer in one forward pass, linked to the layer before it, whose activations backward needs next."""

    group: SwapGroup
    previous: LayerRecord | None
    index: int = 0
    alike: tuple = ()
    observer: Observer | None = None
    watchers: tuple[Watcher, ...] = ()
    rebuilt: list[torch.Tensor] = field(default_factory=list)
    qkv_bytes: int = 0
    output_bytes: int = 0

    def mark(self, moment: str) -> None:
        """This layer has come to `moment`: see `Step.watchers`."""
        _tell(self.watchers, self.index, moment)

    def count(self, part: str) -> Callable[[int, int], None] | None:
        """As `Observer.count`, for this layer."""
        return None if self.observer is None else self.observer.count(self, part)

    def begin_finish(self) -> None:
        """Backward of finish begins: it needs all that is not yet under way, and attend comes next."""
        self.mark("backward begin")
        self.group.prefetch()

    def begin_attend(self) -> None:
        """Backward of attend begins, the longest work: beside it comes what the layer before has swapped in chunks."""
        self.mark("backward attend")
        if self.previous is not None:
            self.previous.group.prefetch(turn=CHUNKS)

    def begin_project(self) -> None:
        """Backward of project begins. Now that attend's tensors are gone there is room for the layer before."""
        self.mark("backward attended")
        if self.previous is not None:
            self.previous.group.prefetch(turn=WHOLE)

    def end_backward(self) -> None:
        """Drop what was fetched or rebuilt; the host copies live as long as the graph does."""
        self.mark("backward end")
        self.rebuilt.clear()
        self.group.release()


def _tell(watchers: tuple[Watcher, ...], index: int, moment: str) -> None:
    for watcher in watchers:
        watcher(index, moment)
