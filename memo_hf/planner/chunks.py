"""How many tokens go through project or finish at once, where nobody says. Used by the session and the forecast."""

from __future__ import annotations

_LEAST, _MOST, _STEP = 512, 4096, 256


def default_chunk_tokens(num_tokens: int) -> int:
    """Tokens per chunk, over the whole batch: a sixteenth of `num_tokens`, between 512 and 4,096, in steps of 256.

    A sixteenth keeps a chunk's transients small beside what attention holds for all tokens; below 512 tokens matrix
    products lose speed, above 4,096 they gain none.
    """
    return max(_LEAST, min(_MOST, -(-num_tokens // 16 // _STEP) * _STEP))


def default_loss_chunk_tokens(num_tokens: int, width: int, vocabulary: int, device_type: str) -> int:
    """Tokens whose logits take about as much as all hidden states, within what keeps matrix products efficient.

    Each chunk adds to the whole weight gradient, so on an accelerator few tokens would be bound by memory traffic;
    beyond 4,096 nothing is gained.
    """
    least = 256 if device_type == "cpu" else 1024
    return min(max(num_tokens * width // vocabulary, least), 4096)
