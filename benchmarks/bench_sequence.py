"""Peak device bytes per rank of one step under Ulysses sequence parallelism, beside one rank with the whole sequence.

    python benchmarks/bench_sequence.py --ranks 1,2,4 --tokens 16384

Each number of ranks is that many processes over gloo on this machine, with memo_hf's default settings at swap fraction
0 and chunks of a sixteenth of a rank's tokens. The model is a Llama of random weights: hidden 64, 8 heads, 4 layers,
vocabulary 512, fp32, batch 1. Bytes are the peak of one forward and backward pass above what is there before it, loss
and gradients included, from an allocator that counts every tensor; of several ranks the largest counts. All-to-alls are
those of one rank. "plain" is DeepSpeed's Ulysses without memo_hf, "checkpointing" the same with activation
checkpointing. Nothing is timed. Needs deepspeed. Appends a row per run to a CSV file and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import socket
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from bench_step import checkpointing, describe, plain, write
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import memo_hf
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.units import parse_count


def make_model(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=512,
    )
    return LlamaForCausalLM(config).train()


@contextlib.contextmanager
def with_memo(model, local_tokens: int):
    memo_hf.enable(model, memo_hf.MemoConfig(swap_fraction=0.0, min_tokens=0, chunk_size=local_tokens // 16))
    try:
        yield contextlib.nullcontext()
    finally:
        memo_hf.disable(model)


@contextlib.contextmanager
def ulysses(model, num_ranks: int):
    """DeepSpeed's sequence parallelism over all processes."""
    if num_ranks == 1:
        yield
        return
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", num_ranks, micro_batch_size=1)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        parallel_state_sp._release_sequence_parallel_groups()


def measure(alternative: str, num_ranks: int, rank: int, num_tokens: int, kv_heads: int) -> dict:
    """Peak bytes and all-to-alls of one step of this rank."""
    model, local = make_model(kv_heads), num_tokens // num_ranks
    ids = torch.randint(0, 512, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    labels = pad(ids, (0, 1), value=-100)[:, 1:]
    mine = slice(rank * local, (rank + 1) * local)
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": labels,
        "position_ids": torch.arange(num_tokens)[None],
    }
    inputs = {name: tensor[:, mine].contiguous() for name, tensor in inputs.items()}
    ways = {"plain": plain, "checkpointing": checkpointing, "memo_hf": functools.partial(with_memo, local_tokens=local)}
    sent = []

    def counted(output, input, *args, own=dist.all_to_all_single, **kwargs):
        sent.append(input.nbytes)
        return own(output, input, *args, **kwargs)

    with ulysses(model, num_ranks), ways[alternative](model) as around, AllocatorMeter(torch.device("cpu")) as meter:
        gc.collect()
        before = meter.live_bytes
        with around, mock.patch.object(dist, "all_to_all_single", counted):
            model(**inputs, num_items_in_batch=num_tokens - 1, use_cache=False).loss.backward()
        peak = meter.peak_bytes - before
    return {"peak_bytes": peak, "all_to_alls": len(sent), "all_to_all_bytes": sum(sent)}


def worker(rank: int, num_ranks: int, port: int, folder: str, alternatives: list[str], num_tokens: int, kv_heads: int):
    torch.set_num_threads(1)
    if num_ranks > 1:
        place = dict(RANK=rank, WORLD_SIZE=num_ranks, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({"DS_ACCELERATOR": "cpu"} | {name: str(value) for name, value in place.items()})
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    found = {name: measure(name, num_ranks, rank, num_tokens, kv_heads) for name in alternatives}
    torch.save(found, f"{folder}/{rank}.pt")
    if num_ranks > 1:
        dist.destroy_process_group()


def run(num_ranks: int, alternatives: list[str], num_tokens: int, kv_heads: int) -> dict[str, dict]:
    """What the ranks found, by alternative: the largest of their figures."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(
            worker, (num_ranks, port, folder, alternatives, num_tokens, kv_heads), nprocs=num_ranks
        )
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(num_ranks)]
    return {name: {key: max(found[name][key] for found in ranks) for key in ranks[0][name]} for name in alternatives}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default=16384, help="of the whole sequence")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--only", default="memo_hf,checkpointing,plain", help="comma-separated alternatives")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/sequence.csv"))
    arguments = parser.parse_args()

    alternatives, rows, alone = arguments.only.split(","), [], {}
    print(f"{arguments.tokens:,} tokens, {arguments.kv_heads} key and value heads\n")
    print("| ranks | | peak MB per rank | / one rank | all-to-alls | MB sent |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_ranks in map(int, arguments.ranks.split(",")):
        for name, found in run(num_ranks, alternatives, arguments.tokens, arguments.kv_heads).items():
            if num_ranks == 1:
                alone[name] = found["peak_bytes"]
            share = found["peak_bytes"] / alone[name] if name in alone else None
            print(
                f"| {num_ranks} | {name} | {found['peak_bytes'] / 1e6:.2f} | {'' if share is None else f'{share:.3f}'} "
                f"| {found['all_to_alls']} | {found['all_to_all_bytes'] / 1e6:.2f} |",
                flush=True,
            )
            run_of = dict(tokens=arguments.tokens, kv_heads=arguments.kv_heads, ranks=num_ranks, alternative=name)
            rows.append({**describe(torch.device("cpu")), **run_of, **found, "peak_over_one_rank": share})
    write(arguments.output, rows)


if __name__ == "__main__":
    main()
