"""What exactness costs, counted: bytes swapped by formula, attention once, operations recomputed, no large tensor."""

import gc
import math
import weakref

import pytest
import torch
from exactness import assert_nothing_on_host, enabled, gradients_of, language_loss
from harness.simulated_copies import settle
from peft import LoraConfig, get_peft_model
from tiny_models import TOKEN_MODE, random_ids, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from memo_hf.layers.tokenwise import Node

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
DENSE = [family for family in TOKEN_MODE if family not in ("mixtral", "qwen3_moe")]
WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 32, 4, 2, 8, 64, 4


class Watch(TorchDispatchMode):
    """Notes the operations, and every tensor that they return."""

    def __init__(self):
        self.names, self.shapes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        # Not the stand-in for the logits, which is a subclass, and not meta tensors.
        self.shapes += [tuple(t.shape) for t in tree_leaves(result) if type(t) is torch.Tensor and not t.is_meta]
        return result

    def count(self, part):
        return sum(part in name for name in self.names)


def step(session, loss):
    """One step, in which no copy is still under way when backward begins. Returns the bytes on the host then."""
    value = loss()
    settle(session._engine)
    gc.collect()
    at_peak = session.stats.host_bytes
    value.backward()
    assert_nothing_on_host(session)
    return at_peak


@pytest.mark.parametrize(
    "family, swap_fraction", [*((family, 0.5) for family in DENSE), ("llama", 0.0), ("llama", 1.0)]
)
def test_planned_swapped_and_prefetched_bytes_are_equal(family, swap_fraction):  # case 43
    model = tiny(family, num_hidden_layers=3)
    with enabled(model, swap_fraction=swap_fraction) as session:
        for tokens in (37, 20):
            at_peak = step(session, language_loss(model, random_ids(2, tokens)))
            stats = session.stats
            assert stats.planned_bytes == stats.swapped_bytes == stats.prefetched_bytes == at_peak > 0


@pytest.mark.parametrize("batch, tokens", [(1, 37), (2, 20)])
@pytest.mark.parametrize("qkv", ["swap", "rebuild"])
def test_bytes_of_recomputed_layers_by_formula(qkv, batch, tokens):
    """At fraction 0 a layer swaps h, o and the logsumexp, and q, k, v where they wait."""
    model, unswapped = tiny("llama"), 1
    per_token = WIDTH + HEADS * HEAD + HEADS
    if qkv == "swap":
        per_token += (HEADS + 2 * KV_HEADS) * HEAD
    with enabled(model, swap_fraction=0.0, qkv=qkv, unswapped_layers=unswapped) as session:
        assert step(session, language_loss(model, random_ids(batch, tokens))) == session.stats.swapped_bytes
        assert session.stats.swapped_bytes == 4 * batch * tokens * per_token * (LAYERS - unswapped)


def test_bytes_of_recomputed_layers_by_formula_in_bf16():
    model = tiny("llama").bfloat16()
    per_token = 2 * (WIDTH + HEADS * HEAD + (HEADS + 2 * KV_HEADS) * HEAD) + 4 * HEADS  # fp32 logsumexp
    with enabled(model, swap_fraction=0.0, unswapped_layers=1) as session:
        step(session, language_loss(model, random_ids(2, 37)))
        assert session.stats.swapped_bytes == 2 * 37 * per_token * (LAYERS - 1)


@pytest.mark.parametrize("tokens, swap_fraction", [(40, 0.5), (37, 0.3), (37, 0.99)])
def test_exactly_the_fraction_of_tokens_is_swapped(tokens, swap_fraction):
    model, layers = tiny("llama"), LAYERS - 1
    swapped = {}
    for fraction in (0.0, swap_fraction, 1.0):
        with enabled(model, swap_fraction=fraction, chunk_size=8) as session:
            step(session, language_loss(model, random_ids(1, tokens)))
            swapped[fraction] = session.stats.swapped_bytes
    per_token, rest = divmod(swapped[1.0] - swapped[0.0], tokens * layers)
    assert rest == 0
    assert swapped[swap_fraction] - swapped[0.0] == round(swap_fraction * tokens) * per_token * layers


