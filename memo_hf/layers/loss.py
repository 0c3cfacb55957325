"""The loss in chunks: `install_chunked_loss` keeps a causal language model from ever holding its logits in full.

The session calls it. It patches one method, the `forward` of the model's output embeddings, to return a stand-in for
the logits (`deferred_logits.py`) in a training forward. What the model does next, scaling, softcap, cast, shift,
`view`, `cross_entropy`, runs as it stands, so there is no code for a model family here, nor a loss function of our own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memo_hf.layers.chunked_head import HeadCall, InsideHead
from memo_hf.layers.logits_ops import defer_logits
from memo_hf.layers.patch import Patch
from memo_hf.planner.chunks import default_loss_chunk_tokens
from memo_hf.units import format_bytes


class ChunkedLoss:
    """What `install_chunked_loss` did; call it to undo that.

    Attributes:
        reason: why the loss is not chunked; None where it is.
        calls: head calls put off so far.
        materialised: names of the operations that needed the full logits, each once.
    """

    def __init__(self, reason: str | None = None):
        self.reason, self.calls, self.materialised = reason, 0, []
        self._patch_of_head: Patch | None = None

    def _patch(self, model: nn.Module, head: nn.Module, chunk_tokens, min_tokens: int) -> None:
        stock = head.forward

        def forward(hidden, *args, **kwargs):
            if isinstance(hidden, InsideHead):
                return hidden.function()
            rows = self._rows_at_once(model, head, hidden, chunk_tokens) if not args and not kwargs else None
            num_tokens = hidden.shape[:-1].numel()
            # Where FSDP2 shards the head, a loss outside of the model gathers it: on all ranks, however few the tokens.
            is_sharded = isinstance(model, FSDPModule) or isinstance(head, FSDPModule)
            if rows is not None and num_tokens <= max(rows, min_tokens - 1) and not is_sharded:
                rows = None
            if rows is None:
                return stock(hidden, *args, **kwargs)
            logits = defer_logits(HeadCall(head, stock, hidden, rows, self._note_whole), hidden)
            if logits is None:
                self.reason = f"the head, {type(head).__name__}, cannot run on some of its rows with gradients"
                return stock(hidden)
            self.calls += 1
            return logits

        self._patch_of_head = Patch(head, forward)

    def _rows_at_once(self, model, head, hidden, chunk_tokens) -> int | None:
        """Tokens per chunk, or None where this call is not a training forward of plain tensors."""
        training = model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not training or not isinstance(hidden, torch.Tensor) or isinstance(hidden, DTensor):
            return None
        if hidden.dim() < 2 or not hidden.is_floating_point():
            return None
        parameters = list(head.parameters())
        if any(isinstance(p, DTensor) for p in parameters):  # tensor parallel: the vocabulary is split already
            return None
        num_tokens, width = hidden.shape[:-1].numel(), hidden.shape[-1]
        vocabulary = max((p.shape[0] for p in parameters if p.dim() == 2), default=width)
        if callable(chunk_tokens):
            return chunk_tokens(num_tokens, width, vocabulary)
        return chunk_tokens or default_loss_chunk_tokens(num_tokens, width, vocabulary, hidden.device.type)

    def _note_whole(self, name: str, logits) -> None:
        if not self.materialised:
            size = format_bytes(logits.numel() * logits.element_size())
            warnings.warn(
                f"{name} needs the whole logits, {tuple(logits.shape)} or {size}, which memo_hf had put off; they are "
                "computed as in the stock model. Chunked are cross_entropy, log_softmax, gather, logsumexp, sum and "
                "argmax over the vocabulary; set chunked_loss=False to hear no more of it.",
                stacklevel=5,
            )
        if name not in self.materialised:
            self.materialised.append(name)

    def __call__(self) -> None:
        """Give the head its own `forward` back. Safe to call twice, and where somebody else has wrapped ours since."""
        if self._patch_of_head is not None:
            self._patch_of_head.undo()
            self._patch_of_head = None


def install_chunked_loss(
    model: nn.Module, chunk_tokens: int | Callable[[int, int, int], int] | None = None, min_tokens: int = 0
) -> ChunkedLoss:
    """Let `model` compute its loss in chunks of tokens, so that its logits never exist in full while it trains.

    Value and gradients are those of the stock model. `outputs.logits` stays usable: what cannot be done in chunks is
    done on the real logits, with one warning. Evaluation, generation and calls under `torch.no_grad` are untouched.

    Args:
        model: a Hugging Face model, or a PEFT model around one, with `get_output_embeddings`. Its head must treat each
            token by itself.
        chunk_tokens: tokens over the whole batch whose logits exist at once; or a function of (tokens, hidden width,
            vocabulary) that says so; None for `default_loss_chunk_tokens`. Calls with no more tokens run as they are.
        min_tokens: so do calls with fewer tokens than this.

    Returns:
        The installation: call it to undo it. Where nothing could be installed, its `reason` says why.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module):
        return ChunkedLoss(f"{type(model).__name__} has no output embeddings")
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in head.modules()):
        return ChunkedLoss("the head has dropout, whose mask could not be drawn again for a chunk")
    installed = ChunkedLoss()
    installed._patch(model, head, chunk_tokens, min_tokens)
    return installed
