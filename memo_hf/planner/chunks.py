"""How many tokens go through project or finish at once, where nobody says. Used by the session and the forecast."""

from __future__ import annotations

_LEAST, _MOST, _STEP = 512, 4096, 256


def default_chunk_tokens(num_tokens: int) -> int:
    """Tokens per chunk, over the whole batch: a sixteenth of `num_tokens`, between 512 and 4,096, in steps of 256.

    A sixteenth keeps a chunk's transients small beside what attention holds for all tokens; below 512 tokens matrix
    products lose speed, above 4,096 they gain none.
    """
    return max(_LEAST, min(_MOST, -(-num_tokens // 16 // _STEP) * _STEP))