@pytest.mark.parametrize("qkv", ["swap", "rebuild"])
@pytest.mark.parametrize("swap_fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_runs_once_forward_and_once_backward(family, swap_fraction, qkv):
    model = tiny(family, sliding_window=64) if family == "gemma3_text" else tiny(family)
    with enabled(model, swap_fraction=swap_fraction, qkv=qkv) as session:
        with Watch() as watch:
            language_loss(model, random_ids(2, 37))().backward()
        assert session.stats.forwards == 1
    assert watch.count("flash_attention_for_cpu") == 2 * LAYERS
    assert watch.count("flash_attention_for_cpu_backward") == LAYERS


def flops(loss):
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return counter.get_flop_counts()["Global"]


def products(found):
    # Batched ones are left out: in transformers 5.17 the rotary table is one.
    return sum(count for operation, count in found.items() if str(operation) in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("qkv", ["swap", "rebuild"])
@pytest.mark.parametrize("swap_fraction", [0.0, 0.5, 1.0])
def test_operations_recomputed_are_those_of_project_and_finish(swap_fraction, qkv):
    """Matrix products beyond a plain run's: those of recomputed tokens once more, and project once more to rebuild."""
    batch, tokens = 2, 40
    model = tiny("llama")
    loss = language_loss(model, random_ids(batch, tokens))
    plain = products(flops(loss))
    with enabled(model, swap_fraction=swap_fraction, qkv=qkv, chunk_size=16, unswapped_layers=1):
        ours = products(flops(loss))
    project = 2 * WIDTH * (HEADS + 2 * KV_HEADS) * HEAD
    finish = 2 * (HEADS * HEAD * WIDTH + 3 * WIDTH * MLP)
    unread = 2 * MLP * WIDTH  # the last product of a layer, whose result backward does not read
    recomputed = batch * round((1 - swap_fraction) * tokens) * (project + finish - unread) * LAYERS
    # q, k, v of swapped tokens are swapped, and those of the one layer that stays on the device stay as well.
    rebuilt = batch * round((1 - swap_fraction) * tokens) * project * (LAYERS - 1) if qkv == "rebuild" else 0
    assert ours - plain == recomputed + rebuilt


def test_rebuilt_queries_keys_and_values_do_not_outlive_their_layer(monkeypatch):
    model, rebuilt = tiny("llama"), []
    own = Node.again

    def again(node):
        assert not [reference for reference in rebuilt if reference() is not None]
        found = own(node)
        rebuilt.extend(weakref.ref(tensor) for tensor in found)
        return found

    monkeypatch.setattr(Node, "again", again)
    with enabled(model, swap_fraction=0.5, qkv="rebuild"):
        value = language_loss(model, random_ids(2, 37))()
        value.backward()
    assert len(rebuilt) == 3 * (LAYERS - 1)  # the last layer keeps its own on the device


def test_a_frozen_projection_is_not_computed_for_nothing():
    """Finish computes no q, k, v: its forward alone has no product of theirs."""
    model = tiny("llama")
    ids = random_ids(1, 32)
    with enabled(model, swap_fraction=0.0), FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    project = 2 * WIDTH * (HEADS + 2 * KV_HEADS) * HEAD
    finish = 2 * (HEADS * HEAD * WIDTH + 3 * WIDTH * MLP)
    head = 2 * WIDTH * 128
    assert products(counter.get_flop_counts()["Global"]) == 32 * (LAYERS * (project + finish) + head)


BIG = {
    "llama": {},
    "padded llama": {},
    "packed llama": {},
    "mistral": dict(sliding_window=40),
    "gemma2": dict(sliding_window=40),
    "gpt_oss": dict(num_hidden_layers=3, sliding_window=40),
    "dropout": dict(attention_dropout=0.1),
}


@pytest.mark.parametrize("what", BIG)
def test_no_tensor_is_tokens_by_tokens_nor_tokens_by_vocabulary(what):
    """Neither in forward nor in backward. Tiles of attention are smaller, whatever the number of tokens."""
    family = {"padded llama": "llama", "packed llama": "llama", "dropout": "llama"}.get(what, what)
    tokens, vocabulary = 1031, 1499
    model = tiny(family, vocab_size=vocabulary, max_position_embeddings=2048, **{"num_hidden_layers": 2, **BIG[what]})
    ids = random_ids(1, tokens)
    inputs = {}
    if what == "padded llama":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 500:510] = 0
    elif what == "packed llama":
        inputs = dict(position_ids=torch.cat([torch.arange(400), torch.arange(tokens - 400)])[None], use_cache=False)
    with enabled(model, chunk_size=256, swap_fraction=0.5) as session:
        assert {layer.mode for layer in session.stats.layers} == {"token"}
        with Watch() as watch:
            language_loss(model, ids, **inputs)().backward()
    largest = max(watch.shapes, key=math.prod)
    assert math.prod(largest) < tokens * tokens / 1.9, largest
    assert not [shape for shape in watch.shapes if shape.count(tokens) > 1]
    assert not [shape for shape in watch.shapes if vocabulary in shape and math.prod(shape) > 512 * vocabulary]
    if what == "llama":
        with Watch() as stock:
            model(input_ids=ids, labels=ids)
        assert (1, tokens, vocabulary) in stock.shapes


def test_adapters_add_only_their_own_operations():
    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    loss = language_loss(model, random_ids(2, 32))
    plain = products(flops(loss))
    with enabled(model, swap_fraction=1.0, unswapped_layers=0):
        assert products(flops(loss)) == plain
    assert gradients_of(model, loss)
