"""What the two processes of `test_deepspeed.py` run: every case in turn, with DeepSpeed over gloo on a CPU.

`everything` names the cases; the tests compare what they found.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import adapters
import torch
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from exactness import assert_nothing_on_host
from harness.deepspeed_ranks import forget_states
from harness.ranks import RANKS, failing_check
from safetensors import safe_open
from tiny_models import random_ids, tiny
from transformers import AutoModelForCausalLM, TrainingArguments

import memo_hf
from memo_hf import MemoAccelerator, MemoConfig, MemoPlugin, MemoTrainer
from memo_hf.errors import MemoError
from memo_hf.layers import loss
from memo_hf.layers.locate import find_stacks

IDS = random_ids(2 * RANKS, 37)  # two rows for each rank
MEMO = MemoConfig(swap_fraction=0.5, qkv="rebuild", unswapped_layers=1, chunk_size=32)
# So large that what a step adds is seen beside the weights, and a power of two, so that it divides out exactly.
LR = 2.0**12


def full(**changes):
    return tiny("llama", num_hidden_layers=3, **changes)


tied = functools.partial(full, tie_word_embeddings=True)


def lora():
    return adapters.lora(full(), target_modules="all-linear")


def mixed():
    """Its layers are of both modes, and of two kinds."""
    return tiny("lfm2")


def ds_config(stage, *, accumulate=1, bf16=False, **zero):
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, **zero}
    return {
        "train_micro_batch_size_per_gpu": 2 // accumulate,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": bf16},
        "zero_force_ds_cpu_optimizer": False,
    }


STAGES = (1, 2, 3)
ON_CPU = {"device": "cpu"}
# Nothing is kept for its next use, so each gather is seen.
NO_REUSE = dict(stage3_max_live_parameters=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
CASES = {
    "ZeRO-1": (full, ds_config(1)),
    "ZeRO-2, accumulated": (full, ds_config(2, accumulate=2)),
    "ZeRO-2, tied weights": (tied, ds_config(2)),
    "ZeRO-2, LoRA": (lora, ds_config(2)),
    "ZeRO-2, offload, overlap_comm": (full, ds_config(2, offload_optimizer=ON_CPU, overlap_comm=True)),
    "ZeRO-2, bf16": (full, ds_config(2, bf16=True)),
    "ZeRO-3": (full, ds_config(3, **NO_REUSE)),
    "ZeRO-3, tied weights": (tied, ds_config(3, **NO_REUSE)),
    "ZeRO-3, accumulated, overlap_comm": (full, ds_config(3, accumulate=2, overlap_comm=True)),
    "ZeRO-3, LoRA, accumulated": (lora, ds_config(3, accumulate=2, **NO_REUSE)),  # cases 79, 88
    "ZeRO-3, offload": (full, ds_config(3, offload_optimizer=ON_CPU, offload_param=ON_CPU)),
    "ZeRO-3, both modes": (mixed, ds_config(3)),
    "ZeRO-3, mixture of experts": (functools.partial(tiny, "mixtral"), ds_config(3)),
    "ZeRO-3, uneven lengths": (full, ds_config(3, **NO_REUSE)),  # case 73
    "ZeRO-3, uneven lengths, one too short": (full, ds_config(3, **NO_REUSE)),
    "ZeRO-3, a layer fails the check on one rank": (full, ds_config(3, **NO_REUSE)),
    "ZeRO-3, bf16": (full, ds_config(3, bf16=True)),
}


@contextlib.contextmanager
def accelerator_for(config, memo):
    accelerator = MemoAccelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # else it takes two processes for one
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        memo_plugin=memo and MemoPlugin(memo),
    )
    assert accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.num_processes == RANKS
    try:
        yield accelerator
    finally:
        accelerator.free_memory()
        forget_states()


def sgd(model, lr=LR):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def weights(model):
    import deepspeed

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {n: p.detach().clone().float() for n, p in parameters.items()}


def change(model, before):
    """What one step of SGD found for gradients."""
    after = weights(model)
    return {n: (before[n] - after[n]) / LR for n in after if model.get_parameter(n).requires_grad}


def own_rows(rank, case=""):
    """The batch of one rank."""
    return IDS[2 * rank : 2 * rank + 2, : 21 if rank and "uneven" in case else None]


def step(accelerator, engine, optimizer, ids):
    losses = []
    for rows in ids.chunk(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(engine):
            losses.append(engine(input_ids=rows, labels=rows).loss)
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).mean().item()


def assert_it_ran(session):
    assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
    assert {layer.mode for layer in session.stats.layers} <= {"token", "layer"}
    assert "token" in {layer.mode for layer in session.stats.layers}, session.stats.layers
    assert_nothing_on_host(session)


class Calls(Counter):
    """Counts calls of DeepSpeed's communication backend by name, and the bytes of their tensors."""

    NAMES = (
        "all_reduce reduce all_reduce_coalesced reduce_scatter reduce_scatter_tensor broadcast all_gather "
        "all_gather_into_tensor all_gather_coalesced all_to_all all_to_all_single"
    ).split()

    @contextlib.contextmanager
    def counted(self):
        from deepspeed.comm import comm

        def counting(name, own):
            def call(*args, **kwargs):
                given = [t for arg in (*args, *kwargs.values()) for t in (arg if isinstance(arg, list) else [arg])]
                self[name] += 1
                self[f"bytes of {name}"] += sum(t.nbytes for t in given if isinstance(t, torch.Tensor))
                return own(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name in self.NAMES:
                own = getattr(comm.cdb, name)
                stack.enter_context(mock.patch.object(comm.cdb, name, counting(name, own)))
            yield


def as_leaves(model, config):
    """The control of ZeRO-3 has the layers as leaves too, by the user's own hand."""
    classes = sorted({type(layer).__name__ for stack in find_stacks(model) for _, layer in stack.layers})
    config = copy.deepcopy(config)
    config["zero_optimization"] |= {"leaf_module": {"classes": classes}}
    if not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()  # without, DeepSpeed fails
    return config


def run_case(name, rank, memo):
    """What a step changes in the weights, and its collectives."""
    make, config = CASES[name]
    stage, calls, model = config["zero_optimization"]["stage"], Calls(), make()
    modules = list(model.modules())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if memo and "too short" in name:
        memo = dataclasses.replace(memo, min_tokens=own_rows(0, name).numel())
    with accelerator_for(as_leaves(model, config) if stage == 3 and not memo else config, memo) as accelerator:
        with failing_check({1} if rank and "check" in name else ()):
            engine, optimizer = accelerator.prepare(model, sgd(model))
        assert engine.zero_optimization_stage() == stage
        with calls.counted():
            step(accelerator, engine, optimizer, own_rows(rank, name))
        if memo:
            (session,) = accelerator.memo_sessions
            if rank and "too short" in name:
                assert session.stats.stock_forwards > 0
            else:
                assert_it_ran(session)
            assert "check" not in name or session.stats.layers[1].mode == "layer"
        found = {"change": change(model, before), "calls": dict(calls)}
        # Nothing is put around a module that DeepSpeed knows and notes its counts on. Case 78.
        assert list(model.modules()) == modules
    if memo:
        layers = [layer for stack in find_stacks(model) for _, layer in stack.layers]
        assert not any(layer._forward_pre_hooks or {"_z3_leaf", "forward"} & vars(layer).keys() for layer in layers)
    return found


def without_accelerate(rank, stage):
    import deepspeed

    model, config = full(), {**ds_config(stage), "zero_allow_untested_optimizer": True}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    session = memo_hf.enable(model, MEMO)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    engine.backward(engine(input_ids=own_rows(rank), labels=own_rows(rank)).loss)
    engine.step()
    assert_it_ran(session)
    found = change(model, before)
    memo_hf.disable(model)
    engine.destroy()
    return found


def saved_and_loaded(rank, stage, folder):
    """Losses of two steps after a saved state, by the run that saved it and by others that load it."""
    found = {}
    for name, memo in (("saves", MEMO), ("resumes", MEMO), ("resumes without", None)):
        model = full()
        with accelerator_for(ds_config(stage), memo) as accelerator:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine, optimizer = accelerator.prepare(model, optimizer)
            place = f"{folder}/state{stage}"
            if name == "saves":
                for _ in range(2):
                    step(accelerator, engine, optimizer, own_rows(rank))
                accelerator.save_state(place)
            else:
                accelerator.load_state(place)
            found[name] = [step(accelerator, engine, optimizer, own_rows(rank)) for _ in range(2)]
    return found


def trainer_for(config, folder, memo, **settings):
    forget_states()
    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):
        PartialState(backend="gloo")  # else it takes two processes for one
        usual = dict(
            output_dir=folder, deepspeed=copy.deepcopy(config), per_device_train_batch_size=2, max_grad_norm=0.0,
            lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no", max_steps=1,
            accelerator_config={"use_configured_state": True}, logging_steps=1, optim="sgd", learning_rate=LR,
        )  # fmt: skip
        args = TrainingArguments(**{**usual, **settings})
    model = AutoModelForCausalLM.from_pretrained(f"{Path(folder).parent}/model").train()
    # DeepSpeed's zero.Init has partitioned what was loaded, so memo_hf meets it so.
    assert all((p.shape == (0,)) == (config["zero_optimization"]["stage"] == 3) for p in model.parameters())
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = MemoTrainer(model=model, args=args, train_dataset=rows, memo=memo)
    assert trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    assert trainer.accelerator.num_processes == RANKS
    return trainer


