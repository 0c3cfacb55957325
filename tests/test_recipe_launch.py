"""The accelerate configurations of the recipes: known to accelerate, and forecast as what they launch."""

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from datasets import IterableDataset, disable_progress_bars
from launch_environment import CONFIGS, ROOT, environment_of
from tiny_checkpoint import write_checkpoint

ENGINES = ("fsdp2", "zero3", "zero3_ulysses")
SIZES = {"2gpu": (1, 2), "4gpu": (1, 4), "8gpu": (1, 8), "2nodes": (2, 16)}

sys.path.insert(0, str(ROOT / "recipes"))
import dry_run  # noqa: E402
import finetune_checkpoint  # noqa: E402
import llama7b_1m  # noqa: E402


def test_each_engine_has_each_size():
    assert set(CONFIGS) == {"1gpu", "cpu_2ranks"} | {f"{engine}_{size}" for engine in ENGINES for size in SIZES}


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_knows_every_key(name):
    config = load_config_from_file(str(CONFIGS[name]))  # raises on unknown keys, but not on those within a section
    options = {action.dest for action in launch_command_parser()._actions}
    for section in (config.fsdp_config, config.deepspeed_config, config.parallelism_config):
        assert set(section) <= options
    assert config.num_processes % config.num_machines == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sizes_of_an_engine_differ_in_numbers_alone(engine):
    found = {size: yaml.safe_load(CONFIGS[f"{engine}_{size}"].read_text()) for size in SIZES}
    for size, (nodes, ranks) in SIZES.items():
        assert (found[size].pop("num_machines"), found[size].pop("num_processes")) == (nodes, ranks)
        for key in ("main_process_port", "same_network"):
            assert (found[size].pop(key, None) is None) == (nodes == 1)
        if "deepspeed_config" in found[size]:
            found[size]["deepspeed_config"].pop("deepspeed_multinode_launcher", None)
        if engine == "zero3_ulysses":  # a sequence is shared within a node
            sizes = found[size]["parallelism_config"]
            assert sizes.pop("parallelism_config_sp_size") == ranks // nodes
            assert sizes.pop("parallelism_config_dp_shard_size", 1) == nodes
    assert all(config == found["8gpu"] for config in found.values())


def options_of(*argv):
    return llama7b_1m.parser_for(list(argv)).parse_args(list(argv))


def described(command):
    """`--name value` pairs of a command as a dictionary."""
    return {name: value for name, value in zip(command, command[1:], strict=False) if name.startswith("--")}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "cpu_2ranks"])
