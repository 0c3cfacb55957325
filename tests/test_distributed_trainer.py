"""DDP and FSDP2 as users start them, `MemoTrainer` and `MemoAccelerator` in two processes: gradients, saving, resuming.

On a CPU accelerate would quietly run something else than FSDP2, so each case says which engine it really ran on, and
has a run without memo_hf beside it. SGD, no clipping; the loss of a step is the mean over the labels of all ranks.
"""

import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from exactness import assert_close, gradients_of
from harness.ranks import RANKS, forget_accelerate, fsdp_on_cpu, result, run_on_ranks
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import random_ids, tiny
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainingArguments

from memo_hf import MemoAccelerator, MemoConfig, MemoPlugin, MemoTrainer
from memo_hf.errors import ConfigError

# peft asks a model by a name that newer transformers have replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
MEMO = MemoConfig(swap_fraction=0.5, qkv="rebuild", unswapped_layers=1, chunk_size=32)
STEPS, ROWS = 2, 2  # of a training run, and of a micro-batch
IDS = random_ids(2 * STEPS * ROWS * RANKS, 37)
LABELS = IDS.clone()
for row in range(len(LABELS)):  # rows with few labels and with many: a mean of means would be another number
    LABELS[row, : 7 * (row % 5)] = -100
DATA = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, LABELS, strict=True)]


def full(**changes):
    return tiny("llama", num_hidden_layers=3, **changes)


def lora():
    torch.manual_seed(1)
    model = get_peft_model(full(), LoraConfig(r=4, target_modules="all-linear")).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def loaded_by_rank_zero():
    """As transformers leaves a checkpoint on the other ranks where FSDP is to send the weights there."""
    model = full()
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return model


def whole(tensors):
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors}


class Gradients(TrainerCallback):
    """Those of each optimizer step, as the optimizer sees them."""

    def __init__(self):
        self.of_steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of_steps.append(whole((n, p.grad) for n, p in model.named_parameters() if p.grad is not None))