def by_trainer(stage, folder):
    before = dict(full().named_parameters())  # before: from here on ZeRO-3 partitions what is made
    trainer = trainer_for(ds_config(stage), f"{folder}/trainer", MEMO)
    trainer.train()
    assert trainer.deepspeed.zero_optimization_stage() == stage
    assert trainer.memo_stats.forwards == 1 and trainer.memo_stats.total_swapped_bytes > 0
    return change(trainer.model, before)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def resumed_by_trainer(stage, folder):
    """Losses of four steps, and of those whose last two come after a checkpoint; names in the saved weights."""
    config = ds_config(stage, stage3_gather_16bit_weights_on_model_save=True)
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch", learning_rate=1e-2)
    found = {}
    folder = f"{folder}/resume{stage}"
    os.makedirs(folder, exist_ok=True)
    trainer = trainer_for(config, folder, MEMO, **settings)
    trainer.train()
    found["uninterrupted"] = losses_of(trainer)
    for name, memo in (("resumed", MEMO), ("resumed without", None)):
        trainer = trainer_for(config, folder, memo, **{**settings, "save_strategy": "no"})
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        found[name] = losses_of(trainer)
    with safe_open(f"{folder}/checkpoint-2/model.safetensors", "pt") as saved:
        found["names"] = sorted(saved.keys())
    return found