def test_the_forecast_is_that_of_the_launch(name, monkeypatch):
    for variable, value in environment_of(name).items():
        monkeypatch.setenv(variable, value)
    engine, _, size = name.rpartition("_")
    nodes, ranks = SIZES.get(size, (1, 1))
    plan = described(dry_run.plan_command(options_of("--model", "llama-3.1-8b", "--seq-len", "1048576", "--full")))
    assert plan["--gpus"] == plan["--shards"] == str(ranks)
    assert plan["--gpus-per-node"] == str(ranks // nodes)
    assert plan["--sequence-parallel"] == str(ranks // nodes if engine == "zero3_ulysses" else 1)
    assert plan["--dtype"] == "bfloat16" and plan["--train"] == "full" and plan["--seq-len"] == "1048576"
    # On one GPU the recipes train bf16 weights as they are; the engines keep fp32 ones beside them.
    assert ("--no-master-weights" in plan) == (ranks == 1)
    assert "--optimizer-device" not in plan


def test_offloading_and_settings_are_in_the_forecast(monkeypatch):
    for variable, value in environment_of("zero3_8gpu").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    options = options_of(
        "--model", "qwen3-8b", "--seq_len", "64K", "--lora_rank", "8", "--host_memory", "1TiB",
        "--swap-fraction", "0.5", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4",
        "--optim", "adamw_bnb_8bit",
    )  # fmt: skip
    command = dry_run.plan_command(options)
    plan = described(command)
    assert plan["--optimizer-device"] == "host" and "--weights-device" not in plan
    assert (plan["--train"], plan["--lora-rank"], plan["--optimizer"]) == ("lora", "8", "adamw-8bit")
    assert (plan["--host-memory"], plan["--swap-fraction"], plan["--batch"]) == ("1TiB", "0.5", "2")
    assert "--gradient-accumulation" in command
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    assert described(dry_run.plan_command(options))["--shards"] == "1"


def test_fsdp_offloads_weights_and_optimizer(monkeypatch):
    for variable, value in environment_of("fsdp2_8gpu").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plan = described(dry_run.plan_command(options_of("--model", "qwen3-8b")))
    assert plan["--optimizer-device"] == plan["--weights-device"] == "host"


def test_other_ranks_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert llama7b_1m.main(["--dry-run", "--model", "qwen3-8b"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("recipe", [finetune_checkpoint, llama7b_1m])
def test_a_dry_run_ends_with_whether_it_fits(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def launch(*more):
        code = recipe.main(["--dry-run", "--model", "llama-3.1-8b", "--dataset", "manual", "--seq-len", "1M", *more])
        return code, capsys.readouterr()

    code, said = launch("--device", "h200", "--host_memory", "1TiB")
    assert code == 0 and "fits            yes" in said.out
    assert said.out.startswith("memo-hf plan --model llama-3.1-8b --seq-len 1M --device h200 ")
    code, said = launch("--device", "4090")
    assert code == 1 and "fits            NO" in said.out
    code, said = launch("--device", "abacus")
    assert code == 2 and "device 'abacus' is unknown" in said.err
    assert "--device cpu " in launch("--use_cpu", "true")[1].out
    with pytest.raises(SystemExit, match="2"):
        launch("--memo", "false")
    assert "leave out --memo false" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpu", "device", "assumed"),
    [(None, "h100", True), ("NVIDIA A100-SXM4-80GB", "a100-80", False), ("NVIDIA TITAN V", "h100", True)],
)
def test_a_dry_run_is_for_the_gpu_that_is_there_or_says_what_it_assumes(gpu, device, assumed, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    arguments = ["--dry-run", "--model", "qwen3-8b", "--dataset", "manual"]
    finetune_checkpoint.main(arguments)
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert (first == "No GPU that the forecast knows is here: --device h100 is assumed (cpu: this machine).") is assumed
    assert f" --device {device} " in (rest if assumed else first)
    finetune_checkpoint.main([*arguments, "--device", "h100"])
    assert capsys.readouterr().out.startswith("memo-hf plan ")


def test_a_dry_run_refuses_text_that_is_not_there(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for dataset, words in {
        "./books": "--dataset: there is no file or folder ./books",
        "books.txt": "--dataset: there is no file or folder books.txt",
        "books/": "--dataset: there is no file or folder books/",
        str(tmp_path / "books"): f"--dataset: there is no file or folder {tmp_path}/books",
        str(tmp_path / "empty"): f"{tmp_path}/empty: no file there ends in one of",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            finetune_checkpoint.main(["--dry-run", "--model", "qwen3-8b", "--dataset", dataset])
        said = capsys.readouterr()
        assert said.out == "" and words in f"{stopped.value.code} {said.err}"
    # A name of the hub is not looked up.
    assert finetune_checkpoint.main(["--dry-run", "--model", "qwen3-8b", "--dataset", "owner/books"]) == 0


def test_a_launch_is_forecast_and_not_run(tmp_path):
    """The README's line on two ranks, on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS["fsdp2_2gpu"],
         "--main_process_port", "0", ROOT / "recipes/llama7b_1m.py", "--dry-run", "--model", "llama-2-7b", "--seq-len",
         "131072", "--output_dir", tmp_path / "none"],
        cwd=tmp_path, env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("memo-hf plan --model llama-2-7b --seq-len 131072") == 1
    assert "LoRA of rank 16, 131,072 tokens x 1, 2 x h100 (sequence over 1, weights over 2)" in done.stdout
    assert not (tmp_path / "none").exists()


def taking_turns(rows):
    """Of four ranks: a step trains a sequence of one rank of either node, so these follow each other here."""
    for first, second, third, fourth in batched(rows, 4):
        yield from (first, third, second, fourth)


def batched(rows, number):
    rows = iter(rows)
    while batch := list(itertools.islice(rows, number)):
        yield batch


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_two_nodes_train_what_one_process_trains(tmp_path, monkeypatch):
    """The flagship under its own configuration, on two nodes with two ranks to a sequence, over gloo."""
    folder = write_checkpoint(tmp_path / "model")

    def arguments(output, **state):
        return [
            "--model", str(folder), "--dataset", "manual", "--full", "--dtype", "float32", "--seq-len", "64",
            "--learning_rate", "0.01", "--max_steps", "4", "--save_steps", "4", "--chunk_size", "16", "--min_tokens",
            "0", "--device_memory", "1GiB", "--disable_tqdm", "true", "--output_dir", str(output),
            "--accelerator_config", json.dumps({"dispatch_batches": False, **state}),
        ]  # fmt: skip

    def losses(output):
        history = json.loads((output / "checkpoint-4/trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [tmp_path / f"node {node}.txt" for node in range(2)]
    with contextlib.ExitStack() as stack:
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS["zero3_ulysses_2nodes"],
                 "--machine_rank", str(node), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
                 "--num_processes", "4", "--parallelism_config_sp_size", "2", "--mixed_precision", "no",
                 ROOT / "tests/harness/on_a_node.py", tmp_path, "--host_memory", f"{64 - 16 * node}MiB",
                 *arguments(tmp_path / "nodes", use_configured_state=True)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                stdout=stack.enter_context(open(said[node], "w")), stderr=subprocess.STDOUT,
            )
            for node in range(2)
        ]  # fmt: skip
        for node in nodes:
            stack.callback(node.terminate)  # passes it on to its ranks, and is nothing to one that has ended
        ended = [node.wait(timeout=120) for node in nodes]
    assert ended == [0, 0], "\n".join(path.read_text() for path in said)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    assert [found.pop("node") for found in ranks] == ["0", "0", "1", "1"]
    assert ranks[0]["ranks"] == (0, 1, 2, 3) and ranks[0]["sequence parallel"] == 2
    assert ranks[0]["host budget"] == 24 * 2**20  # of the node that has less, for its own two ranks
    assert ranks[0]["plan"][1].swap_fraction > 0 and ranks[0]["swapped"] > 0
    assert all(found == ranks[0] for found in ranks)

    cut = llama7b_1m.long_sequences
    monkeypatch.setattr(
        llama7b_1m,
        "long_sequences",
        lambda *given, **options: IterableDataset.from_generator(
            taking_turns, gen_kwargs={"rows": cut(*given, **options)}
        ),
    )
    disable_progress_bars()
    llama7b_1m.main([*arguments(tmp_path / "one"), "--gradient_accumulation_steps", "2", "--use_cpu", "true"])
    assert losses(tmp_path / "nodes") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
