"""Attention of whole sequences, by the kernel that suits the user's choice, the device, the dtype and the pattern.

Called by the layer engine, once per layer, with gradients on and under saved-tensor hooks, so all of it is ordinary
autograd code. It must not know chunks, swapping or the Trainer.

| the user's implementation | on a CPU | on CUDA |
| --- | --- | --- |
| sdpa, eager | torch's CPU flash kernel | torch's flash kernel (half precision, head size to 256) |
| the same, whole rows without a window | torch's CPU flash kernel | cuDNN's, where torch prefers it (Hopper) |
| the same with softcap, sinks or padding between tokens | `attention_math` | `attention_math` |
| the same with dropout | `attention_math` | torch's flash kernel |
| flash_attention_2, 3, 4 and flash kernels of the hub | transformers' own function | transformers' own function |
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention_blocks import Sight, flash_blocks
from memo_hf.layers.attention_math import MathAttention
from memo_hf.layers.documents import Documents
from memo_hf.layers.roles import attention_set_to
from memo_hf.layers.sequence_parallel import core_attention

_CUDA_FLASH_WIDTH = 256
_CUDNN_DEVICE = "cuda"


def refuse_unsupported(implementation: str, device: torch.device) -> None:
    """Raise `UnsupportedModelError` where `attend` has no way to run an attention implementation on a device."""
    if implementation in ("sdpa", "eager"):
        return
    if implementation == "flex_attention":
        raise UnsupportedModelError(
            "memo_hf does not run flex_attention, which needs a block mask of its own and has no backward on a CPU. "
            "Choose attn_implementation='sdpa': memo_hf runs it without a mask in memory, with windows, documents, "
            "softcap and sinks"
        )
    if _is_flash(implementation) and device.type != "cpu":
        return
    flash = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if _is_flash(name)]
    raise UnsupportedModelError(
        f"memo_hf does not run the attention implementation {implementation!r} on {device.type}. Choose "
        f"attn_implementation='sdpa' or 'eager', or on a GPU one of {sorted(flash)}"
    )


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
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Attention over whole sequences. Key and value heads are never repeated, and no tensor is tokens by tokens.

    Args:
        module: the attention module, read by transformers' flash functions alone.
        query: (batch, heads, tokens, d), a transposed view of (batch, tokens, heads, d) memory. Floating point.
        key, value: (batch, kv_heads, tokens, d) and (batch, kv_heads, tokens, d_v), likewise.
        implementation: the user's attention implementation, by transformers' name.
        documents: which tokens may see which; None: each row is one document.
        dropout: probability with which an attention weight is dropped.
        scaling: factor of the products of queries and keys; None: d ** -0.5.
        is_causal: no token sees later ones.
        sliding_window: causal: tokens that one sees, itself among them; else how far it sees. None: all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) a score per head that takes part in the softmax and has no value.
        attention_mask: what `memo_mask` returned. With sdpa and eager its window counts, as in transformers.
        kwargs: what else models hand to attention, of no consequence here.

    Returns:
        (batch, tokens, heads, d_v), sharing the storage of the output that is saved for backward. Rows of padding are
        finite.

    Raises:
        UnsupportedModelError: an implementation, or a position bias, that memo_hf does not run; a mask and an attention
            that disagree on causality.

    Warns where documents are kept apart that the model itself would let see each other.
    """
    refuse_unsupported(implementation, query.device)
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a position bias for every pair of tokens, which grows with the square of "
            "the sequence; memo_hf has no kernel for it. Train this model without memo_hf"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _is_flash(implementation):
        return _attend_as_transformers(
            module,
            query,
            key,
            value,
            implementation,
            documents,
            dropout=dropout,
            scaling=scale,
            is_causal=is_causal,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=sinks,
        )
    if (pattern := getattr(attention_mask, "memo_pattern", None)) is not None:
        if documents is not None and documents.padding_mask is None and not pattern.packed:
            warnings.warn(
                f"the batch holds packed documents. memo_hf keeps them apart, as flash attention does; without memo_hf "
                f"{type(module).__name__} would let them see each other under {implementation!r} (its model ignores "
                "position_ids in its mask, or uses a cache: pass use_cache=False), so losses differ",
                stacklevel=2,
            )
        if pattern.causal != is_causal:
            kinds = {True: "causal", False: "bidirectional"}
            raise UnsupportedModelError(
                f"the mask for {type(module).__name__} is {kinds[pattern.causal]} while its attention is "
                f"{kinds[is_causal]}, so its meaning is unclear. Train this model without memo_hf"
            )
        if pattern.chunk is not None and query.shape[2] > pattern.chunk:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends in chunks of {pattern.chunk} tokens and the ranks that share a "
                f"sequence have {query.shape[2]}; memo_hf has no kernel for it. Train without memo_hf, or on shorter "
                "sequences"
            )
        sliding_window = pattern.window
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    has_holes = documents is not None and documents.has_holes
    plain = softcap is None and sinks is None and not has_holes
    if plain and documents is None and sliding_window is None:
        options = dict(dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        if _cudnn_is_preferred(query, key, value, options):
            return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)
    if plain and _cuda_flash_takes(query, value):
        return _cuda_flash(query, key, value, documents, dropout, scale, is_causal, sliding_window)
    if plain and query.device.type == "cpu" and not dropout:
        sight = Sight(_spans(documents, query), is_causal, sliding_window)
        return flash_blocks(query, key, value, sight=sight, scale=scale).transpose(1, 2)
    compute = MathAttention(
        # Row by row, which bounds the size of a tile.
        sight=Sight(_spans(documents, query, by_row=True), is_causal, sliding_window),
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        # From torch's own generator, so that runs with equal seeds are equal, and checkpoints can replay it.
        seed=int(torch.randint(1 << 62, (), device="cpu")) if dropout else 0,
    )
    return compute(query, key, value, sinks, documents.padding_mask if has_holes else None).transpose(1, 2)


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation and "|" not in implementation and implementation in ALL_ATTENTION_FUNCTIONS


