"""Tensor and context parallelism are refused by name; FSDP2, whose weights are DTensors too, is not."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exactness import gradients_of, language_loss
from harness.forked import run_ranks
from tiny_models import random_ids, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

import memo_hf
from memo_hf import MemoConfig
from memo_hf.errors import ConfigError, UnsupportedModelError

MEMO = MemoConfig(chunk_size=8)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_split_by_a_tensor_parallel_plan():
    model, mesh = tiny("llama"), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight is a DTensor .*all-reduces"):
        memo_hf.enable(model, MEMO)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_says_it_is_split():
    model = tiny("llama")
    model._tp_size = 2
    with pytest.raises(UnsupportedModelError, match="tensor parallelism over 2 ranks.*sp_backend='deepspeed'"):
        memo_hf.enable(model, MEMO)


def test_fully_sharded_weights_are_none_of_it():
    model, ids = tiny("llama"), random_ids(2, 33)
    expected = gradients_of(model, language_loss(model, ids))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    memo_hf.enable(model, MEMO)
    ours = gradients_of(model, language_loss(model, ids))
    memo_hf.disable(model)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(ours[name].full_tensor(), expected[name], rtol=1e-4, atol=1e-6)


def test_within_context_parallel():  # case 84
    model, ids = tiny("llama"), random_ids(1, 32)
    loss = language_loss(model, ids)
    memo_hf.enable(model, MEMO)
    try:
        with context_parallel(init_device_mesh("cpu", (1,)), buffers=[ids], buffer_seq_dims=[1]):
            with pytest.raises(ConfigError, match="context_parallel, whose ring attention cannot run.*sp_backend="):
                loss()
        loss().backward()
    finally:
        memo_hf.disable(model)


def within_a_context_of_two():
    """What a rank is told in a forward pass, whose tokens are shared with the other."""
    model, ids = tiny("llama"), random_ids(1, 32)
    memo_hf.enable(model, MEMO)
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[ids], buffer_seq_dims=[1]):
        assert ids.shape == (1, 16)
        language_loss(model, ids)()


def loaded_by_a_plan(folder):
    memo_hf.enable(AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train(), MEMO)


def told(function, *args):
    try:
        function(*args)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return "nothing"


def worker(rank, folder):
    dist.init_process_group("gloo")
    found = [told(loaded_by_a_plan, folder), told(within_a_context_of_two)]
    (Path(folder) / f"{rank}.txt").write_text("\n".join(found))
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    """A model loaded by transformers' own tensor parallel plan, and a forward pass in torch's context parallelism."""
    tiny("llama").save_pretrained(tmp_path)
    run_ranks(worker, str(tmp_path), num_ranks=2)
    for rank in range(2):
        plan, context = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert re.search("with tensor parallelism over 2 ranks: its all-reduces", plan), plan
        assert re.search("context_parallel, whose ring attention cannot run", context), context  # case 84
