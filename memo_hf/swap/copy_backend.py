"""What the swap engine asks of the thing that copies: two queues of copies and ways to wait for them.

Called by `engine` (copies, waits) and `host_pool` (pinning). It must not know groups, handles or models.

The contract every backend keeps:
- offloads run in the order they were submitted, and so do fetches; nothing is promised between the two queues but
  `after`;
- a copy reads its source as it is at submission, in the order of the stream or thread that submits;
- `Copy.buffer` keeps the device side of a copy alive. Set to None, the memory goes back to the device allocator. A
  backend does so where it is asked to wait, and work that the compute stream is given from then on cannot meet the copy
  any more; never by itself, or the step's memory would depend on how fast copies are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Copy:
    """One submitted copy. `buffer` is its device side, a flat uint8 tensor, or None once the copy cannot touch it."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Tensor):
        self.buffer: Tensor | None = buffer


class CopyBackend(Protocol):
    """Copies between flat uint8 tensors of equal length, one on the device and one on the host.

    `offload`, `fetch`, `wait` and `finish` raise `MemoError` where an earlier copy failed; nothing else does.

    Where `timings` is a list, each copy appends (whether to the host, bytes, start, end) to it: seconds, or events.

    `copies_are_short`: they take far less time than work on a chunk of tokens, so that waiting for them after such work
    costs nothing.
    """

    timings: list[tuple] | None
    copies_are_short: bool

    def offload(self, source: Tensor, target: Tensor) -> Copy:
        """Start device to host. Returns at once where it can."""

    def fetch(self, source: Tensor, target: Tensor, after: Copy) -> Copy:
        """Start host to device, once the offload `after`, which fills `source`, has run."""

    def wait(self, copy: Copy, buffer: Tensor | None = None) -> None:
        """Make the compute stream (the calling thread, on a CPU) wait for `copy` and let `copy.buffer` go.

        `buffer` is the device side that will be read next, where it will be.
        """

    def finish(self, copy: Copy) -> None:
        """Block the calling thread until `copy` has run, so that its host side may be used again."""

    def done(self, copy: Copy) -> bool:
        """Whether `copy` has run; never blocks. Lets `copy.buffer` go where it has."""

    def pin(self, buffer: Tensor) -> bool:
        """Lock the pages of a host buffer. False where this device has no use for it. Raises RuntimeError."""

    def unpin(self, buffer: Tensor) -> None:
        """Undo `pin`."""

    def close(self) -> None:
        """Let running copies end, then free threads and streams."""
