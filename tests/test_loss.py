"""The chunked loss: same value, same gradients, no logits, and the model left as it was."""

import weakref

import pytest
import torch
import transformers
from loss_models import (
    CHUNK,
    TOKENS,
    VOCABULARY,
    WIDTH,
    assert_same,
    compare,
    gradients,
    install_on,
    make_batch,
    make_model,
    step,
)
from tiny_models import tiny
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_hf.layers.chunked_head import HeadCall
from memo_hf.layers.deferred_logits import DeferredLogits
from memo_hf.layers.logits_ops import defer_logits
from memo_hf.layers.loss import default_loss_chunk_tokens, install_chunked_loss

FAMILIES = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0, "attn_implementation": "eager"},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GPTNeoX": {"hidden_dropout": 0.0},
    "GPT2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_stock_loss(family):
    compare(make_model(family.split()[0], **FAMILIES[family]), make_batch())


def test_sequence_to_sequence_head_with_bias():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, pad_token_id=1,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).train()
    model.final_logits_bias.normal_()
    compare(model, make_batch(ignored=0))


@pytest.mark.parametrize("num_items", [17, torch.tensor(17)])
def test_num_items_in_batch(num_items):
    compare(make_model(), {**make_batch(), "num_items_in_batch": num_items})


def test_shift_labels():
    inputs = make_batch()
    compare(make_model(), {**inputs, "shift_labels": inputs["labels"].roll(-1, 1)})


@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 9}])
def test_all_labels_ignored_is_as_stock(extra):
    # The mean over no tokens is nan, the sum is zero; both leave zero gradients rather than none.
    stock, chunked = compare(make_model(), {**make_batch(ignored=TOKENS), **extra})
    assert torch.isnan(stock[0]) == (not extra)
    assert all(grad.count_nonzero() == 0 for grad in chunked[1].values())


def test_gradient_accumulation():
    model, batches = make_model(), [make_batch(), make_batch(batch=1, ignored=30)]

    def accumulate():
        model.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=40).loss.backward()
        return torch.zeros(()), gradients(model)

    stock = accumulate()
    install_chunked_loss(model, CHUNK)
    assert_same(stock, accumulate())


def assert_no_worse(exact, stock, chunked):
    """Loss and gradients are as near to those of fp64 as the stock model's."""
    assert chunked[0].dtype == stock[0].dtype and chunked[1].keys() == stock[1].keys()
    for name, grad in chunked[1].items():
        assert grad.dtype == stock[1][name].dtype
        allowed = 1.5 * (stock[1][name].double() - exact[1][name]).norm() + 1e-3 * exact[1][name].norm()
        assert (grad.double() - exact[1][name]).norm() <= allowed, name
    assert abs(chunked[0] - exact[0]) <= 1.5 * abs(stock[0] - exact[0]) + 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_stock(dtype):
    model, inputs = make_model().double(), make_batch()
    exact = step(model, inputs)
    model.to(dtype)
    stock = step(model, inputs)
    install_chunked_loss(model, CHUNK)
    assert_no_worse(exact, stock, step(model, inputs))


def test_bf16_loss_of_many_tokens_is_summed_in_fp32():  # case 112
    torch.manual_seed(0)
    hidden, targets = torch.randn(4096, WIDTH).bfloat16(), torch.randint(0, VOCABULARY, (4096,))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16()
    exact = functional.cross_entropy(head(hidden).float(), targets)
    install_on(head, CHUNK)
    loss = functional.cross_entropy(head(hidden).float(), targets)
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)


def test_autocast():
    model, inputs = make_model("Gemma2", final_logit_softcapping=3.0, attn_implementation="eager"), make_batch()
    exact = step(model.double(), inputs)
    model.float()

    def run():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        return loss.detach(), gradients(model)

    stock = run()
    install_chunked_loss(model, CHUNK)
    assert_no_worse(exact, stock, run())


def test_accelerate_mixed_precision_outputs():
    # accelerate casts every floating output to fp32, the logits among them; that must not bring them into being.
    from accelerate.utils.operations import convert_outputs_to_fp32

    model, inputs = make_model().bfloat16(), make_batch()
    installed = install_chunked_loss(model, CHUNK)
    output = convert_outputs_to_fp32(model.forward)(**inputs)
    assert output.logits.dtype == torch.float32 and isinstance(output.logits, DeferredLogits)
    output.loss.backward()
    assert not installed.materialised


def test_frozen_head_gets_no_gradient():
    model = make_model()
    model.lm_head.weight.requires_grad_(False)
    _, chunked = compare(model, make_batch())
    assert "lm_head.weight" not in chunked[1]


def test_frozen_model_with_trainable_head():
    model = make_model()
    model.model.requires_grad_(False)
    _, chunked = compare(model, make_batch())
    assert list(chunked[1]) == ["lm_head.weight"]


# PEFT reads a name that transformers has deprecated.
peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@peft_warns
@pytest.mark.parametrize("targets", [{"target_modules": ["lm_head", "q_proj"]}, {"modules_to_save": ["lm_head"]}])
def test_peft_on_the_head(targets):  # case 37
    import peft

    config = peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **targets})
    model = peft.get_peft_model(make_model(), config).train()
    _, chunked = compare(model, make_batch())
    assert any("lm_head" in name for name in chunked[1])


@peft_warns
def test_head_with_dropout_is_left_alone():
    import peft

    config = peft.LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.1)
    model = peft.get_peft_model(make_model(), config)
    assert "dropout" in install_chunked_loss(model, CHUNK).reason
    assert "forward" not in model.get_output_embeddings().__dict__


