"""The attention function and mask function that memo_hf registers with transformers.

The function is only visible to a layer while memo_hf runs it (see `roles.playing`), so evaluation, generation and
everything else outside a training forward use what the user asked for.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention_kernels import attend
from memo_hf.layers.attention_mask import memo_mask
from memo_hf.layers.roles import ATTENTION_NAME, AttentionReached, Finish, Project, Whole, current_role


def memo_attention(module, query, key, value, attention_mask=None, **kwargs):
    """As transformers calls it: q, k, v (batch, heads, tokens, head_dim) -> (batch, tokens, heads, head_dim)."""
    role = current_role()
    if isinstance(role, Project):
        role.module = module
        role.query_key_value = (query, key, value)
        role.attention_arguments = {"attention_mask": attention_mask, **kwargs}
        raise AttentionReached
    if isinstance(role, Finish):
        role.num_calls += 1
        if role.num_calls > 1:
            raise UnsupportedModelError(
                f"a layer calls attention again, in {type(module).__name__}, which it did not do in the check (is it "
                "given the output of an encoder?)"
            )
        return role.attention_output, None
    if isinstance(role, Whole):
        role.num_calls += 1
        return role.attend(module, query, key, value, attention_mask=attention_mask, **kwargs), None
    raise UnsupportedModelError(
        f"memo_hf's attention was called by a {type(module).__name__} outside of the layers that memo_hf runs. If a "
        "layer's forward was replaced after memo_hf was enabled, call memo_hf.disable(model) and enable it again"
    )


def attend_as_asked(module, query, key, value, *, implementation, documents, **arguments):
    """`attend`, with the arguments named as models name them: sinks as `s_aux`, causality on the module."""
    causal = arguments.pop("is_causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", True)
    sinks = arguments.pop("s_aux", None)
    return attend(
        module,
        query,
        key,
        value,
        implementation=implementation,
        documents=documents,
        is_causal=causal,
        sinks=sinks,
        **arguments,
    )


def register() -> None:
    """Make the attention and its mask known to transformers, under a name that it does not take for a hub kernel."""
    AttentionInterface.register(ATTENTION_NAME, memo_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, memo_mask)
