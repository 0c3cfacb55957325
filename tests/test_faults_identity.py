"""Kind C of the cases: which storages move, views and reused addresses, writes in place, tensors that many share."""

import gc

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import memo_hf
from memo_hf.errors import MemoError
from memo_hf.swap import SwapGroup
from tests.harness.sessions import IDS, REBUILD, SETTINGS, TOKEN, assert_same_bits, enabled, kept, simulate, small
from tests.tiny_models import gradients, random_ids, worst_relative_error


def note_what_is_put(monkeypatch):
    """The tensors that are handed to swap groups from now on."""
    tensors, put = [], SwapGroup.put

    def noting(group, tensor, **options):
        tensors.append(tensor.detach())
        return put(group, tensor, **options)

    monkeypatch.setattr(SwapGroup, "put", noting)
    return tensors


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_and_buffers_never_move(monkeypatch, settings, autocast):  # case 42
    peft, packed = pytest.importorskip("peft"), note_what_is_put(monkeypatch)
    model = small("qwen2", tie_word_embeddings=True)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), model)
    enabled(model, **SETTINGS[settings])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gradients(model, IDS)
    theirs = {address(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert packed and not [theirs[address(tensor)] for tensor in packed if address(tensor) in theirs]
    shapes = {parameter.shape for parameter in model.parameters() if parameter.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    assert not [tensor.shape for tensor in packed if tensor.shape in shapes]  # nor a cast of one


def test_what_all_layers_share_never_moves_and_stays_alive(monkeypatch):  # case 45
    """cos and sin belong to all layers; swapped with one they would be freed under the next."""
    simulate(monkeypatch)
    model, shared = small(), []
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: shared.append(output))
    expected = kept(model, settings=TOKEN)
    enabled(model, **TOKEN)
    packed = note_what_is_put(monkeypatch)
    shared.clear()
    assert_same_bits(gradients(model, IDS), expected)
    assert len(shared) == 1
    assert not {address(tensor) for tensor in shared[0]} & {address(tensor) for tensor in packed}


def test_bytes_swapped_are_what_the_shapes_say():  # case 43
    """Layer input, q, k, v, attention output and logsumexp; with swapped chunks, also what their graphs save."""
    batch, tokens, layers = 2, 13, 2
    model = small(layers=layers + 1)
    numbers = batch * tokens * (32 + 32 + 2 * 16 + 32 + 4)
    for qkv, saved in (("swap", numbers), ("rebuild", numbers - batch * tokens * (32 + 2 * 16))):
        session = enabled(model, swap_fraction=0.0, chunk_size=12, unswapped_layers=1, qkv=qkv)
        gradients(model, IDS)
        stats = session.stats
        assert stats.swapped_bytes == stats.planned_bytes == stats.peak_host_bytes == 4 * saved * layers
        assert stats.prefetched_bytes <= stats.swapped_bytes
        memo_hf.disable(model)
    session = enabled(model, mode="layer", swap_fraction=0.0, unswapped_layers=1)
    gradients(model, IDS)
    assert session.stats.swapped_bytes == 4 * batch * tokens * 32 * layers


def test_an_address_that_is_used_again(monkeypatch):  # case 33
    """Layers whose activations take the memory that the layer before has just given back."""
    simulate(monkeypatch, eagerness=1.0)
    settings = {**TOKEN, "swap_fraction": 1.0, "unswapped_layers": 0}
    model = small(layers=4)
    expected = kept(model, settings=settings)
    enabled(model, **settings)
    gc.collect()
    for _ in range(2):
        assert_same_bits(gradients(model, IDS), expected)


class _Strides(nn.Module):
    """Token-wise, and saves views of every kind: transposed, expanded, offset, overlapping, empty."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        scale = (x * x).mean(-1, keepdim=True).expand_as(x)
        x = x * scale * self.weight.expand_as(x)
        x = x.unflatten(-1, (4, 8)).transpose(-1, -2)
        x = x.sigmoid() * x
        x = x.transpose(-1, -2).flatten(-2)
        offset = x[..., 1:] * x[..., :-1]
        windows = x.unfold(-1, 4, 2).square().sum(-1)
        nothing = x[..., :0].exp().sum(-1, keepdim=True)
        return x + nn.functional.pad(offset, (0, 1)) + nn.functional.pad(windows, (0, 17)) + nothing


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_views_of_every_kind(monkeypatch, fraction):  # case 35
    model = small()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential()
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, _Strides())
    settings = {**TOKEN, "swap_fraction": fraction}
    plain, expected = gradients(model, IDS), kept(model, settings=settings)
    simulate(monkeypatch)
    session = enabled(model, **settings)
    assert session.stats.layers[0].mode == "token"
    ours = gradients(model, IDS)
    assert_same_bits(ours, expected)
    assert worst_relative_error(ours, plain) < 1e-5


class _AddsInPlace(LlamaDecoderLayer):
    """Writes the residual, and its own input, in place."""

    def forward(self, hidden_states, **kwargs):
        output = super().forward(hidden_states, **kwargs)
        hidden_states += output
        return hidden_states


class _AddsToItsOwn(LlamaDecoderLayer):
    """Writes in place to what nothing has saved."""

    def forward(self, hidden_states, **kwargs):
        output = super().forward(hidden_states, **kwargs) * 1
        output += hidden_states
        return output


class _WritesOverASavedTensor(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        output = super().forward(hidden_states, **kwargs)
        gate = output.sigmoid()
        product = gate * output
        gate.add_(1)
        return product


def model_of(layer_class):
    torch.manual_seed(0)
    config = small().config
    model = LlamaModel(config).train()
    model.layers = nn.ModuleList(layer_class(config, index) for index in range(config.num_hidden_layers))
    return model


def gradients_of(model, ids=IDS, **inputs):
    model.zero_grad()
    (model(input_ids=ids, **inputs).last_hidden_state * torch.linspace(-1, 1, 32)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_layer_that_writes_to_its_own_memory(monkeypatch):  # cases 36 and 39
    simulate(monkeypatch)
    model = model_of(_AddsToItsOwn)
    plain = gradients_of(model)
    session = enabled(model, **TOKEN)
    assert session.stats.layers[0].mode == "token"
    assert worst_relative_error(gradients_of(model), plain) < 1e-5


def test_a_layer_that_writes_to_its_input(monkeypatch):  # case 39
    """Right or refused, never silently wrong."""
    simulate(monkeypatch)
    model = model_of(_AddsInPlace)
    session = enabled(model, **{**TOKEN, "unswapped_layers": 0})
    stats = session.stats.layers[0]
    assert (stats.mode, stats.reason) == ("layer", "it writes to its own input")
    with pytest.raises(MemoError, match=r"saved for backward in layers.\d was changed by an in-place"):
        gradients_of(model)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_layer_that_writes_over_what_backward_needs(fraction):  # cases 37 and 38
    """Plain torch raises; so does memo_hf, whether the chunk is swapped or recomputed."""
    model = model_of(_WritesOverASavedTensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(model)
    enabled(model, **{**TOKEN, "swap_fraction": fraction})
    with pytest.raises(RuntimeError, match="in-place|inplace"):
        gradients_of(model)


def test_lora_that_adds_to_the_saved_output(monkeypatch):  # case 38
    class AddsInPlace(nn.Linear):
        def __init__(self):
            super().__init__(32, 64, bias=False)
            self.down, self.up = nn.Parameter(torch.randn(32, 2)), nn.Parameter(torch.randn(2, 64))

        def forward(self, x):
            output = super().forward(x)
            output += x @ self.down @ self.up
            return output

    simulate(monkeypatch)
    torch.manual_seed(1)
    model = small()
    for layer in model.model.layers:
        layer.mlp.up_proj = AddsInPlace()
    plain = gradients(model, IDS)
    enabled(model, **TOKEN)
    assert worst_relative_error(gradients(model, IDS), plain) < 1e-5


def test_a_weight_that_changes_between_forward_and_backward():
    """Recomputed chunks would use another weight than forward did."""
    model = small()
    enabled(model, **{**TOKEN, "swap_fraction": 1.0})
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace"):
        loss.backward()


def test_a_tensor_of_another_device_stays_there(monkeypatch):  # case 44
    simulate(monkeypatch)
    engine = memo_hf.session.SwapEngine(torch.device("cpu"), 2**20)
    elsewhere = torch.ones(3, device="meta")
    handle = engine.open_group().put(elsewhere)
    assert handle.get().device == elsewhere.device and engine.stats.swapped_bytes == 0
    engine.close()


def test_rebuilt_queries_are_dropped_with_their_layer(monkeypatch):
    """Two passes in flight rebuild from their own inputs."""
    simulate(monkeypatch)
    model, batches = small(), [IDS, random_ids(2, 13, seed=9)]
    expected = [kept(model, ids, settings=REBUILD) for ids in batches]
    enabled(model, **REBUILD)
    losses = [model(input_ids=ids, labels=ids).loss for ids in batches]
    for loss, theirs in zip(losses, expected, strict=True):
        model.zero_grad()
        loss.backward()
        assert_same_bits({name: p.grad for name, p in model.named_parameters()}, theirs)