# Memory.


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.device.type != "meta":
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


def largest_of(model, inputs):
    with Largest() as seen:
        step(model, inputs)
    return seen.largest


def test_no_tensor_is_as_large_as_the_logits():
    vocabulary = 1999
    model = make_model("Gemma2", final_logit_softcapping=3.0, attn_implementation="eager", vocab_size=vocabulary)
    inputs = {key: value.repeat(1, 2) for key, value in make_batch().items()}
    num_tokens = inputs["input_ids"].numel()
    assert largest_of(model, inputs) == 4 * num_tokens * vocabulary
    install_chunked_loss(model, CHUNK)
    # The head's weight and its gradient are larger than a chunk of logits.
    assert largest_of(model, inputs) == 4 * WIDTH * vocabulary < 4 * num_tokens * vocabulary / 5


def test_head_runs_once_and_not_for_ignored_labels():
    model, inputs = make_model(), make_batch()
    rows, stock = [], model.lm_head.forward
    model.lm_head.forward = lambda hidden: rows.append(hidden.shape[:-1].numel()) or stock(hidden)
    install_chunked_loss(model, CHUNK)
    step(model, inputs)
    counted = (inputs["labels"][:, 1:] != -100).sum().item()
    assert rows[0] == 1 and sum(rows[1:]) == counted and max(rows) == CHUNK  # the first finds the dtype


def test_hidden_states_are_released_before_backward():
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY)
    install_on(head, CHUNK)
    inner = hidden * 1
    alive = weakref.ref(inner.untyped_storage())
    loss = functional.cross_entropy(head(inner), torch.arange(TOKENS))
    del inner
    assert alive() is None
    loss.backward()


def test_sizes_past_two_to_the_31st_are_counted_right():  # case 110
    tokens, width, vocabulary = 1_200_000, 4096, 128_256
    hidden = torch.empty(1, tokens, width, device="meta")
    head = nn.Linear(width, vocabulary, bias=False, device="meta")
    call = HeadCall(head, head.forward, hidden, 4096, lambda *_: pytest.fail("materialised"))
    logits = defer_logits(call, hidden)
    assert logits.numel() == tokens * vocabulary > 2**31
    rows = logits[..., :-1, :].float().reshape(-1, vocabulary)
    assert rows.shape == (tokens - 1, vocabulary) and rows.index.dtype == torch.int64 and len(rows.index) == tokens - 1


def test_default_chunk():
    assert default_loss_chunk_tokens(4096, 512, 32000, "cpu") == 256
    assert default_loss_chunk_tokens(65536, 4096, 128256, "cuda") == 2092  # as large as the hidden states
    assert default_loss_chunk_tokens(4096, 4096, 128256, "cuda") == 1024
    assert default_loss_chunk_tokens(1_200_000, 4096, 128256, "cuda") == 4096


# Where it steps aside, and how it leaves.


def test_evaluation_generation_and_short_batches_are_untouched():
    model, inputs = make_model(), make_batch()
    installed = install_chunked_loss(model, CHUNK)
    with torch.no_grad():
        assert type(model(**inputs).logits) is torch.Tensor
    assert type(model.eval()(**inputs).logits) is torch.Tensor
    options = {"max_new_tokens": 3, "do_sample": False}
    stock = make_model().eval().generate(inputs["input_ids"], **options)
    assert torch.equal(model.generate(inputs["input_ids"], **options), stock)
    model.train()
    assert torch.equal(model.generate(inputs["input_ids"], **options), stock)
    assert type(model(input_ids=inputs["input_ids"][:, :4]).logits) is torch.Tensor  # one chunk: nothing to gain
    assert installed.calls == 0


def test_undo_restores_the_head():
    model = make_model()
    before = dict(model.lm_head.__dict__)
    installed = install_chunked_loss(model, CHUNK)
    assert model.lm_head.__dict__.keys() - before.keys() == {"forward"}
    installed()
    installed()
    assert model.lm_head.__dict__ == before

    stock = model.lm_head.forward = lambda hidden: hidden
    install_chunked_loss(model, CHUNK)()
    assert model.lm_head.forward is stock


def test_undo_under_a_later_wrapper_lets_calls_through():
    model = make_model()
    installed = install_chunked_loss(model, CHUNK)
    ours = model.lm_head.forward
    model.lm_head.forward = lambda hidden: ours(hidden)
    installed()
    assert type(model(**make_batch()).logits) is torch.Tensor


def test_model_without_a_head_says_so():
    config = make_model().config
    assert "no output embeddings" in install_chunked_loss(transformers.LlamaModel(config)).reason
    assert "no output embeddings" in install_chunked_loss(nn.Linear(2, 2)).reason


def test_head_that_trains_more_than_its_parameters_is_left_alone():
    # FSDP1 puts views of a flat parameter where the parameters were; their gradients would be lost.
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY)
    del head.weight
    head.weight = weight * 1
    installed = install_on(head, CHUNK)
    assert type(head(hidden)) is torch.Tensor
    assert "Linear, cannot run" in installed.reason and installed.calls == 0


def test_short_batches_run_as_they_are():
    model = tiny("llama")
    undo = install_chunked_loss(model, chunk_tokens=8, min_tokens=32)
    for num_tokens, calls in ((31, 0), (32, 1)):
        ids = torch.randint(3, 128, (1, num_tokens))
        model(input_ids=ids, labels=ids).loss.backward()
        assert undo.calls == calls
    undo()
