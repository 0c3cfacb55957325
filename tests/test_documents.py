"""Documents and mask patterns against the masks that transformers itself builds."""

import pytest
import torch
from transformers import MistralConfig, masking_utils

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention import register
from memo_hf.layers.attention_mask import MaskPattern, mask_pattern
from memo_hf.layers.documents import find_documents

BATCH, TOKENS, WINDOW = 3, 17, 4
register()


def config(implementation="sdpa", **settings):
    made = MistralConfig(sliding_window=WINDOW, hidden_size=8, num_attention_heads=1, **settings)
    made._attn_implementation = implementation
    return made


def restarting(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def right_padding():
    return torch.arange(TOKENS) < torch.tensor([TOKENS, 11, 5])[:, None]


def both_sides():
    mask = right_padding()
    mask[:, :2] = False
    return mask


def holes():
    mask = right_padding()
    mask[:, 3:4] = False
    return mask


POSITIONS = {
    "rows alike": restarting(5, 5, 7)[None],
    "rows differ": torch.stack([restarting(17), restarting(1, 15, 1), restarting(8, 9)]),
    "jumps and offsets": torch.stack([torch.arange(17) + 3, torch.arange(17) * 2, restarting(9, 8) + 5]),
    "one document": torch.arange(TOKENS)[None],
}
PADDINGS = {"right": right_padding(), "left": right_padding().flip(1), "both": both_sides(), "holes": holes()}


def sees(documents, causal=True, window=None):
    """(batch, tokens, tokens) bool by our account, and (batch, tokens) bool without padding."""
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool) if not causal else distance >= 0
    if window is not None:
        seen = seen & (distance < window if causal else distance.abs() <= window)
    label = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    if documents is not None:
        label.fill_(-1)
        for number, (row, start, stop) in enumerate(documents.spans):
            label[row, start:stop] = number
        if documents.padding_mask is not None:
            label[~documents.padding_mask] = -1
    real = label >= 0
    return seen & (label[:, :, None] == label[:, None]) & real[:, None], real


def masks_of_transformers(kind, **arguments):
    mask = getattr(masking_utils, kind)(
        config(), torch.zeros(BATCH, TOKENS, 8), arguments.pop("attention_mask", None), None, **arguments
    )
    if mask is None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        mask = (mask if "bidirectional" in kind else mask.tril()).expand(BATCH, 1, TOKENS, TOKENS)
    return mask[:, 0]


KINDS = {
    "create_causal_mask": (True, None),
    "create_sliding_window_causal_mask": (True, WINDOW),
    "create_bidirectional_mask": (False, None),
    "create_bidirectional_sliding_window_mask": (False, WINDOW),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PADDINGS)
def test_padding_is_seen_as_transformers_sees_it(kind, name):
    theirs = masks_of_transformers(kind, attention_mask=PADDINGS[name])
    # Positions are for packing alone: with a mask they are ignored, as transformers ignores them.
    documents = find_documents(
        BATCH, TOKENS, attention_mask=PADDINGS[name].long(), position_ids=POSITIONS["rows alike"]
    )
    ours, real = sees(documents, *KINDS[kind])
    assert torch.equal(real, PADDINGS[name])
    assert torch.equal(ours[real], theirs[real])
    assert documents.has_holes == (name == "holes")
    assert torch.equal(documents.padding_mask, PADDINGS[name])


@pytest.mark.parametrize("kind", ["create_causal_mask", "create_sliding_window_causal_mask"])
@pytest.mark.parametrize("name", POSITIONS)
def test_packing_is_seen_as_transformers_sees_it(kind, name):
    theirs = masks_of_transformers(kind, position_ids=POSITIONS[name])
    documents = find_documents(BATCH, TOKENS, position_ids=POSITIONS[name])
    assert torch.equal(sees(documents, *KINDS[kind])[0], theirs)
    assert (documents is None) == (name == "one document")


def test_mask_without_padding():
    ones, positions = torch.ones(BATCH, TOKENS), POSITIONS["rows alike"]
    assert find_documents(BATCH, TOKENS) is None
    assert find_documents(BATCH, TOKENS, attention_mask=ones) is None
    # transformers drops packing where a mask is given, save that of flash attention for a single row.
    assert find_documents(BATCH, TOKENS, attention_mask=ones, position_ids=positions) is None
    assert find_documents(1, TOKENS, attention_mask=ones[:1], position_ids=positions) is None
    flash = {"attention_mask": ones[:1], "position_ids": positions, "implementation": "flash_attention_2"}
    assert find_documents(1, TOKENS, **flash).spans == ((0, 0, 5), (0, 5, 10), (0, 10, 17))