def offloaded(rank):
    """Bytes that this rank's share of Adam has on the host, and the budget beside them."""
    model, memo = full(), MemoConfig(**{**vars(MEMO), "host_memory": "1GiB"})
    with accelerator_for(ds_config(3, offload_optimizer=ON_CPU), memo) as accelerator:
        engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        step(accelerator, engine, optimizer, own_rows(rank))
        zero = engine.optimizer
        held = [*zero.fp32_partitioned_groups_flat, zero.grad_partitions_flat_buffer]
        held += [t for state in zero.optimizer.state.values() for t in state.values() if t.dim()]
        return {"held": sum(t.nbytes for t in held), "budget": accelerator.memo_sessions[0].host_budget_bytes}


def planned(rank):
    """Solved for, with a device budget: profiled first, then planned."""
    model, memo = full(), MemoConfig(device_memory="1GiB", min_tokens=0, chunk_size=32, unswapped_layers=1)
    # On a busy machine the times of such small layers may say that activation checkpointing is as fast.
    never_checkpoints = mock.patch("memo_hf.planner.swap_fraction._TIE", -math.inf)
    with never_checkpoints, accelerator_for(ds_config(3), memo) as accelerator:
        engine, optimizer = accelerator.prepare(model, sgd(model, 0.01))
        session = accelerator.memo_sessions[0]
        for _ in range(3):
            step(accelerator, engine, optimizer, own_rows(rank))
        assert_it_ran(session)
        return {"fraction": session.swap_fraction, "static": session.planners[0].measurement.static_bytes}


def refusal(function):
    try:
        function()
    except MemoError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank):
    import deepspeed

    found = {}
    checkpointing = {**ds_config(2), "activation_checkpointing": {"partition_activations": True, "profile": True}}
    with accelerator_for(checkpointing, MEMO) as accelerator:
        model = full()
        found["checkpointing"] = refusal(lambda: accelerator.prepare(model, sgd(model)))
    with accelerator_for(ds_config(3), None) as accelerator:
        model = full()
        engine, _ = accelerator.prepare(model, sgd(model))
        found["late"] = refusal(lambda: memo_hf.enable(model, MEMO))
    with accelerator_for(ds_config(3), MEMO) as accelerator:
        model = full()
        with mock.patch.object(deepspeed.utils, "set_z3_leaf_module"):
            engine, optimizer = accelerator.prepare(model, sgd(model))
        found["no leaf"] = refusal(lambda: step(accelerator, engine, optimizer, own_rows(rank)))
    return found


def everything(rank, folder):
    """(name, function) of all that runs in the process of `rank`."""
    loss.default_loss_chunk_tokens = lambda *sizes: 16  # so that these few tokens are several chunks
    for name in CASES:
        for memo in (MEMO, None):
            yield (name, memo is not None), functools.partial(run_case, name, rank, memo)
    yield "initialize", functools.partial(without_accelerate, rank, 3)
    yield "offloaded", functools.partial(offloaded, rank)
    yield "planned", functools.partial(planned, rank)
    yield "refusals", functools.partial(refusals, rank)
    yield "state", functools.partial(saved_and_loaded, rank, 3, folder)
    for stage in STAGES:  # 3 last: from there on what is made is partitioned
        yield ("Trainer", stage), functools.partial(by_trainer, stage, folder)
        yield ("resume", stage), functools.partial(resumed_by_trainer, stage, folder)
