"""Tensors that stand where nobody reads: shapes as torch has them, and no operator run twice."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memo_hf.layers import unmade as module
from memo_hf.layers.unmade import Unmade, unmade


class Calls(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def rotated(flat, cos):
    query = flat.view(*flat.shape[:-1], -1, 8).transpose(1, 2)
    half = torch.cat((-query[..., 4:], query[..., :4]), dim=-1)
    return (query * cos + half * cos).to(torch.bfloat16).contiguous()


@pytest.fixture(autouse=True)
def _nothing_kept():
    module._results.clear()
    yield
    module._results.clear()


def test_shapes_are_those_of_torch():
    flat, cos = torch.randn(2, 5, 32), torch.randn(2, 1, 5, 8)
    ours, theirs = rotated(unmade((2, 5, 32), torch.float32), cos), rotated(flat, cos)
    assert type(ours) is Unmade and ours.is_meta
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    with pytest.raises(RuntimeError):
        ours.sum().item()


def test_equal_calls_are_looked_up_and_others_are_not():
    cos = torch.randn(1, 1, 5, 8)
    first = rotated(unmade((1, 5, 32), torch.float32), cos)
    with Calls() as calls:
        again = rotated(unmade((1, 5, 32), torch.float32), torch.randn(1, 1, 5, 8))
        assert calls.number == 1 and again is first  # randn's alone
    assert rotated(unmade((1, 6, 32), torch.float32), torch.randn(1, 1, 6, 8)).shape == (1, 4, 6, 8)
    one, wide = unmade((1, 5, 32), torch.float32), unmade((1, 5, 32), torch.float64)
    assert one is not wide and (one + 1).dtype == torch.float32 and (wide + 1).dtype == torch.float64
    assert one[:, 1:3].shape == (1, 2, 32) and one[:, 1:4].shape == (1, 3, 32) and one.sum(1).shape == (1, 32)
    # What is equal in Python is not always so for torch.
    assert (unmade((3,), torch.int64) * 1).dtype == torch.int64
    assert (unmade((3,), torch.int64) * 1.0).dtype == torch.float32


def test_what_is_kept_is_bounded_and_never_mistaken(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 8)
    for size in range(1, 40):
        held = unmade((size,), torch.float32)
        assert (held + 1).shape == (held * 2).shape == (size,)
        assert len(module._results) <= 8
