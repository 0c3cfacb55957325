"""Started by `accelerate launch`: the flagship recipe over gloo, on one of several nodes that are all this machine.

on_a_node.py FOLDER ARGUMENTS...    each rank leaves in FOLDER what it decided with the others
"""

import gc
import math
import os
import socket
import sys
import warnings
from pathlib import Path

import torch
from accelerate.state import PartialState

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "recipes")]
import llama7b_1m  # noqa: E402
from harness.deepspeed_ranks import deepspeed_over_gloo  # noqa: E402

from memo_hf.planner import swap_fraction  # noqa: E402
from memo_hf.session import Session  # noqa: E402


def main(folder, argv):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # Trainer collects garbage at every end, and would go through all that was imported.
    deepspeed_over_gloo()
    node = os.environ["GROUP_RANK"]
    socket.gethostname = lambda: f"node {node}"
    PartialState(backend="gloo")  # else accelerate takes CPU processes under DeepSpeed for single ones
    # On a busy machine the times of such small layers may say that activation checkpointing is as fast.
    swap_fraction._TIE = -math.inf
    close = Session.close

    def noted(session):
        planner = session.planners[0]
        found = {
            "node": node,
            "ranks": tuple(session.joint.ranks),
            "sequence parallel": planner.sequence_parallel,
            "host budget": session.host_budget_bytes,
            "plan": (planner.measurement, planner.plan, planner.choice),
            "swapped": session.stats.total_swapped_bytes,
        }
        torch.save(found, f"{folder}/{os.environ['RANK']}.pt")
        close(session)

    Session.close = noted
    llama7b_1m.main(argv)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
