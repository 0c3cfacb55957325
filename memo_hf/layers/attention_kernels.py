"""Attention of a whole sequence by the kernel that suits device, dtype and pattern.

Called by the layer engine, once per layer, with gradients on and under saved-tensor hooks. It must not know chunks,
swapping or the Trainer.
"""

from __future__ import annotations

import torch

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention_blocks import Sight, flash_blocks
from memo_hf.layers.documents import Documents


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    implementation: str,
    documents: Documents | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_mask=None,
    **kwargs,
) -> torch.Tensor:
    """Attention over whole sequences, as ordinary autograd code."""
    if dropout or softcap is not None or sinks is not None or (documents is not None and documents.has_holes):
        raise UnsupportedModelError("attention with dropout, softcap, sinks or padding between tokens")
    pattern = getattr(attention_mask, "memo_pattern", None)
    window = sliding_window if pattern is None else pattern.window
    sight = Sight(_spans(documents, query), is_causal, window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return flash_blocks(query, key, value, sight=sight, scale=scale).transpose(1, 2)


def _spans(documents, query):
    if documents is None:
        return ((slice(0, query.shape[0]), 0, query.shape[2]),)
    return tuple((slice(row, row + 1), start, stop) for row, start, stop in documents.spans)
