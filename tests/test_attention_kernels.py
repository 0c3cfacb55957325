"""Attention kernels against dense attention with an explicit mask: outputs, gradients, memory and refusals."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo_hf.errors import UnsupportedModelError
from memo_hf.layers.attention_blocks import Sight, flash_blocks
from memo_hf.layers.attention_kernels import attend, refuse_unsupported
from memo_hf.layers.attention_mask import MaskPattern
from memo_hf.layers.attention_math import MathAttention
from memo_hf.layers.documents import find_documents

TOKENS = 61
SCALE = 0.3
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}
LAYOUTS = ["dense", "packed", "right", "left", "holes"]


def make(batch, heads, kv_heads, tokens, width, value_width, dtype):
    """q, k, v as layers make them: transposed views of (batch, tokens, heads, width) memory."""
    generator = torch.Generator().manual_seed(0)

    def one(count, size):
        tensor = torch.randn(batch, tokens, count, size, generator=generator, dtype=torch.float64)
        return tensor.to(dtype).transpose(1, 2).requires_grad_()

    return one(heads, width), one(kv_heads, width), one(kv_heads, value_width)


def layout(name, batch, tokens=TOKENS):
    third = tokens // 3
    restarting = torch.cat([torch.arange(third), torch.arange(third), torch.arange(tokens - 2 * third)])
    right = torch.arange(tokens) < torch.tensor([tokens - 5 * (row + 1) for row in range(batch)])[:, None]
    holes = right.clone()
    holes[:, 7:12] = False
    given = {
        "dense": {},
        "packed": {"position_ids": restarting.expand(batch, tokens)},
        "right": {"attention_mask": right.long()},
        "left": {"attention_mask": right.flip(1).long()},
        "holes": {"attention_mask": holes},
    }
    return find_documents(batch, tokens, **given[name])


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


def dense(query, key, value, sees, softcap=None, sinks=None, kept=None):
    """Attention in one piece. `kept`: (batch, heads, tokens, tokens), the dropout mask with its factor."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    return ((weights if kept is None else weights * kept) @ value).transpose(1, 2)


def gradients(out, inputs, real):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return torch.autograd.grad((out.double() * weight * real[:, :, None, None]).sum(), inputs)


def assert_equal_to_dense(inputs, documents, causal, window, softcap=None, sinks=None):
    batch, heads, tokens, _ = inputs[0].shape
    dtype = inputs[0].dtype
    out = attend(
        None,
        *inputs,
        implementation="sdpa",
        documents=documents,
        is_causal=causal,
        sliding_window=window,
        scaling=SCALE,
        softcap=softcap,
        sinks=sinks,
    )
    sees, real = visible(batch, tokens, causal, window, documents)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wide_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    expected = dense(*wide, sees, softcap, wide_sinks)
    assert out.dtype == dtype and out.shape == (batch, tokens, heads, inputs[2].shape[-1])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[real].double(), expected[real], rtol=0, atol=TOLERANCE[dtype])
    got = gradients(out, inputs if sinks is None else (*inputs, sinks), real)
    want = gradients(expected, wide if sinks is None else (*wide, wide_sinks), real)
    for one, other in zip(got, want, strict=True):
        scale = other.abs().max().item() if other.dim() == 1 else 1  # a sink's gradient sums over all tokens
        torch.testing.assert_close(
            one.double(), other, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype] * max(1, scale)
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])  # case 84: the window is kept
@pytest.mark.parametrize("batch, kv_heads, value_width", [(1, 2, 8), (2, 4, 8), (2, 1, 4), (2, 2, 16)])
def test_attention_equals_dense(dtype, name, causal, window, batch, kv_heads, value_width):
    inputs = make(batch, 4, kv_heads, TOKENS, 8, value_width, dtype)
    assert_equal_to_dense(inputs, layout(name, batch), causal, window)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap, has_sinks", [(2.0, False), (None, True), (2.0, True)])
def test_softcap_and_sinks_equal_dense(dtype, name, causal, window, softcap, has_sinks):
    inputs = make(2, 4, 2, TOKENS, 8, 4, dtype)
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=dtype, requires_grad=True) if has_sinks else None
    assert_equal_to_dense(inputs, layout(name, 2), causal, window, softcap, sinks)


@pytest.mark.parametrize("tokens, window", [(700, None), (700, 130), (1100, 600)])
def test_several_tiles_equal_dense(tokens, window):
    inputs = make(1, 2, 1, tokens, 4, 4, torch.float64)
    assert_equal_to_dense(inputs, layout("packed", 1, tokens), True, window)
    assert_equal_to_dense(inputs, layout("holes", 1, tokens), True, window, softcap=2.0)


