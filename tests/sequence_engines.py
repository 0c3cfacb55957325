"""Steps under Ulysses, by hand, by Accelerate and by Trainer: what a test compares with one process.

Two ranks share a sequence, and further pairs of ranks, where there are any, work on sequences of their own.
"""

import contextlib
import copy
import os
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    DistributedType,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from deepspeed_cases import NO_REUSE
from exactness import enabled
from harness.deepspeed_ranks import forget_states
from tiny_models import random_ids, tiny
from torch.nn.functional import pad
from transformers import TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer import deepspeed_sp_compute_loss

from memo_hf import MemoAccelerator, MemoConfig, MemoPlugin, MemoTrainer
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.swap.cpu_threads import CpuThreads

SHARE = 2  # ranks that share a sequence
MEMO = MemoConfig(swap_fraction=0.5, unswapped_layers=1, chunk_size=8)
TOKENS = 48  # of a sequence
LR = 2.0**12  # so large that a step is seen beside the weights, and divides out exactly


def llama(**changes):
    return tiny("llama", num_hidden_layers=3, **changes)


@contextlib.contextmanager
def restored_attention():
    """transformers' attention is its own again after the body."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        parallel_state_sp._release_sequence_parallel_groups()


@contextlib.contextmanager
def ulysses(model, share=SHARE):
    """DeepSpeed's sequence parallelism for `model`, and all as it was afterwards."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    with restored_attention():
        UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", share, micro_batch_size=1)
        yield


def whole_batch(num_rows=1, tokens=TOKENS, **others):
    ids = random_ids(num_rows, tokens)
    labels = pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return {"input_ids": ids, "shift_labels": labels, "position_ids": torch.arange(tokens)[None], **others}


def loss_of(model, batch, total):
    return lambda: model(**batch, labels=batch["shift_labels"], num_items_in_batch=total).loss


def copied_at_once(threads, *args, own=CpuThreads._submit, **kwargs):
    """A slow copy would keep memory, and what is measured would depend on the machine's load."""
    copy = own(threads, *args, **kwargs)
    threads.wait(copy)
    return copy


def peaks(rank, num_ranks):
    """Peak device bytes of a step above what is there before it."""
    # Large enough for weight gradients and a kernel's buffers to be small beside what grows with the tokens.
    tokens, sizes = 8192, dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_key_value_heads=4)
    model, batch = tiny("llama", **sizes), whole_batch(tokens=tokens)
    own = slice(rank * tokens // num_ranks, (rank + 1) * tokens // num_ranks)
    batch = {name: tensor[:, own].contiguous() for name, tensor in batch.items()}
    chunk = tokens // num_ranks // 16
    with (
        ulysses(model, num_ranks) if num_ranks > 1 else contextlib.nullcontext(),
        mock.patch.object(CpuThreads, "_submit", copied_at_once),
        enabled(model, chunk_size=chunk, unswapped_layers=2, swap_fraction=0.0),
        AllocatorMeter(torch.device("cpu")) as meter,
    ):
        before = meter.live_bytes
        loss_of(model, batch, tokens - 1)().backward()
        return meter.peak_bytes - before


def ds_config(stage):
    leaf = {"stage3_param_persistence_threshold": 0, "leaf_module": {"classes": ["LlamaDecoderLayer"]}, **NO_REUSE}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "zero_optimization": {"stage": stage, **(leaf if stage == 3 else {})},
        "zero_force_ds_cpu_optimizer": False,
    }


def parallelism():
    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=SHARE,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
        dp_shard_size=dist.get_world_size() // SHARE,  # else accelerate counts one sequence at a time
    )


def change(model, before):
    """What one step of SGD found for gradients."""
    import deepspeed

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: (before[name] - p.detach().float()) / LR for name, p in parameters.items()}


def by_accelerate(rows, stage, memo):
    """Gradients by name and the "loss" of one step, of this rank, from an Accelerate loop over `rows`."""
    forget_states()
    model = llama()  # before DeepSpeed is set up, which would split it as it is made
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    accelerator = MemoAccelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(ds_config(stage))),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # else each process takes itself for the only one
        parallelism_config=parallelism(),
        memo_plugin=MemoPlugin(MEMO) if memo else None,
    )
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.num_processes == dist.get_world_size()
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with restored_attention():
        engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert engine.zero_optimization_stage() == stage
        batch = next(iter(loader))
        assert batch["shift_labels"].shape == (1, len(rows[0]["labels"]) // SHARE)
        loss = deepspeed_sp_compute_loss(accelerator, engine, batch, False, accelerator.parallelism_config)
        accelerator.backward(loss)
        optimizer.step()
        found = {**change(model, before), "loss": loss.detach()}
        if memo:
            (session,) = accelerator.memo_sessions
            assert session.stats.swapped_bytes == session.stats.planned_bytes > 0
            assert tuple(session.joint.ranks) == tuple(range(dist.get_world_size()))
        accelerator.free_memory()
    return found


def by_trainer(rows, stage, memo, folder):
    """As `by_accelerate`, from `MemoTrainer`."""
    forget_states()
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):
        PartialState(backend="gloo")
        args = TrainingArguments(
            output_dir=f"{folder}/trainer", deepspeed=copy.deepcopy(ds_config(stage)), per_device_train_batch_size=1,
            max_grad_norm=0.0, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no",
            max_steps=1, accelerator_config={"use_configured_state": True}, logging_steps=1, optim="sgd",
            learning_rate=LR, parallelism_config=parallelism(), train_sampling_strategy="sequential",
        )  # fmt: skip
    trainer = MemoTrainer(model=model, args=args, train_dataset=rows, memo=MEMO if memo else None)
    assert trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    assert trainer.accelerator.num_processes == dist.get_world_size() and trainer.get_sp_size() == SHARE
    with restored_attention():
        trainer.train()
    if memo:
        assert trainer.memo_stats.forwards == 1 and trainer.memo_stats.total_swapped_bytes > 0
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**change(model, before), "loss": torch.tensor(loss)}
