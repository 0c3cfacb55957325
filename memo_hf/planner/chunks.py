"""How many tokens go through project or finish at once, where nobody says. Used by the session and the forecast."""

from __future__ import annotations

_BOUNDS = {"cpu": (512, 4096), "cuda": (4096, 8192)}
_STEP = 256


def default_chunk_tokens(num_tokens: int, device_type: str) -> int:
    """Tokens per chunk, over the whole batch: a sixteenth of `num_tokens`, in steps of 256 and within bounds.

    A sixteenth keeps a chunk's transients small beside what attention holds for all tokens. On a CPU matrix products
    lose speed below 512 tokens and gain none above 4,096. On an accelerator the bounds, 4,096 and 8,192, are reckoned
    and not measured: at 2,048 tokens an H200 seems to have waited for kernels to be launched.
    """
    least, most = _BOUNDS["cpu" if device_type == "cpu" else "cuda"]
    return max(least, min(most, -(-num_tokens // 16 // _STEP) * _STEP))


def default_loss_chunk_tokens(num_tokens: int, width: int, vocabulary: int, device_type: str) -> int:
    """Tokens whose logits take about as much as all hidden states, within what keeps matrix products efficient.

    Each chunk adds to the whole weight gradient, so on an accelerator few tokens would be bound by memory traffic;
    beyond 4,096 nothing is gained.
    """
    least = 256 if device_type == "cpu" else 1024
    return min(max(num_tokens * width // vocabulary, least), 4096)