class InOrder(MemoTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


SHARDS = dict(fsdp_version=2, transformer_layer_cls_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False)


def fsdp(**config):
    return dict(fsdp="full_shard auto_wrap", fsdp_config={**SHARDS, **config})


def trainer(model, folder, *, memo, on_host=False, momentum=0.0, **arguments):
    forget_accelerate()
    arguments = TrainingArguments(
        **dict(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=0.5,
            lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none", disable_tqdm=True,
            logging_strategy="no", save_strategy="no", dataloader_pin_memory=False,
        )
        | copy.deepcopy(arguments)  # Trainer writes into them
    )  # fmt: skip
    sgd = (torch.optim.SGD, dict(lr=0.5, momentum=momentum))
    memo = MEMO if memo else None
    made = InOrder(model=model, args=arguments, train_dataset=DATA, optimizer_cls_and_kwargs=sgd, memo=memo)
    if on_host:
        made.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return made


def assert_runs_on(made, sharded):
    accelerator = made.accelerator
    assert accelerator.num_processes == RANKS
    assert accelerator.distributed_type == (DistributedType.FSDP if sharded else DistributedType.MULTI_CPU)
    assert bool(accelerator.is_fsdp2) is sharded
    assert isinstance(made.model_wrapped, DistributedDataParallel) is not sharded


def trained(make, arguments, rank, *, memo):
    made, gradients = trainer(make(), "unused", memo=memo, **arguments), Gradients()
    made.add_callback(gradients)
    made.train()
    assert_runs_on(made, "fsdp" in arguments)
    assert getattr(made.model_wrapped, "static_graph", False) is arguments.get("ddp_static_graph", False)
    if memo:
        stats = made.memo_stats
        assert stats.swapped_bytes == stats.planned_bytes > 0 and not stats.stock_forwards
        assert {layer.mode for layer in stats.layers} == {"token"}
        assert stats.forwards == STEPS * arguments.get("gradient_accumulation_steps", 1)
    return gradients.of_steps


tied = functools.partial(full, tie_word_embeddings=True)
# DDP wants the first backward of a static graph reduced, and Trainer lets it wait where it accumulates.
EACH_REDUCED = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
STATIC = dict(ddp_static_graph=True, accelerator_config=EACH_REDUCED)
TRAINED = {
    "DDP": (full, {}),
    "DDP, find_unused_parameters": (full, dict(ddp_find_unused_parameters=True)),
    "DDP, accumulated": (full, dict(gradient_accumulation_steps=2)),
    "DDP, LoRA": (lora, {}),
    "DDP, static graph": (full, STATIC),
    "DDP, static graph, accumulated": (full, dict(gradient_accumulation_steps=2, **STATIC)),
    "FSDP2": (full, fsdp()),
    "FSDP2, accumulated": (full, dict(gradient_accumulation_steps=2, **fsdp())),
    "FSDP2, kept whole after forward": (full, fsdp(reshard_after_forward=False)),
    "FSDP2, tied weights": (tied, fsdp()),  # case 65
    "FSDP2, LoRA": (lora, fsdp()),
    "FSDP2, parameters on the host": (full, dict(on_host=True, **fsdp())),
    "FSDP2, loaded by rank 0": (loaded_by_rank_zero, fsdp(cpu_ram_efficient_loading=True)),
    "FSDP2, bf16": (full, dict(bf16=True, **fsdp())),
}


def both(name, rank):
    make, arguments = TRAINED[name]
    return {memo: trained(make, arguments, rank, memo=memo) for memo in (True, False)}


def saved_keys(folder: Path, kind):
    if kind == "FULL_STATE_DICT":
        return set(torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True))
    return set(FileSystemReader(folder / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata)


def resumed(what, kind, memo, rank):
    """A run with or without memo_hf, and the rest of it anew from its first checkpoint, the other way round."""
    make, folder = MODELS[what], Path(f"saved {what} {kind} {memo}")
    arguments = dict(momentum=0.5, **fsdp(state_dict_type=kind))
    first = trainer(make(), folder, memo=memo, save_strategy="steps", save_steps=1, **arguments)
    first.train()
    assert_runs_on(first, sharded=True)
    uninterrupted = whole(first.model.named_parameters())
    second = trainer(make(), folder, memo=not memo, **arguments)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert second.state.global_step == STEPS
    second.save_model(str(folder / "end"))
    files = list(Path(folder, "end").glob("*.safetensors"))
    return dict(
        uninterrupted=uninterrupted,
        resumed=whole(second.model.named_parameters()),
        keys=saved_keys(folder / "checkpoint-1", kind),
        exported=set(load_file(files[0])) if files else set(),
    )


def accumulated_by_hand(name, rank, *, memo):
    forget_accelerate()
    make, settings = BY_HAND[name]
    sharded, static = "FSDP2" in name, settings.get("static_graph", False)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True, cpu_ram_efficient_loading=False,
    ) if sharded else None  # fmt: skip
    accelerator = MemoAccelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, memo_plugin=MemoPlugin(MEMO) if memo else None,
        kwargs_handlers=[DistributedDataParallelKwargs(**settings)],
    )  # fmt: skip
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    loader = torch.utils.data.DataLoader(IDS, batch_size=ROWS)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.distributed_type == (DistributedType.FSDP if sharded else DistributedType.MULTI_CPU)
    assert bool(accelerator.is_fsdp2) is sharded and accelerator.num_processes == RANKS
    assert getattr(wrapped, "static_graph", False) is static
    if static:  # later ones may wait for their step's last
        accelerator.backward(wrapped(input_ids=IDS[:ROWS], labels=IDS[:ROWS]).loss)
        optimizer.zero_grad()
    steps = []
    for ids in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
            if accelerator.sync_gradients:
                steps.append(whole((n, p.grad) for n, p in model.named_parameters() if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
    if memo:
        (session,) = accelerator.memo_sessions
        assert session.stats.forwards == 2 * STEPS + static and session.stats.swapped_bytes > 0
    accelerator.free_memory()
    return steps


def refusal(plugin, sizes, by_trainer, rank):
    """What is said as a Trainer or an Accelerator is made, of FSDP2's plugin and of the sizes of other engines."""
    forget_accelerate()
    parallelism = ParallelismConfig(**sizes) if sizes else None
    with pytest.raises(ConfigError) as error:
        if by_trainer:
            trainer(full(), "unused", memo=True, parallelism_config=parallelism, **fsdp(**plugin))
        else:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
            MemoAccelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallelism, memo_plugin=MemoPlugin(MEMO))
    return str(error.value)


REFUSED = {
    "activation_checkpointing=False in fsdp_config": (dict(activation_checkpointing=True), {}),  # case 68
    "context parallelism is on (cp_size=2)": ({}, dict(cp_size=2)),  # case 84
}
MODELS = {"all": full, "LoRA": lora}
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
RESUMED = [*itertools.product(["all"], KINDS, [True, False]), ("LoRA", KINDS[0], True)]
BY_HAND = {
    "DDP, by hand": (full, {}),
    "DDP, static graph, by hand": (full, dict(static_graph=True)),
    "DDP, LoRA, find_unused_parameters, by hand": (lora, dict(find_unused_parameters=True)),  # case 88
    "FSDP2, by hand": (full, {}),
    "FSDP2, LoRA, by hand": (lora, {}),
}


def by_hand(name, rank):
    return {memo: accumulated_by_hand(name, rank, memo=memo) for memo in (True, False)}


CASES = {
    "stand-in": lambda rank: fsdp_on_cpu(),
    **{name: functools.partial(both, name) for name in TRAINED},
    **{name: functools.partial(by_hand, name) for name in BY_HAND},
    **{("resumed", *way): functools.partial(resumed, *way) for way in RESUMED},
    **{
        (words, by_trainer): functools.partial(refusal, *how, by_trainer)
        for words, how in REFUSED.items()
        for by_trainer in (True, False)
    },
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("trainer"))


def relevant(tensors):
    return {**tensors, "random state": None}


def one_process(make, rows_of_step, labels):
    """Gradients of each step of one process on the joint batch, with the mean over all its labels."""
    model = make()
    for step in range(STEPS):
        rows = slice(step * rows_of_step, (step + 1) * rows_of_step)
        found = gradients_of(model, lambda rows=rows: model(input_ids=IDS[rows], labels=labels[rows]).loss)
        yield found
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter -= 0.5 * found[name]


@pytest.mark.parametrize("name", [*TRAINED, *BY_HAND])
def test_gradients_equal_one_process(ranks, name):
    found = result(ranks, name)
    accumulates = 2 if "accumulated" in name or name in BY_HAND else 1
    make, _ = {**TRAINED, **BY_HAND}[name]
    joint = one_process(make, accumulates * ROWS * RANKS, IDS if name in BY_HAND else LABELS)
    ours, stock = found[0][True], found[0][False]
    assert len(ours) == len(stock) == STEPS
    for step, expected in enumerate(joint):
        assert_close(relevant(ours[step]), relevant(stock[step]), 4e-2 if "bf16" in name else 1e-5)
        assert_close(relevant(ours[step]), expected, 1e-1 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("what, kind, memo", RESUMED)
def test_a_run_goes_on_with_and_without_memo_hf(ranks, what, kind, memo):  # case 87
    names = {name for name in MODELS[what]().state_dict() if what == "all" or "lora" in name}
    of_ranks = result(ranks, ("resumed", what, kind, memo))
    # Trainer exports nothing of sharded state dicts.
    exported = {name.replace(".default", "") for name in names} if kind == "FULL_STATE_DICT" else set()
    assert of_ranks[0]["exported"] == exported
    for found in of_ranks:
        assert found["keys"] == (names if kind == "FULL_STATE_DICT" else {f"model.{name}" for name in names})
        assert_close(relevant(found["resumed"]), relevant(found["uninterrupted"]))


@pytest.mark.parametrize("by_trainer", [True, False], ids=["Trainer", "Accelerator"])
@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name_on_every_rank(ranks, words, by_trainer):
    assert all(words in told for told in result(ranks, (words, by_trainer)))