def small(**settings):
    sight = Sight(
        ((slice(0, 2), 0, 7), (slice(1, 2), 7, 11)), settings.pop("causal", True), settings.pop("window", None)
    )
    return MathAttention(sight=sight, scale=SCALE, query_tile=3, key_tile=2, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 3},
        {"causal": False},
        {"causal": False, "window": 2},
        {"softcap": 1.5},
        {"dropout": 0.4, "seed": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_sinks", [True, False])
def test_gradcheck(settings, has_sinks):
    """Finite differences agree, so backward draws the dropout mask of forward."""
    inputs = make(2, 4, 2, 11, 3, 2, torch.float64)
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 2] = False
    compute = small(**dict(settings))

    def function(query, key, value, *rest):
        return compute(query, key, value, *rest or [None], mask)

    assert torch.autograd.gradcheck(function, [*inputs, sinks] if has_sinks else inputs, fast_mode=True)


def test_dropout_equals_dense_with_its_own_mask():
    inputs = make(1, 4, 2, TOKENS, 8, 8, torch.float64)
    sees, real = visible(1, TOKENS, True, None, None)
    compute = MathAttention(sight=Sight(((slice(0, 1), 0, TOKENS),), True, None), scale=SCALE, dropout=0.25, seed=3)
    out = compute(*inputs).transpose(1, 2)
    kept = torch.empty(1, 2, 2 * TOKENS, TOKENS, dtype=torch.float64)
    kept.bernoulli_(0.75, generator=torch.Generator().manual_seed(3)).div_(0.75)
    expected = dense(*inputs, sees, kept=kept.view(1, 4, TOKENS, TOKENS))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    for got, want in zip(gradients(out, inputs, real), gradients(expected, inputs, real), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_dropout_follows_the_seed_and_keeps_the_mean():
    inputs = make(1, 2, 1, 600, 4, 4, torch.float32)
    arguments = {"implementation": "eager", "dropout": 0.2}
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(None, *inputs, **arguments))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    ones = torch.ones_like(inputs[2])
    assert abs(attend(None, inputs[0], inputs[1], ones, **arguments).mean().item() - 1) < 0.01


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


FEATURES = [{}, {"softcap": 2.0}, {"sinks": torch.zeros(2)}, {"dropout": 0.1}, {"sliding_window": 200}]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: next(iter(features), "plain"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_tensor_of_tokens_by_tokens(features, name):
    tokens = 1024
    inputs = make(2, 2, 1, tokens, 8, 8, torch.float32)
    documents = layout(name, 2, tokens)
    with Largest() as largest:
        attend(None, *inputs, implementation="sdpa", documents=documents, **features).sum().backward()
    assert 2 * 2 * tokens * 8 <= largest.elements < tokens * tokens


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: next(iter(features), "plain"))
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("value_width", [8, 4])
def test_saves_q_k_v_output_and_logsumexp_alone(features, name, value_width):
    inputs = make(2, 2, 1, TOKENS, 8, value_width, torch.bfloat16)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(None, *inputs, implementation="sdpa", documents=layout(name, 2), **features)
    for tensor in (*inputs, out):
        assert saved.pop(tensor.untyped_storage().data_ptr()) == tensor.numel() * 2
    if "sinks" in features:
        saved.pop(features["sinks"].untyped_storage().data_ptr())
    assert list(saved.values()) == [2 * 2 * TOKENS * 4]
    assert out.is_contiguous()


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: next(iter(features), "plain"))
def test_documents_do_not_leak(features):
    """Case 85: what changes in one document changes no other, forward or backward."""
    inputs = make(2, 2, 1, TOKENS, 8, 8, torch.float64)
    documents = layout("packed", 2)
    third = TOKENS // 3

    def run(query, key, value):
        torch.manual_seed(0)
        return attend(None, query, key, value, implementation="sdpa", documents=documents, is_causal=False, **features)

    moved = [x.detach().clone() for x in inputs]
    for x in moved:
        x[0, :, third + 2] += 1
    changed = (run(*inputs) - run(*moved)).abs().amax((2, 3)) > 0
    if "sliding_window" not in features:
        assert changed[0, third : 2 * third].all()
    changed[0, third : 2 * third] = False
    assert not changed.any()
    for gradient in torch.autograd.grad(run(*inputs)[0, third : 2 * third].sum(), inputs):
        outside = torch.ones(2, TOKENS, dtype=torch.bool)
        outside[0, third : 2 * third] = False
        assert not gradient.transpose(1, 2)[outside].any()


def test_gradient_of_padding_is_zero_even_where_padding_has_one():
    inputs = make(2, 2, 1, TOKENS, 8, 8, torch.float32)
    documents = layout("left", 2)
    out = attend(None, *inputs, implementation="sdpa", documents=documents)
    padding = ~documents.padding_mask
    assert not out[padding].any()
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert torch.isfinite(gradient).all() and not gradient.transpose(1, 2)[padding].any()


