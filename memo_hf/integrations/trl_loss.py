"""`small_loss_tiles`: TRL's own chunked loss with less memory on a CPU.

`MemoTrainerMixin` runs its training loop in it. TRL's trainers multiply with the weight of the head themselves and
never call the head, so the chunked loss of `layers/loss.py` has no part in them. This must not know sessions or models.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from memo_hf.planner.chunks import default_loss_chunk_tokens

# Without Triton, TRL's backward holds up to 33 bytes for each fp32 logit of a tile: its own, seven tensors made of it
# and a mask. The forecast counts 16 for a logit of our chunks, so half the tokens take what it says.
_TOKENS_PER_TILE = default_loss_chunk_tokens(0, 1, 1, "cpu") // 2


@contextlib.contextmanager
def small_loss_tiles(device_type: str) -> Iterator[None]:
    """Within it, TRL's loss on a CPU works on 128 tokens at a time, not 4,096. Values are the same up to rounding.

    Does nothing on other devices, where a kernel works in place on the tile, nor where TRL or that loss is not loaded.

    Args:
        device_type: where training runs, as `torch.device.type`.
    """
    kernels = sys.modules.get("trl.kernels.chunked_logprob")
    before = getattr(kernels, "TOKEN_CHUNK_SIZE", None)
    if before is None or device_type != "cpu":
        yield
        return
    kernels.TOKEN_CHUNK_SIZE = min(before, _TOKENS_PER_TILE)
    try:
        yield
    finally:
        kernels.TOKEN_CHUNK_SIZE = before
