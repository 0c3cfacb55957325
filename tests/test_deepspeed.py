"""DeepSpeed ZeRO 1, 2 and 3: gradients, collectives, offload, checkpoints and refusals.

Two real processes over gloo are started once, run every case of `deepspeed_cases.py` and leave what they found in a
file; the tests compare.
"""

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed_cases import CASES, RANKS, STAGES, everything, full, own_rows
from exactness import assert_close, gradients_of, language_loss
from harness.deepspeed_ranks import run_with_deepspeed
from harness.ranks import result
from torch import nn

import memo_hf
from memo_hf.layers import zero

pytestmark = [
    # peft asks a model by a name that newer transformers have replaced.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    full().save_pretrained(folder / "model")
    return run_with_deepspeed(everything, folder)


def joint_gradients(make=full, case=""):
    """Of one process on the batches of all ranks."""
    model = make()
    batches = [own_rows(rank, case) for rank in range(RANKS)]
    found = gradients_of(model, lambda: sum(language_loss(model, ids)() for ids in batches) / RANKS)
    del found["random state"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(ranks, name):
    ours, others = (found["change"] for found in result(ranks, (name, True)))
    assert all(torch.equal(ours[n], others[n]) for n in ours)  # reduced
    control, joint = result(ranks, (name, False))[0]["change"], joint_gradients(CASES[name][0], name)
    assert_close(control, joint, 2e-2 if "bf16" in name else 1e-5)
    assert_close(ours, joint, 2e-2 if "bf16" in name else 1e-5)
    assert_close(ours, control, 2e-2 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_no_collective_beyond_those_of_the_engine(ranks, name):
    """With layers as leaf modules in both runs. Nothing is reused where ZeRO-3 is told so, and each gather counts."""
    for ours, control in zip(result(ranks, (name, True)), result(ranks, (name, False)), strict=True):
        ours, control = ours["calls"], control["calls"]
        if "ZeRO-3, LoRA" in name:  # memo_hf lets the layers' inputs need gradients, and not the embeddings' output
            assert ours.keys() == control.keys() and all(ours[call] <= control[call] for call in control)
        else:
            assert ours == control
        assert ours["all_gather_into_tensor"] > 0


def test_initialize_without_accelerate(ranks):
    assert_close(result(ranks, "initialize")[0], joint_gradients())


@pytest.mark.parametrize("stage", STAGES)
def test_trainer(ranks, stage):
    """ZeRO-3 has partitioned the model while `from_pretrained` loaded it."""
    assert_close(result(ranks, ("Trainer", stage))[0], joint_gradients())


@pytest.mark.parametrize("stage", STAGES)
def test_trainer_resumes(ranks, stage):
    found = result(ranks, ("resume", stage))[0]
    assert len(found["uninterrupted"]) == 4 and found["resumed"] == found["uninterrupted"]
    assert found["resumed without"] == pytest.approx(found["uninterrupted"], rel=1e-5)
    assert found["names"] == sorted(full().state_dict())  # case 87


def test_a_saved_state_is_loaded(ranks):
    for found in result(ranks, "state"):
        assert len(found["saves"]) == 2 and found["resumes"] == found["saves"]
        assert found["resumes without"] == pytest.approx(found["saves"], rel=1e-5)


def test_plans_count_what_a_rank_holds(ranks):
    num_bytes = sum(p.nbytes for p in full().parameters())
    for found in result(ranks, "planned"):
        assert found["static"] == num_bytes / RANKS and found["fraction"] > 0


def test_the_offloaded_optimizer_is_off_the_host_budget(ranks):
    # case 94
    for found in result(ranks, "offloaded"):
        assert found["held"] == 16 * sum(p.numel() for p in full().parameters()) / RANKS
        assert found["budget"] == 2**30 / RANKS - found["held"]


@pytest.mark.parametrize(
    "refused, words",
    [
        ("checkpointing", r'ConfigError: "activation_checkpointing" .* \[.partition_activations.\], .* Remove'),
        ("late", r"UnsupportedModelError: .* model.layers.0 .* before deepspeed.initialize\(model=model\)"),
        ("no leaf", r'UnsupportedModelError: .* "leaf_module": \{"classes": \["LlamaDecoderLayer"\]\} to'),
    ],
)
def test_refusals(ranks, refused, words):
    assert re.match(words, result(ranks, "refusals")[0][refused])


def offloading(monkeypatch, **zero_optimization):
    monkeypatch.setattr(zero, "deepspeed_config", lambda: {"zero_optimization": zero_optimization})


def test_what_has_been_offloaded_already_is_not_counted_twice(monkeypatch):
    offloading(monkeypatch, stage=2, offload_optimizer={"device": "cpu"})
    free = SimpleNamespace(free_bytes=2**30)
    monkeypatch.setattr(zero, "read_host_memory", lambda: free)
    model = full()
    offloaded = 16 * sum(p.numel() for p in model.parameters())
    for settings, expected in (
        ({}, [offloaded, offloaded - 1000, 0]),
        ({"host_memory": "1GiB"}, [offloaded] * 3),  # a budget set by hand is not what is free now
        ({"host_memory_for_others": "7B"}, [7] * 3),
    ):
        session = memo_hf.enable(model, memo_hf.MemoConfig(**settings))
        for taken, bytes_to_come in zip((0, 1000, 2 * offloaded), expected, strict=True):
            free.free_bytes = 2**30 - taken
            assert session.host_bytes_for_others() == bytes_to_come
        free.free_bytes = 2**30
        session.close()


@pytest.mark.parametrize(
    "optimizer, param, num_bytes", [("cpu", "none", 10 * 16), ("nvme", "cpu", 16 * 4), ("none", None, 0)]
)
def test_offloaded_bytes_are_those_of_one_node(monkeypatch, optimizer, param, num_bytes):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    offloading(monkeypatch, stage=3, offload_optimizer={"device": optimizer}, offload_param={"device": param})
    trained, frozen = nn.Linear(10, 1, bias=False), nn.Linear(6, 1, bias=False).requires_grad_(False)
    assert zero.Offload(nn.Sequential(trained, frozen)).num_bytes() == num_bytes / 2