def test_autocast_attends_in_half_precision():
    inputs = make(1, 2, 1, TOKENS, 8, 8, torch.float32)
    for features in ({}, {"softcap": 5.0}):
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(None, *inputs, implementation="sdpa", **features)
        assert out.dtype == torch.bfloat16
        exact = attend(None, *(x.bfloat16().double() for x in inputs), implementation="sdpa", **features)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2)


def test_blocks_of_very_long_sequences():
    """Case 110: the blocks of a million tokens join without gap or overlap."""
    tokens = 1_200_000
    sight = Sight(((slice(0, 1), 0, tokens),), True, 4096)
    blocks = list(sight.blocks(0, tokens, 1000))
    assert blocks[-1] == (tokens - 1000, tokens, tokens - 1000 - 4095, tokens)
    assert [b[0] for b in blocks] == list(range(0, tokens, 1000))


def test_window_of_the_mask_counts():
    """Some models give their window to the mask alone; transformers' sdpa follows the mask, and so do we."""
    inputs = make(1, 2, 1, TOKENS, 8, 8, torch.float64)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask.memo_pattern = MaskPattern(causal=True, window=9)
    out = attend(None, *inputs, implementation="sdpa", attention_mask=mask, scaling=SCALE)
    torch.testing.assert_close(out, dense(*inputs, visible(1, TOKENS, True, 9, None)[0]), rtol=0, atol=1e-11)
    with pytest.raises(UnsupportedModelError, match="causal while its attention is bidirectional"):
        attend(None, *inputs, implementation="sdpa", attention_mask=mask, is_causal=False)


def test_warns_where_the_model_itself_would_mix_documents():
    inputs, documents = make(1, 2, 1, TOKENS, 8, 8, torch.float64), layout("packed", 1)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    arguments = {"implementation": "eager", "documents": documents, "attention_mask": mask}
    mask.memo_pattern = MaskPattern(causal=True, window=None, packed=True)
    quiet = attend(None, *inputs, **arguments)
    mask.memo_pattern = MaskPattern(causal=True, window=None)
    with pytest.warns(UserWarning, match="would let them see each other under 'eager'"):
        assert torch.equal(attend(None, *inputs, **arguments), quiet)
    attend(None, *inputs, **{**arguments, "documents": layout("right", 1)})


def test_one_kernel_call_where_one_suffices(monkeypatch):
    calls = []
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(*args, **kwargs):
        calls.append(args)
        return kernel(*args, **kwargs)

    monkeypatch.setattr("memo_hf.layers.attention_blocks._flash_forward", counted)
    inputs = make(3, 2, 1, TOKENS, 8, 8, torch.float32)
    attend(None, *inputs, implementation="sdpa")
    attend(None, *inputs, implementation="sdpa", sliding_window=TOKENS)
    assert len(calls) == 2
    attend(None, *inputs, implementation="sdpa", documents=layout("packed", 3))
    assert len(calls) == 2 + 9
    flash_blocks(*inputs, sight=Sight(((slice(0, 3), 0, TOKENS),), True, 9), scale=1.0, block=20)
    assert len(calls) == 2 + 9 + 4


@pytest.mark.parametrize(
    "implementation, device, says",
    [
        ("flex_attention", "cpu", "Choose attn_implementation='sdpa'"),
        ("flex_attention", "cuda", "Choose attn_implementation='sdpa'"),
        ("flash_attention_2", "cpu", "'flash_attention_2' on cpu.*'sdpa' or 'eager'"),
        ("my_attention", "cuda", "'my_attention' on cuda.*flash_attention_2"),
        ("paged|flash_attention_2", "cuda", "does not run"),
    ],
)
def test_refuses_what_it_cannot_run(implementation, device, says):
    with pytest.raises(UnsupportedModelError, match=says):
        refuse_unsupported(implementation, torch.device(device))


def test_accepts_what_it_can_run():
    for implementation in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        refuse_unsupported(implementation, torch.device("cuda"))
    with pytest.raises(UnsupportedModelError, match="position bias"):
        inputs = make(1, 2, 1, 8, 8, 8, torch.float32)
        attend(torch.nn.Identity(), *inputs, implementation="sdpa", position_bias=torch.zeros(1, 2, 8, 8))


class Module(torch.nn.Module):
    """What transformers' flash functions read of an attention module."""

    def __init__(self):
        super().__init__()
        self.config = LlamaConfig()
        self.config._attn_implementation = "memo"