def test_bounds_for_variable_length_kernels():
    documents = find_documents(BATCH, TOKENS, position_ids=POSITIONS["rows differ"])
    assert documents.cu_seqlens.tolist() == [0, 17, 18, 33, 34, 42, 51]
    assert documents.cu_seqlens.dtype == torch.int32 and documents.max_length == 17
    documents = find_documents(BATCH, TOKENS, attention_mask=PADDINGS["right"])
    assert documents.cu_seqlens.tolist() == [0, 17, 28, 34, 39, 51]
    long_padding = torch.zeros(1, 3000, dtype=torch.bool)
    long_padding[:, :100] = True
    documents = find_documents(1, 3000, attention_mask=long_padding)
    assert documents.cu_seqlens.tolist() == [0, 100, 1124, 2148, 3000] and documents.max_length == 1024


def test_given_bounds():
    documents = find_documents(2, 10, cu_seqlens=torch.tensor([0, 4, 10, 13]), position_ids=torch.arange(10)[None])
    assert documents.spans == ((0, 0, 4), (0, 4, 10), (1, 0, 3), (1, 3, 10))
    assert find_documents(1, 10, cu_seqlens=torch.tensor([0, 10])) is None
    padded = find_documents(1, 10, cu_seqlens=torch.tensor([0, 4, 10]), attention_mask=torch.arange(10)[None] < 8)
    assert padded.spans == ((0, 0, 4), (0, 4, 8)) and padded.cu_seqlens.tolist() == [0, 4, 8, 10]
    with pytest.raises(UnsupportedModelError, match="runs from 0 to 12; the batch has 10 tokens"):
        find_documents(1, 10, cu_seqlens=torch.tensor([0, 12]))


def test_three_dimensional_positions():
    text = POSITIONS["rows differ"]
    rotary = torch.zeros(3, BATCH, TOKENS, dtype=torch.long)
    assert find_documents(BATCH, TOKENS, position_ids=rotary) is None
    with_text = torch.cat([text[None], rotary])
    expected = find_documents(BATCH, TOKENS, position_ids=text)
    assert find_documents(BATCH, TOKENS, position_ids=with_text).spans == expected.spans


@pytest.mark.parametrize("mask", [torch.ones(BATCH, 1, TOKENS, TOKENS), torch.ones(BATCH, 9), {"full_attention": None}])
def test_refuses_masks_that_are_no_padding_masks(mask):
    with pytest.raises(UnsupportedModelError, match=r"takes a padding mask of shape \(3, 17\)"):
        find_documents(BATCH, TOKENS, attention_mask=mask)


def memo_mask_of(kind="create_causal_mask", attention_mask=None, settings=None, **arguments):
    made = config("memo", **(settings or {}))
    return getattr(masking_utils, kind)(made, torch.zeros(BATCH, TOKENS, 8), attention_mask, None, **arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, {"attention_mask": right_padding()}, {"position_ids": POSITIONS["rows differ"]}])
def test_mask_says_its_pattern(kind, given):
    if "bidirectional" in kind and "position_ids" in given:
        given = {}
    mask = memo_mask_of(kind, **given)
    assert mask.memo_pattern == MaskPattern(*KINDS[kind], packed="position_ids" in given)
    assert torch.equal(mask, given.get("attention_mask", torch.ones(BATCH, TOKENS, dtype=torch.bool)))
    if "attention_mask" not in given:
        assert mask.untyped_storage().nbytes() == 1
    else:
        assert mask.untyped_storage().data_ptr() == given["attention_mask"].untyped_storage().data_ptr()
        assert not hasattr(given["attention_mask"], "memo_pattern")


def test_chunks_are_refused_unless_one_holds_all():
    settings = {"attention_chunk_size": TOKENS}
    mask = memo_mask_of("create_chunked_causal_mask", settings=settings)
    assert mask.memo_pattern == MaskPattern(causal=True, window=None, chunk=TOKENS)
    with pytest.raises(UnsupportedModelError, match="is made with chunked_overlay"):
        memo_mask_of("create_chunked_causal_mask", settings={"attention_chunk_size": TOKENS - 1})


def anything(batch_idx, head_idx, q_idx, kv_idx):
    return q_idx >= 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"or_mask_function": anything}, "a function of its own"),
        ({"and_mask_function": anything}, "a function of its own"),
        ({"block_sequence_ids": torch.zeros(BATCH, TOKENS, dtype=torch.long)}, "is made with or_masks"),
        ({"attention_mask": torch.ones(BATCH, TOKENS + 2)}, "17 queries and 19 keys"),
    ],
)
def test_refuses_patterns_without_a_kernel(arguments, says):
    with pytest.raises(UnsupportedModelError, match=says):
        memo_mask_of(**arguments)


def test_unknown_mask_functions_are_refused():
    for function in (anything, masking_utils.and_masks(masking_utils.causal_mask_function, anything), object()):
        with pytest.raises(UnsupportedModelError, match="is made with"):
            mask_pattern(function, TOKENS)
