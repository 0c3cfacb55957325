"""What a user could pick instead of memo_hf, each as a context manager around a Llama model.

Used by `bench_step.py` and what builds on it. Each yields a context manager to run the step in. Peers are called as
their own documentation says; one that does not run here raises `NotHere` with the reason, which is printed in its row.
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings

import numpy
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from trl.models import enable_selective_activation_checkpointing
from trl.models.activation_offloading import get_act_offloading_ctx_manager

import memo_hf
from memo_hf.layers.patch import Patch


class NotHere(Exception):
    """This alternative does not run on this machine, and why."""


@contextlib.contextmanager
def plain(model):
    yield contextlib.nullcontext()


def switch_checkpointing(model, on: bool, **options) -> None:
    """By the older name of the switch, which TRL wraps too; newer transformers warn of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
        else:
            model.gradient_checkpointing_disable()


@contextlib.contextmanager
def checkpointing(model, **options):
    """transformers' own, of every layer."""
    switch_checkpointing(model, on=True, **options)
    try:
        yield contextlib.nullcontext()
    finally:
        switch_checkpointing(model, on=False)


@contextlib.contextmanager
def checkpointing_with_offload(model):
    """What checkpointing saves is copied to the host and back, on the compute thread or stream, as save_on_cpu does."""
    if next(model.parameters()).is_cuda:
        with checkpointing(model, offload=True) as around:
            yield around
        return
    # On a CPU transformers' own asks for pinned memory and fails, and save_on_cpu leaves a tensor where it is: copy it
    # to memory that the meter does not count.
    with checkpointing(model):
        yield torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: numpy.array(tensor.detach().numpy(), copy=True),
            lambda array: torch.from_numpy(array).clone(),
        )


@contextlib.contextmanager
def accelerate_checkpointing(model):
    """accelerate's for FSDP2: torch's checkpoint around each layer, which keeps no random state."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LlamaDecoderLayer.__name__],
    )
    layers = list(model.model.layers)
    fsdp2_apply_ac(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), model)
    try:
        yield contextlib.nullcontext()
    finally:
        model.model.layers = torch.nn.ModuleList(layers)


@contextlib.contextmanager
def selective_checkpointing(model):
    """TRL's own: attention outputs are kept on the device and everything else is recomputed."""
    enable_selective_activation_checkpointing(model)  # Wraps the switch, on this model.
    switch_checkpointing(model, on=True)
    try:
        yield contextlib.nullcontext()
    finally:
        switch_checkpointing(model, on=False)
        del model.gradient_checkpointing_enable


@contextlib.contextmanager
def activation_offloading(model):
    """TRL's own: everything that backward needs is copied to the host, and nothing recomputed."""
    try:
        manager = get_act_offloading_ctx_manager(model)
    except AttributeError as error:
        raise NotHere(f"it needs an accelerator ({error})") from None
    try:
        yield manager
    finally:
        for hooks in (model.lm_head._forward_hooks, model.lm_head._forward_pre_hooks):
            hooks.clear()


def _deepspeed():
    try:
        from deepspeed.runtime.sequence_parallel import ulysses_sp
    except ImportError as error:
        raise NotHere(f"pip install deepspeed ({error})") from None
    return ulysses_sp


@contextlib.contextmanager
def tiled_mlp(model):
    """Checkpointing and DeepSpeed's TiledMLP, in as many tiles as its documentation's example makes."""
    tiled = _deepspeed().TiledMLP
    own_forward = LlamaMLP.forward

    def make(mlp):
        weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
        return lambda x: tiled.apply(own_forward, mlp, x, math.ceil(x.shape[-2] / x.shape[-1]), weights)

    patches = [Patch(layer.mlp, make(layer.mlp)) for layer in model.model.layers]
    try:
        with checkpointing(model) as around:
            yield around
    finally:
        for patch in patches:
            patch.undo()


@contextlib.contextmanager
def tiled_mlp_and_loss(model):
    """The same with DeepSpeed's TiledFusedLogitsLoss, in as many tiles: what it calls ALST, on one device."""
    tiled = _deepspeed().TiledFusedLogitsLoss

    def forward(input_ids, labels, use_cache):
        hidden = model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        tiles, weights = math.ceil(hidden.shape[1] / hidden.shape[2]), [model.lm_head.weight]
        count = (targets != -100).sum()

        def part(head, rows, labels):  # Its backward runs at once, so the mean has to be taken in here.
            return torch.nn.functional.cross_entropy(head(rows).float(), labels, reduction="sum") / count

        loss = tiled.apply(part, model.lm_head, hidden, targets, None, tiles, weights, "sum")
        return types.SimpleNamespace(loss=loss)

    patch = Patch(model, forward)
    try:
        with tiled_mlp(model) as around:
            yield around
    finally:
        patch.undo()


@contextlib.contextmanager
def with_memo(model):
    memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=0.0, min_tokens=2048))
    try:
        yield contextlib.nullcontext()
    finally:
        memo_hf.disable(model)


ALTERNATIVES = {
    "plain": plain,
    "activation checkpointing": checkpointing,
    "activation checkpointing with offload": checkpointing_with_offload,
    "accelerate's checkpointing": accelerate_checkpointing,
    "selective checkpointing": selective_checkpointing,
    "TRL's activation offloading": activation_offloading,
    "tiled MLP": tiled_mlp,
    "tiled MLP and loss": tiled_mlp_and_loss,
    "memo_hf": with_memo,
}
