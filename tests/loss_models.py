"""Tiny models, batches and comparisons for the tests of the chunked loss."""

import torch
import transformers
from torch import nn
from torch.nn import functional

from memo_hf.layers.loss import install_chunked_loss

VOCABULARY, WIDTH, TOKENS, CHUNK = 211, 16, 48, 8


def make_model(family="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "pad_token_id": 0,
            **options,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():  # large enough logits that a softcap bends them
        model.get_output_embeddings().weight.mul_(20)
    return model


def make_batch(batch=2, ignored=5):
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, TOKENS // batch))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def install_on(head, rows):
    """Install on a bare head, with no model around it."""
    holder = nn.Module().train()
    holder.get_output_embeddings = lambda: head
    return install_chunked_loss(holder, rows)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, inputs, loss_of=lambda output: output.loss):
    model.zero_grad()
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(stock, chunked, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(chunked[0], stock[0], rtol=rtol, atol=atol, equal_nan=True)
    assert chunked[1].keys() == stock[1].keys()
    for name, grad in stock[1].items():
        scale = grad.abs().max().clamp(min=1).item()
        torch.testing.assert_close(chunked[1][name], grad, rtol=rtol, atol=atol * scale)


def compare(model, inputs, loss_of=lambda output: output.loss, whole=()):
    """One step stock and one step chunked; `whole` names the operations that may need the logits."""
    stock = step(model, inputs, loss_of)
    installed = install_chunked_loss(model, CHUNK)
    try:
        chunked = step(model, inputs, loss_of)
    finally:
        installed()
    assert installed.calls == 1 and tuple(installed.materialised) == tuple(whole)
    assert_same(stock, chunked)
    return stock, chunked


def own_loss(output, labels, **options):
    logits = output.logits[..., :-1, :].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1), **options)
