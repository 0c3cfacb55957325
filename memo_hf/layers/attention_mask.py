"""The mask function registered with transformers as "memo": a padding mask that says which pattern it stands for.

Called by transformers while a model's forward builds its masks; the pattern is read by `attention_kernels.attend`. It
never builds a mask of tokens by tokens, and refuses patterns that a padding mask and a window cannot say.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import masking_utils

from memo_hf.errors import UnsupportedModelError


@dataclass(frozen=True)
class MaskPattern:
    """What a model asked its mask to be.

    Attributes:
        causal: no token sees later ones.
        window: the sliding window, or None.
        packed: it keeps packed documents apart. Not every model asks for that.
        chunk: tokens attend within chunks of so many, which hold all tokens of this rank; or None.
    """

    causal: bool
    window: int | None
    packed: bool = False
    chunk: int | None = None


def memo_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor:
    """A (batch, tokens) bool padding mask, True for tokens, whose `memo_pattern` is a `MaskPattern`.

    Without padding it is one element expanded, so it takes no memory, and reads no device. transformers' own mask for
    flash attention is None there; a tensor is returned because some models give their window to the mask alone and not
    to the attention call.

    Args:
        Those of transformers' mask interface.

    Raises:
        UnsupportedModelError: a pattern other than causal, bidirectional, either with a sliding window, and packed
            documents; or keys other than the batch's own tokens (a cache, prefix tuning).
    """
    if kv_length != q_length or kv_offset != 0:
        raise UnsupportedModelError(
            f"the attention has {q_length} queries and {kv_length} keys from {kv_offset} on; under memo_hf a token "
            "attends to tokens of its own batch only. Pass use_cache=False, and no prefix tuning"
        )
    if use_vmap:
        raise UnsupportedModelError(
            "the model adds a function of its own to its attention mask (such as bidirectional attention among image "
            "tokens); memo_hf has no kernel for it. Train this model, or these batches, without memo_hf"
        )
    pattern = mask_pattern(mask_function, kv_length)
    mask = attention_mask
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, kv_length)
    else:
        mask = mask.view(mask.shape)
    mask.memo_pattern = pattern
    return mask


def mask_pattern(mask_function, tokens: int) -> MaskPattern:
    """The pattern of a mask function made by transformers, read from what it was composed of.

    Evaluating it at some pairs would not do: a single image or chunk between them would go unseen.

    Raises:
        UnsupportedModelError: it holds a part that memo_hf has no kernel for, or one that it does not know.
    """
    causal, window, packed, chunk = False, None, False, None
    for name, values in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            window = values["sliding_window"]
        elif name == "packed_sequence_mask_function":
            packed = True
        elif name == "chunked_overlay" and tokens <= values["chunk_size"]:
            chunk = values["chunk_size"]  # the whole batch lies within one
        elif name != "bidirectional_mask_function":
            raise UnsupportedModelError(
                f"the model's attention mask is made with {name}; memo_hf has kernels for causal and bidirectional "
                "attention, with or without a sliding window, over packed or padded batches. Train this model, or "
                "these batches, without memo_hf"
            )
    return MaskPattern(causal, window, packed, chunk)


def _parts(mask_function):
    """(maker, its variables) of every part of an intersection; what is not an intersection is a part by itself."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        name = f"{getattr(mask_function, '__module__', '')}.{name}"
    values = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        # Positions go up by one within a document, and documents are kept apart by a part of their own.
        yield from _parts(values["mask_function"])
    else:
        yield name, values
