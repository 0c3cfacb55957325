"""How many tokens go through project or finish at once, where nobody says. Used by the session and the forecast."""

from __future__ import annotations

_LEAST, _MOST, _STEP = 2048, 16384, 256


def default_chunk_tokens(num_tokens: int) -> int:
    """Tokens per chunk, over the whole batch: an eighth of `num_tokens`, between 2,048 and 16,384, in steps of 256.

    Enough for kernels to fill a device and for launching them to be hidden, few enough for a chunk's transients to stay
    small beside what attention holds.
    """
    return max(_LEAST, min(_MOST, -(-num_tokens // 8 // _STEP) * _STEP))
