"""Which tokens of a batch may see which: padding and packed documents, worked out once per forward.

Called by the layer engine at the start of a model's forward; read by the attention kernels. It knows nothing of
layers, heads or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from memo_hf.errors import UnsupportedModelError

# A run of padding is cut into pieces of this many tokens in `cu_seqlens`, so that padding costs linear time.
_PADDING_PIECE = 1024


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch. A token sees tokens of its own document only.

    Attributes:
        batch, seq_len: shape of the batch.
        spans: (row, start, stop) of every document, in order; padding lies outside or, where `has_holes`, within.
        padding_mask: (batch, seq_len) bool on the device, True for tokens; None where there is no padding.
        has_holes: some document has padding between its tokens, so spans alone do not describe it.
        cu_seqlens: int32 on the device, bounds of runs over the flattened (batch * seq_len) tokens, for variable-length
            kernels. Runs of padding are documents of their own, so nothing has to be unpadded.
        max_length: longest run in `cu_seqlens`.
    """

    batch: int
    seq_len: int
    spans: tuple[tuple[int, int, int], ...]
    padding_mask: torch.Tensor | None
    has_holes: bool
    cu_seqlens: torch.Tensor
    max_length: int


def find_documents(
    batch: int,
    seq_len: int,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    implementation: str = "sdpa",
    device: torch.device | None = None,
) -> Documents | None:
    """The documents of a batch as transformers itself would see them, without a cache. Reads the device once.

    Position ids that do not go up by one start a document, but only where there is no attention mask (or, for flash
    attention and one row, a mask without padding): transformers ignores them otherwise.

    Args:
        batch, seq_len: shape of the batch.
        attention_mask: (batch, seq_len) of any dtype, nonzero for tokens, as the user gave it.
        position_ids: (batch or 1, seq_len), or (4, batch, seq_len) whose first row counts tokens; other
            three-dimensional position ids say nothing about documents.
        cu_seqlens: (documents + 1,) bounds over the flattened batch; it overrides position_ids.
        implementation: the model's attention implementation.
        device: where the attention runs; not given: that of the tensors.

    Returns:
        None where every row is one document without padding.

    Raises:
        UnsupportedModelError: a mask that is not (batch, seq_len), or bounds beyond the batch.
    """
    keep = _padding(attention_mask, batch, seq_len)
    restarts = None
    if cu_seqlens is None and (keep is None or (batch == 1 and "flash" in implementation)):
        restarts = _restarts(position_ids, batch, seq_len)
    if device is None:
        device = next((tensor.device for tensor in (keep, restarts, cu_seqlens) if tensor is not None), None)
    keep_host, restarts_host = _to_host(keep, restarts)
    if keep_host is None:
        keep_host = torch.ones(batch, seq_len, dtype=torch.bool, device="cpu")
    has_padding = not bool(keep_host.all())
    if cu_seqlens is not None:
        restarts_host = _marks(cu_seqlens, batch, seq_len)
    elif restarts_host is None or has_padding:
        restarts_host = torch.zeros_like(keep_host)
    if not has_padding and not restarts_host[:, 1:].any():
        return None
    spans, has_holes = _spans(keep_host, restarts_host)
    bounds = _bounds(keep_host, restarts_host)
    return Documents(
        batch=batch,
        seq_len=seq_len,
        spans=spans,
        padding_mask=keep.to(device) if has_padding else None,
        has_holes=has_holes,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device or "cpu"),
        max_length=max(stop - start for start, stop in pairwise(bounds)),
    )


def _padding(attention_mask, batch, seq_len):
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != (batch, seq_len):
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise UnsupportedModelError(
            f"attention_mask is {shape}; memo_hf takes a padding mask of shape ({batch}, {seq_len}), since a mask for "
            "every pair of tokens grows with the square of the sequence. Pass a padding mask, or position_ids that "
            "restart at every document"
        )
    return attention_mask.to(torch.bool)


def _restarts(position_ids, batch, seq_len):
    """(batch, seq_len) bool: where a position is not the one before plus one; None where positions say nothing."""
    if position_ids is None:
        return None
    if position_ids.ndim == 3:
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    position_ids = position_ids.expand(batch, seq_len)
    restarts = torch.zeros(batch, seq_len, dtype=torch.bool, device=position_ids.device)
    restarts[:, 1:] = position_ids.diff(dim=-1) != 1
    return restarts


def _to_host(*tensors):
    """The given (batch, seq_len) bool tensors on the host, in one copy; None stays None."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return tensors
    copies = iter(torch.stack([tensor.to(present[0].device) for tensor in present]).cpu())
    return tuple(None if tensor is None else next(copies) for tensor in tensors)


def _marks(cu_seqlens, batch, seq_len):
    """(batch, seq_len) bool on the host: where `cu_seqlens` starts a document."""
    total, starts = batch * seq_len, cu_seqlens.cpu().long()
    if int(starts.min()) < 0 or int(starts.max()) > total:
        raise UnsupportedModelError(
            f"cu_seq_lens runs from {int(starts.min())} to {int(starts.max())}; the batch has {total} tokens. "
            "Pass the bounds of the documents of this batch"
        )
    marks = torch.zeros(total + 1, dtype=torch.bool, device="cpu")
    marks[starts] = True
    return marks[:-1].view(batch, seq_len)


def _runs(changes):
    """(start, stop) over the flattened batch, where `changes` (batch, seq_len) marks starts and rows start runs too."""
    changes = changes.clone()
    changes[:, 0] = True
    starts = changes.flatten().nonzero().flatten().tolist()
    return list(pairwise([*starts, changes.numel()]))


def _spans(keep, restarts):
    """(row, first token, last token + 1) of every document that has a token, and whether one has padding inside."""
    seq_len = keep.shape[1]
    flat, spans, has_holes = keep.flatten(), [], False
    for start, stop in _runs(restarts):
        tokens = flat[start:stop].nonzero().flatten()
        if len(tokens):
            first, last = int(tokens[0]), int(tokens[-1])
            has_holes |= last - first + 1 != len(tokens)
            row, column = divmod(start, seq_len)
            spans.append((row, column + first, column + last + 1))
    return tuple(spans), has_holes


def _bounds(keep, restarts):
    """Bounds of runs over the flattened batch: documents, and padding in short pieces."""
    changes = restarts.clone()
    changes[:, 1:] |= keep[:, 1:] != keep[:, :-1]
    bounds = []
    for start, stop in _runs(changes):
        is_padding = not keep.flatten()[start]
        bounds.extend(range(start, stop, _PADDING_PIECE) if is_padding else [start])
    return [*bounds, keep.numel()]