def test_transformers_flash_function_is_told_the_documents(monkeypatch):
    seen = []

    def flash(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.config._attn_implementation, attention_mask, kwargs))
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash)
    monkeypatch.setattr("memo_hf.layers.attention_kernels.refuse_unsupported", lambda *_: None)
    module, inputs = Module(), make(2, 2, 1, TOKENS, 8, 8, torch.float32)
    arguments = {"implementation": "flash_attention_2", "sliding_window": 9, "sinks": torch.zeros(2), "softcap": 3.0}
    for name in ("dense", "packed", "holes"):
        documents = layout(name, 2)
        assert attend(module, *inputs, documents=documents, position_ids=torch.zeros(1), **arguments).shape[1] == TOKENS
        implementation, mask, kwargs = seen[-1]
        assert implementation == "flash_attention_2" and module.config._attn_implementation == "memo"
        assert (kwargs["sliding_window"], kwargs["softcap"], kwargs["scaling"]) == (9, 3.0, 8**-0.5)
        assert kwargs["s_aux"] is arguments["sinks"] and "position_ids" not in kwargs
        assert mask is (documents.padding_mask if name == "holes" else None)
        assert kwargs.get("cu_seq_lens_q") is (documents.cu_seqlens if name == "packed" else None)
        assert kwargs.get("max_length_k") == (documents.max_length if name == "packed" else None)


@pytest.mark.parametrize("name", ["dense", "packed", "right", "left"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_cuda_kernel_is_given_what_it_needs(monkeypatch, name, causal, window):
    """The arguments of the kernel, which is played by dense attention: runs, window, head sizes that it takes."""

    def kernel(query, key, value, bounds, key_bounds, longest, _, dropout, is_causal, debug, *, scale, **sides):
        assert dropout == 0.0 and debug is False and bounds is key_bounds and scale == SCALE
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        left, right = sides["window_size_left"], sides["window_size_right"]
        runs = [slice(0, longest)]
        if bounds is not None:
            query, key, value = query[None], key[None], value[None]
            runs = [slice(*pair) for pair in pairwise(bounds.tolist())]
            assert longest == max(run.stop - run.start for run in runs)
        outs = []
        for run in runs:
            tokens = run.stop - run.start
            distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
            seen = (distance >= (-tokens if right is None else -right)) & (
                distance <= (tokens if left is None else left)
            )
            assert is_causal == (right == 0)
            outs.append(dense(*(x[:, run].transpose(1, 2) for x in (query, key, value)), seen))
        out = torch.cat(outs, 1)
        return (out if bounds is None else out[0], None, None, None, None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    monkeypatch.setattr("memo_hf.layers.attention_kernels._cuda_flash_takes", lambda query, value: True)
    inputs, documents = make(2, 4, 2, TOKENS, 12, 6, torch.float64), layout(name, 2)
    out = attend(
        None,
        *inputs,
        implementation="sdpa",
        documents=documents,
        is_causal=causal,
        sliding_window=window,
        scaling=SCALE,
    )
    sees, real = visible(2, TOKENS, causal, window, documents)
    torch.testing.assert_close(out[real], dense(*inputs, sees)[real], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_that_torch_prefers(monkeypatch, kv_heads, causal):
    """Torch's choice is asked for with what is then computed, and taken for whole sequences alone."""
    asked, given = [], []

    def choice(*tensors, **options):
        asked.append(options)
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr("memo_hf.layers.attention_kernels.torch._fused_sdp_choice", choice)
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "memo_hf.layers.attention_kernels.F.scaled_dot_product_attention",
        lambda *tensors, **options: given.append(options) or own(*tensors, **options),
    )
    inputs = make(2, 4, kv_heads, TOKENS, 8, 8, torch.float64)
    arguments = dict(implementation="sdpa", is_causal=causal, scaling=SCALE)
    attend(None, *inputs, **arguments)
    assert not asked  # On a CPU there is no cuDNN to ask for.
    monkeypatch.setattr("memo_hf.layers.attention_kernels._CUDNN_DEVICE", "cpu")
    out = attend(None, *inputs, **arguments)
    expected = dict(dropout_p=0.0, is_causal=causal, scale=SCALE, enable_gqa=kv_heads != 4)
    assert asked == given == [expected] and out.is_contiguous()
    torch.testing.assert_close(out, dense(*inputs, visible(2, TOKENS, causal, None, None)[0]), rtol=0, atol=1e-11)
    for other in (dict(documents=layout("packed", 2)), dict(sliding_window=9), dict(softcap=2.0)):
        attend(None, *inputs, **arguments, **other)
    assert len(asked) == len(given) == 1


def test_a_chunk_that_holds_the_tokens_of_one_rank_alone():
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask.memo_pattern = MaskPattern(causal=True, window=None, chunk=8)
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    with pytest.raises(UnsupportedModelError, match="in chunks of 8 tokens and the ranks .* have 16"):
        attend(torch.nn.Module(), query, key, value, implementation="sdpa", attention_mask=mask)
