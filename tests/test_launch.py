"""`accelerate launch` with an FSDP2 configuration file, and a rank that is killed in the middle of a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exactness import assert_close, gradients_of, language_loss
from tiny_models import random_ids, tiny

TESTS = Path(__file__).resolve().parent
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
use_cpu: false
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    Path(folder, "fsdp2.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp2.yaml"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, str(TESTS / "harness/launched.py"), str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return folder, ended


def test_tied_llama_under_fsdp2(launched):  # case 65
    folder, ended = launched
    model = tiny("llama", tie_word_embeddings=True)
    expected = gradients_of(model, language_loss(model, random_ids(4, 37)))
    for rank in range(2):
        assert Path(folder, f"{rank}.pt").exists(), ended.stderr[-3000:]
        found = torch.load(folder / f"{rank}.pt")
        assert found["engine"] == ("DistributedType.FSDP", True, 2)
        assert found["tied"] and found["swapped"] > 0
        assert_close({**found["grads"], "random state": None}, expected)


def test_a_rank_that_is_killed_ends_the_run_and_is_named(launched):
    folder, ended = launched
    assert ended.returncode != 0
    assert not list(folder.glob("*has survived"))
    said = " ".join(ended.stderr.split())
    assert "exitcode : -9" in said and "rank : 1" in said, ended.stderr[-3000:]
