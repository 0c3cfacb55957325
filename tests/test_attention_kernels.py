"""Attention kernels against dense attention with an explicit mask: outputs, gradients, memory and refusals."""

import pytest
import torch

from memo_hf.layers.attention_kernels import attend
from memo_hf.layers.documents import find_documents

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def make(batch, heads, kv_heads, tokens, width, value_width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def one(count, size):
        tensor = torch.randn(batch, tokens, count, size, generator=generator, dtype=torch.float64)
        return tensor.to(dtype).transpose(1, 2).requires_grad_()

    return one(heads, width), one(kv_heads, width), one(kv_heads, value_width)


def visible(batch, tokens, causal, window, documents):
    """(batch, 1, tokens, tokens) bool and (batch, tokens) bool: who sees whom, and which tokens are no padding."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    sees = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        sees &= distance >= 0
        if window is not None:
            sees &= distance < window
    elif window is not None:
        sees &= distance.abs() <= window
    sees = sees.expand(batch, 1, tokens, tokens).clone()
    real = torch.ones(batch, tokens, dtype=torch.bool)
    if documents is not None:
        label = torch.full((batch, tokens), -1)
        for number, (row, start, stop) in enumerate(documents.spans):
            label[row, start:stop] = number
        if documents.padding_mask is not None:
            label[~documents.padding_mask] = -1
        sees &= (label[:, None, :, None] == label[:, None, None, :]) & (label >= 0)[:, None, None, :]
        real = label >= 0
    return sees, real


def dense(query, key, value, sees, scale, softcap=None, sinks=None, keep=None):
    """Attention in one piece. `keep`: (batch, heads, tokens, tokens), the dropout mask with its factor."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    return ((weights if keep is None else weights * keep) @ value).transpose(1, 2)


def gradients(out, inputs, real):
    torch.manual_seed(7)
    weight = torch.randn(out.shape, dtype=torch.float64) * real[:, :, None, None]
    return torch.autograd.grad((out.to(torch.float64) * weight).sum(), inputs)


def layouts(batch, tokens):
    third = tokens // 3
    restarting = torch.cat([torch.arange(third), torch.arange(third), torch.arange(tokens - 2 * third)])
    lengths = torch.tensor([tokens - 5 * (row + 1) for row in range(batch)])
    right = torch.arange(tokens)[None] < lengths[:, None]
    return {
        "dense": {},
        "packed": {"position_ids": restarting.expand(batch, tokens)},
        "right": {"attention_mask": right.long()},
        "left": {"attention_mask": right.flip(1).long()},
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["dense", "packed", "right", "left"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("batch, kv_heads, value_width", [(1, 2, 8), (2, 4, 8), (2, 1, 4), (2, 2, 16)])
def test_kernel_equals_dense(dtype, layout, causal, window, batch, kv_heads, value_width):
    tokens = 61
    inputs = make(batch, 4, kv_heads, tokens, 8, value_width, dtype)
    documents = find_documents(batch, tokens, **layouts(batch, tokens)[layout])
    out = attend(
        None, *inputs, implementation="sdpa", documents=documents, is_causal=causal, sliding_window=window, scaling=0.3
    )
    sees, real = visible(batch, tokens, causal, window, documents)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense(*wide, sees, 0.3)
    assert out.shape == (batch, tokens, 4, value_width)
    assert bool((out[~real] == 0).all())
    torch.testing.assert_close(out[real].double(), expected[real], rtol=0, atol=TOLERANCE[dtype])
    for got, want in zip(gradients(out, inputs, real), gradients(expected, wide, real)):
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
