"""Exact attention by the CPU flash kernel over blocks of queries, each against the keys that it can see.

Called by `attention_kernels.attend`; `attention_math` shares `Sight` and the output layout. The autograd function saves
q, k, v, the output and its logsumexp, and makes no tensor of tokens by tokens. It knows neither models nor masks.

Shapes: query (batch, heads, tokens, d), key (batch, kv_heads, tokens, d), value (batch, kv_heads, tokens, d_v), output
(batch, heads, tokens, d_v) as a view of (batch, tokens, heads, d_v) memory, logsumexp (batch, heads, tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Sight:
    """Which keys a query sees.

    Attributes:
        spans: (rows, start, stop) of the documents: a slice of the batch, and the token range in those rows.
        causal: no key after the query.
        window: causal: the last `window` keys, the query's own among them; else keys at most `window` away. None: all.
    """

    spans: tuple[tuple[slice, int, int], ...]
    causal: bool
    window: int | None

    @property
    def behind(self) -> int:
        """How far back from itself a query sees."""
        return _UNLIMITED if self.window is None else self.window - self.causal

    @property
    def ahead(self) -> int:
        """How far forward from itself a query sees."""
        return 0 if self.causal else self.behind

    def blocks(self, start: int, stop: int, size: int):
        """(q_start, q_stop, k_start, k_stop): blocks of `size` queries of a document, the keys that they see."""
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield first, last, max(start, first - self.behind), min(stop, last + self.ahead)

    def hidden(self, q_start: int, q_stop: int, k_start: int, k_stop: int, device) -> torch.Tensor | None:
        """(queries, keys) bool, True where the query does not see the key; None where every query sees every key."""
        if k_stop - 1 - q_start <= self.ahead and q_stop - 1 - k_start <= self.behind:
            return None
        distance = torch.arange(q_start, q_stop, device=device)[:, None] - torch.arange(k_start, k_stop, device=device)
        return (distance < -self.ahead) | (distance > self.behind)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and logsumexp: float32 for half precision, else the tensors' own."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def empty_output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for the output, in (batch, tokens, heads, d_v) memory, and for the logsumexp. Padding stays zero."""
    batch, heads, tokens, _ = query.shape
    out = query.new_zeros(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_zeros(batch, heads, tokens, dtype=statistics_dtype(query.dtype))


def token_major_zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of the shape of `like` (batch, heads, tokens, width) in (batch, tokens, heads, width) memory."""
    batch, heads, tokens, width = like.shape
    return like.new_zeros(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def flash_blocks(query, key, value, *, sight: Sight, scale: float, block: int | None = None) -> torch.Tensor:
    """Attention by torch's CPU flash kernel: one call per document, or per block of queries where a window limits them.

    Args:
        query, key, value: see the module. float32, float64, bfloat16 or float16, on the CPU.
        scale: factor of the products of queries and keys.
        block: queries per call under a window. Not given: a quarter of the window, at least 128.
    """
    return _FlashBlocks.apply(query, key, value, sight, scale, block)


class _FlashBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sight, scale, block):
        ctx.settings = sight, scale, block
        calls = list(_flash_calls(query, sight, block))
        whole = _covers(calls, query)
        if not whole:
            out, lse = empty_output(query, value)
        for rows, q, k, causal, mask in calls:
            part, part_lse = _flash_piece(query[rows, :, q], key[rows, :, k], value[rows, :, k], causal, mask, scale)
            if whole:
                out, lse = part, part_lse
            else:
                out[rows, :, q], lse[rows, :, q] = part, part_lse
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        sight, scale, block = ctx.settings
        calls = list(_flash_calls(query, sight, block))

        def gradients(rows, q, k, causal, mask):
            blocks = grad_out[rows, :, q], query[rows, :, q], key[rows, :, k], value[rows, :, k], out[rows, :, q]
            return _flash_piece_backward(*blocks, lse[rows, :, q], causal, mask, scale)

        if _covers(calls, query):
            return *gradients(*calls[0]), None, None, None
        # Under a window a key gets parts of its gradient from several blocks: they are summed in float32.
        sum_dtype = query.dtype if sight.window is None else statistics_dtype(query.dtype)
        dq = token_major_zeros(query, query.dtype)
        dk, dv = token_major_zeros(key, sum_dtype), token_major_zeros(value, sum_dtype)
        for rows, q, k, causal, mask in calls:
            part_q, part_k, part_v = gradients(rows, q, k, causal, mask)
            dq[rows, :, q] = part_q
            dk[rows, :, k] += part_k
            dv[rows, :, k] += part_v
        return dq, dk.to(key.dtype), dv.to(value.dtype), None, None, None


def _flash_calls(query, sight, block):
    """(rows, queries, keys, causal, additive mask) of every kernel call."""
    masks = {}
    for rows, start, stop in sight.spans:
        if stop - start - 1 <= sight.behind:
            yield rows, slice(start, stop), slice(start, stop), sight.causal, None
            continue
        size = block or max(128, sight.window // 4)
        for q_start, q_stop, k_start, k_stop in sight.blocks(start, stop, size):
            # Masks depend on distances alone, so inner blocks share one.
            shape = q_stop - q_start, k_stop - k_start, q_start - k_start
            if shape not in masks:
                masks[shape] = _additive(sight.hidden(q_start, q_stop, k_start, k_stop, query.device), query.dtype)
            yield rows, slice(q_start, q_stop), slice(k_start, k_stop), False, masks[shape]


def _additive(hidden, dtype):
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _covers(calls, query):
    """Whether a single call does the whole batch, so that its output needs no copy."""
    if len(calls) != 1:
        return False
    rows, queries = calls[0][:2]
    return len(range(*rows.indices(query.shape[0]))) == query.shape[0] and queries == slice(0, query.shape[2])


def _flash_piece(q, k, v, causal, mask, scale):
    # The kernel wants one head size: the smaller is padded with zeros, here only, so that what is saved stays small.
    width, value_width = q.shape[-1], v.shape[-1]
    q, k, v = (_pad_width(x, max(width, value_width)) for x in (q, k, v))
    out, lse = _flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if out.shape[-1] != value_width:
        out = out[..., :value_width].transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse


def _flash_piece_backward(grad_out, q, k, v, out, lse, causal, mask, scale):
    width, value_width = q.shape[-1], v.shape[-1]
    grad_out, q, k, v, out = (_pad_width(x, max(width, value_width)) for x in (grad_out, q, k, v, out))
    dq, dk, dv = _flash_backward(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq[..., :width], dk[..., :width], dv[..., :value_width]


def _pad_width(tensor, width):
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