def _spans(documents: Documents | None, query: torch.Tensor, by_row: bool = False):
    batch, tokens = query.shape[0], query.shape[2]
    if documents is not None:
        return tuple((slice(row, row + 1), start, stop) for row, start, stop in documents.spans)
    if by_row:
        return tuple((slice(row, row + 1), 0, tokens) for row in range(batch))
    return ((slice(0, batch), 0, tokens),)


def _attend_as_transformers(module, query, key, value, implementation, documents, **arguments):
    """transformers' own flash function, told where documents end, so that it need not ask the device in every layer."""
    padding_mask = None
    if documents is not None and documents.has_holes:
        padding_mask = documents.padding_mask
    elif documents is not None:
        arguments.update(
            cu_seq_lens_q=documents.cu_seqlens,
            cu_seq_lens_k=documents.cu_seqlens,
            max_length_q=documents.max_length,
            max_length_k=documents.max_length,
        )
    # The function loads the kernel that the module's configuration names.
    with attention_set_to(implementation, (module.config,)):
        return core_attention(implementation)(module, query, key, value, padding_mask, **arguments)[0]


def _cudnn_is_preferred(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict) -> bool:
    """Whether torch would itself choose cuDNN's kernel here, half again as fast as its flash kernel on an H200."""
    # Beyond 32-bit indices nobody is known to have tried it.
    if query.device.type != _CUDNN_DEVICE or query.numel() >= 2**31:
        return False
    return torch._fused_sdp_choice(query, key, value, **options) == SDPBackend.CUDNN_ATTENTION.value


def _cuda_flash_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= _CUDA_FLASH_WIDTH
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _cuda_flash(query, key, value, documents, dropout, scale, is_causal, window):
    """torch's CUDA flash kernel, by its name: `scaled_dot_product_attention` might choose another."""
    batch, _, tokens, _ = query.shape
    value_width = value.shape[-1]
    # The kernel wants one head size, a multiple of 8; zeros change neither scores nor the columns that are kept.
    width = -(-max(query.shape[-1], value_width) // 8) * 8
    query, key, value = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (query, key, value))
    bounds, longest = None, tokens
    if documents is not None:
        bounds, longest = documents.cu_seqlens, documents.max_length
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    behind = None if window is None else window - is_causal
    out = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        dropout,
        is_causal,
        False,
        scale=scale,
        window_size_left=behind,
        window_size_right=0 if is_causal else behind,
    )[0]
    return out.unflatten(0, (batch, tokens))[..., :value_width] if documents is not None else out[..., :value_width]
