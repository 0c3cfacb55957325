"""Started by `accelerate launch`: a tied Llama under FSDP2 with memo_hf trains a step; in the next one rank 1 dies.

launched.py FOLDER    each rank leaves in FOLDER what the first step gave
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.ranks import fsdp_on_cpu  # noqa: E402
from tiny_models import random_ids, tiny  # noqa: E402

from memo_hf import MemoAccelerator, MemoConfig, MemoPlugin  # noqa: E402


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fsdp_on_cpu()
    accelerator = MemoAccelerator(memo_plugin=MemoPlugin(MemoConfig(swap_fraction=0.5, chunk_size=32)))
    model = tiny("llama", tie_word_embeddings=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    rank, ids = accelerator.process_index, random_ids(4, 37)
    mine = ids[2 * rank : 2 * rank + 2]
    accelerator.backward(model(input_ids=mine, labels=mine).loss)
    grads = {n: p.grad for n, p in model.named_parameters()}
    found = {
        "engine": (str(accelerator.distributed_type), accelerator.is_fsdp2, accelerator.num_processes),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "grads": {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()},
        "swapped": accelerator.memo_sessions[0].stats.swapped_bytes,
    }
    torch.save(found, f"{folder}/{rank}.pt")
    accelerator.wait_for_everyone()
    if rank == 1:
        model.model.layers[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(input_ids=mine, labels=mine).loss.backward()
    Path(folder, f"{rank} has survived").touch()


if __name__ == "__main__":
    main(sys.argv[1])
