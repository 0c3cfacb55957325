"""Exact attention in plain tensor operations, tile by tile: softcap, sinks, dropout and padding between tokens.

Called by `attention_kernels.attend` for what the flash kernels lack. Tiles of queries by keys go through a running
softmax in forward and are computed again from q, k, v and the logsumexp in backward, so no tensor of tokens by tokens
exists. It knows neither models nor masks. Shapes as in `attention_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from memo_hf.layers.attention_blocks import Sight, empty_output, statistics_dtype, token_major_zeros


@dataclass(frozen=True, kw_only=True)
class MathAttention:
    """What to compute, and in tiles of which size.

    Attributes:
        sight: which keys a query sees.
        scale: factor of the products of queries and keys.
        softcap: scores become softcap * tanh(score / softcap).
        dropout: probability with which an attention weight is dropped.
        seed: of the generator that draws the dropout masks; backward draws them again from it.
        query_tile, key_tile: tokens per tile.
    """

    sight: Sight
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    query_tile: int = 256
    key_tile: int = 512

    def __call__(self, query, key, value, sinks=None, padding_mask=None) -> torch.Tensor:
        """The output (batch, heads, tokens, d_v).

        Args:
            query, key, value: any floating dtype, any device.
            sinks: (heads,) a score per head that takes part in the softmax and has no value.
            padding_mask: (batch, tokens) bool, False for keys that no query sees.
        """
        return _MathAttention.apply(query, key, value, sinks, padding_mask, self)

    def tiles(self):
        """(rows, queries, key tiles) for every block of queries; the same order in forward and backward."""
        for rows, start, stop in self.sight.spans:
            for q_start, q_stop, k_start, k_stop in self.sight.blocks(start, stop, self.query_tile):
                edges = range(k_start, k_stop, self.key_tile)
                yield rows, slice(q_start, q_stop), [slice(k, min(k + self.key_tile, k_stop)) for k in edges]


class _MathAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, padding_mask, how):
        out, lse = empty_output(query, value)
        tile = _Tile(query, key, padding_mask, how)
        with torch.autocast(query.device.type, enabled=False):
            for rows, q, key_tiles in how.tiles():
                queries = tile.group(query[rows, :, q])
                top, total = tile.start(queries, sinks)
                summed = queries.new_zeros(*queries.shape[:-1], value.shape[-1])
                for k in key_tiles:
                    scores, _ = tile.scores(queries, key[rows, :, k], rows, q, k)
                    new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                    weights, fade = scores.sub_(new_top).exp_(), (top - new_top).exp_()
                    total = total * fade + weights.sum(-1, keepdim=True)
                    summed = summed * fade + tile.product(tile.drop(weights), value[rows, :, k])
                    top = new_top
                # Zero where a query sees nothing at all; sums of exponentials are 1 or more elsewhere.
                out[rows, :, q] = tile.ungroup(summed.div_(total.clamp_min(1e-30)))
                lse[rows, :, q] = tile.ungroup(top + total.clamp_min(1e-30).log()).squeeze(-1)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        # Shared by all layers and small, so not a saved tensor, which might be swapped once per layer.
        ctx.padding_mask, ctx.how = padding_mask, how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        how, sum_dtype = ctx.how, statistics_dtype(query.dtype)
        dq = token_major_zeros(query, query.dtype)
        dk, dv = token_major_zeros(key, sum_dtype), token_major_zeros(value, sum_dtype)
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=sum_dtype)
        tile = _Tile(query, key, ctx.padding_mask, how)
        with torch.autocast(query.device.type, enabled=False):
            for rows, q, key_tiles in how.tiles():
                queries, grads = tile.group(query[rows, :, q]), tile.group(grad_out[rows, :, q])
                block_lse = tile.group(lse[rows, :, q, None])
                delta = (grads * tile.group(out[rows, :, q])).sum(-1, keepdim=True)
                if sinks is not None:
                    lost = tile.ungroup((tile.spread(sinks, queries) - block_lse).exp_() * delta)
                    dsinks -= lost.sum((0, 2, 3))
                block_dq = torch.zeros_like(queries)
                for k in key_tiles:
                    keys = key[rows, :, k]
                    scores, slope = tile.scores(queries, keys, rows, q, k)
                    weights = scores.sub_(block_lse).exp_()
                    kept = tile.mask(weights)
                    dropped = weights if kept is None else weights * kept
                    dv[rows, :, k] += tile.product(dropped.transpose(-1, -2), grads)
                    dweights = tile.product(grads, value[rows, :, k].transpose(-1, -2))
                    if kept is not None:
                        dweights *= kept
                    dscores = dweights.sub_(delta).mul_(weights).mul_(how.scale)
                    if slope is not None:
                        dscores *= slope
                    block_dq += tile.product(dscores, keys)
                    dk[rows, :, k] += tile.product(dscores.transpose(-1, -2), queries)
                dq[rows, :, q] = tile.ungroup(block_dq)
        dsinks = None if sinks is None else dsinks.to(sinks.dtype)
        return dq, dk.to(key.dtype), dv.to(value.dtype), dsinks, None, None


class _Tile:
    """What forward and backward do alike to a tile. Query heads that share a kv head are rows of one matrix."""

    def __init__(self, query, key, padding_mask, how):
        self.kv_heads, self.groups = key.shape[1], query.shape[1] // key.shape[1]
        self.sum_dtype = statistics_dtype(query.dtype)
        # Half precision products are slow on CPUs and fast elsewhere; sums are kept in float32 either way.
        self.product_dtype = self.sum_dtype if query.device.type == "cpu" else query.dtype
        self.padding_mask, self.how = padding_mask, how
        self.generator = torch.Generator(query.device).manual_seed(how.seed) if how.dropout else None

    def group(self, block):
        """(rows, heads, n, width) -> (rows, kv_heads, groups * n, width) in the dtype of sums."""
        return block.unflatten(1, (self.kv_heads, self.groups)).flatten(2, 3).to(self.sum_dtype)

    def ungroup(self, block):
        """The inverse of `group`, without the dtype."""
        return block.unflatten(2, (self.groups, -1)).flatten(1, 2)

    def spread(self, sinks, queries):
        """(heads,) -> (1, kv_heads, groups * n, 1)."""
        per_head = queries.shape[2] // self.groups
        return sinks.to(self.sum_dtype).repeat_interleave(per_head).view(1, self.kv_heads, -1, 1)

    def start(self, queries, sinks):
        """Running maximum and sum of exponentials before any key: those of the sink, or of nothing."""
        if sinks is None:
            # Finite, so that differences to a hidden score are never of two infinities.
            lowest = torch.finfo(self.sum_dtype).min / 2
            return queries.new_full((*queries.shape[:-1], 1), lowest), queries.new_zeros(*queries.shape[:-1], 1)
        top = self.spread(sinks, queries).expand(queries.shape[0], -1, -1, -1)
        return top, torch.ones_like(top)

    def product(self, left, right):
        return (left.to(self.product_dtype) @ right.to(self.product_dtype)).to(self.sum_dtype)

    def scores(self, queries, keys, rows, q, k):
        """Scores (rows, kv_heads, groups * n, m), -inf where hidden, and the slope of the softcap or None."""
        scores = self.product(queries, keys.transpose(-1, -2)).mul_(self.how.scale)
        slope, softcap = None, self.how.softcap
        if softcap is not None:
            scores = scores.div_(softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(softcap)
        hidden = self.how.sight.hidden(q.start, q.stop, k.start, k.stop, scores.device)
        by_head = scores.unflatten(2, (self.groups, -1))
        if hidden is not None:
            by_head.masked_fill_(hidden, float("-inf"))
        if self.padding_mask is not None:
            by_head.masked_fill_(~self.padding_mask[rows, None, None, None, k], float("-inf"))
        return scores, slope

    def mask(self, weights):
        """The next dropout mask with its factor 1 / (1 - p), or None without dropout."""
        if self.generator is None:
            return None
        share = 1 - self.how.dropout
        return torch.empty_like(weights).bernoulli_(share, generator=self.generator).div_(share)

    def drop(self, weights):
        kept = self.mask(weights)
        return weights if kept is None else weights.mul_(kept)
