"""`memo-hf plan` and `memo_hf.forecast`: what they answer, how fast, and what they say where something is wrong."""

import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import memo_hf
from memo_hf.cli import main
from memo_hf.errors import ConfigError
from memo_hf.forecasting.api import make_setup
from memo_hf.forecasting.find import advise, max_seq_len, min_gpus
from memo_hf.forecasting.forecast import fits, layer_costs
from memo_hf.forecasting.hardware import DEVICES, find_device
from memo_hf.forecasting.memory import layer_bytes
from memo_hf.forecasting.moments import layer_moments, loss_parts
from memo_hf.forecasting.setup import Setup
from memo_hf.forecasting.shapes import ModelShape
from memo_hf.forecasting.speed import LayerSeconds, calibrate, layer_seconds
from memo_hf.planner.layer_costs import estimated_peaks
from memo_hf.units import format_seconds, parse_count

ROOT = Path(__file__).parents[1]
HEADLINE = ["--model", "gpt-7b", "--seq-len", "1M", "--gpus", "8", "--sequence-parallel", "8", "--device", "a800"]
HEADLINE += ["--host-memory", "2TiB"]
ULYSSES = ["--sequence-parallel", "4"]
# Nine heads are not shared by two.
NOT_SHARED = ["--seq-len", "1K", "--device", "h100", "--device-memory", "3.8GiB", "--host-memory", "1TiB"]


def answer(capsys, *arguments) -> dict:
    code = main(["plan", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


def test_json_has_the_keys_that_scripts_read(capsys):
    found = answer(capsys, *HEADLINE)
    for key in (
        "fits",
        "swap_fraction",
        "device_peak_bytes",
        "host_bytes_per_node",
        "step_seconds",
        "mfu",
        "binding_limit",
    ):
        assert key in found
    assert found["fits"] is True
    assert found["device_peak_bytes"] == sum(found["device_peak_by_part"].values())
    assert found["host_bytes_per_node"] == pytest.approx(8 * found["host_bytes_per_rank"], abs=8)
    assert "causal attention counted half" in found["mfu_convention"]


@pytest.mark.parametrize(
    ("more", "seconds"),
    [([], 1.0), (["--find", "max-seq-len"], 5.0), (["--find", "min-gpus"], 5.0), (["--compare"], 5.0)],
)
def test_answers_are_quick_and_need_no_torch(more, seconds):
    code = (
        "import sys; from memo_hf.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    # Processor time, since others may be using the machine; nothing here waits for anything.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *HEADLINE, "--json", *more], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    json.loads(done.stdout)  # nothing else on stdout, the solver's banner neither
    assert done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds


def test_longest_sequence_is_where_fitting_ends():
    setup = make_setup("llama-3.1-8b", 1024, device="h100", optimizer_device="host")
    longest = max_seq_len(setup)
    assert fits(setup.replace(seq_len=longest))
    assert not fits(setup.replace(seq_len=round(longest * 1.04)))


def test_fewest_gpus(capsys):
    found = answer(capsys, "--model", "llama-3.1-70b", "--seq-len", "256K", "--find", "min-gpus")
    assert found["fits"] and found["gpus"] == found["min_gpus"] > 8
    setup = make_setup("llama-3.1-70b", "256K")
    assert min_gpus(setup).gpus == found["min_gpus"]


def test_fewest_gpus_have_the_host_memory_of_their_number(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "1M", "--device", "h100"]
    found = answer(capsys, *arguments, "--find", "min-gpus")
    same = answer(capsys, *arguments, "--gpus", "4", "--sequence-parallel", "4")
    assert found["gpus"] == 4 and same["fits"]
    assert found["host_budget_bytes_per_node"] == same["host_budget_bytes_per_node"] == 0.9 * 4 * 240 * 2**30
    advice = answer(capsys, *arguments)["advice"]
    assert "it fits on 4 GPUs, each sequence shared by 4 (--gpus 4 --sequence-parallel 4)" in advice
    given = answer(capsys, *arguments, "--find", "min-gpus", "--host-memory", "300GiB")
    assert given["host_budget_bytes_per_node"] == 300 * 2**30


def test_no_number_of_gpus_helps_a_model_of_few_heads():
    setup = make_setup("smollm2-135m", 2**28, host_memory="1GiB")
    assert min_gpus(setup) is None
    assert advise(setup)[-1].startswith("no number of GPUs up to 4,096 suffices: its 9 attention heads bound")


def test_what_does_not_fit_is_an_answer_with_advice(capsys):
    found = answer(capsys, "--model", "llama-3.1-8b", "--seq-len", "1M", "--device", "4090")
    assert found["fits"] is False
    assert found["binding_limit"].startswith("device memory: needs at least ")
    assert found["device_peak_bytes"] > found["device_budget_bytes"]
    assert any("GPUs" in advice for advice in found["advice"])


def test_advice_begins_with_the_gpus_that_are_there(capsys):
    arguments = ["--model", "llama-3.1-8b", "--gpus", "8", "--seq-len", "512K"]
    advice = answer(capsys, *arguments)["advice"]
    assert advice[0] == "it fits with each sequence over 8 of the 8 GPUs (--sequence-parallel 8)"
    assert answer(capsys, *arguments, "--sequence-parallel", "8")["fits"]


def test_advice_names_lora_only_where_it_fits(capsys):
    said, arguments = "it fits with LoRA (--train lora)", ["--model", "llama-3.1-8b", "--seq-len"]
    assert said in answer(capsys, *arguments, "128K")["advice"]
    assert answer(capsys, *arguments, "128K", "--train", "lora")["fits"]
    assert said not in answer(capsys, *arguments, "1M")["advice"]
    assert not answer(capsys, *arguments, "1M", "--train", "lora")["fits"]


def test_advice_knows_the_run(capsys):
    def advised(*arguments):
        main(["plan", *arguments])
        text = capsys.readouterr().out
        assert "to change" in text and "use a shorter sequence" not in text and "over 1 of" not in text
        return text

    card = ["--model", "qwen3-32b", "--train", "lora", "--device", "4090", "--host-memory", "230GiB"]
    text = advised(*card, "--seq-len", "128K", "--gpus", "4")
    longest = [answer(capsys, *card, "--gpus", "4", *more, "--find", "max-seq-len") for more in ([], ULYSSES)]
    asked, shared = (found["max_seq_len"] for found in longest)
    assert shared > 2 * asked
    said = f"{asked:,} tokens fit as asked, {shared:,} with each sequence over 4 of the 4 GPUs (--sequence-parallel 4)"
    assert said in text and "LoRA (" not in text
    # 32 B weights alone are more than the device: no length is advised, and no GPUs beside a CPU.
    assert "tokens fit" not in advised(*card, "--seq-len", "8K")
    here = ["--device", "cpu", "--host-memory", "4GiB", "--device-memory", "4GiB", "--seq-len", "8K"]
    assert "GPU" not in advised("--model", "qwen3-8b", *here).split("to change", 1)[1]
    assert "it fits on 2 GPUs (--gpus 2)" in advised("--model", "smollm2-135m", *NOT_SHARED)


def test_host_shortage_is_named(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "1M", "--gpus", "8", "--sequence-parallel", "8"]
    found = answer(capsys, *arguments, "--host-memory", "100GiB")
    assert found["fits"] is False
    assert re.fullmatch(r"host memory: needs \d\d\.\d\d GiB a rank, has 12.50 GiB", found["binding_limit"])
    assert any("host memory" in advice for advice in found["advice"])


def test_what_the_device_holds_and_the_host_does_not_is_a_shortage_of_the_host(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "128K", "--gpus", "2", "--device", "3090", "--train", "lora"]
    found = answer(capsys, *arguments, "--host-memory", "128GiB")
    assert found["binding_limit"] == "host memory: needs 64.50 GiB a rank, has 64.00 GiB"
    assert not found["fits"] and found["device_peak_bytes"] < found["device_budget_bytes"]
    assert answer(capsys, *arguments, "--host-memory", "129GiB")["fits"]
    # Where nothing helps, the least is what just suffices.
    needs = answer(capsys, *arguments, "--device-memory", "21GiB", "--host-memory", "1TiB")["binding_limit"]
    least = float(re.fullmatch(r"device memory: needs at least (.*) GiB, has 20.00 GiB", needs)[1])
    for over in (-0.02, 0.02):
        memory = f"{1 + least + over}GiB"
        assert answer(capsys, *arguments, "--device-memory", memory, "--host-memory", "1TiB")["fits"] is (over > 0)


def test_a_host_without_room_leaves_activation_checkpointing(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "16K", "--train", "lora", "--host-memory", "100MiB"]
    found = answer(capsys, *arguments)
    assert found["fits"] and found["strategy"] == "checkpoint" and found["host_bytes_per_rank"] == 0


def test_comparison_never_has_memo_slower_than_checkpointing_that_fits(capsys):
    for tokens in ("2K", "16K", "64K"):
        rows = {
            row["strategy"]: row
            for row in answer(capsys, "--model", "qwen3-8b", "--seq-len", tokens, "--device", "h200", "--compare")[
                "compare"
            ]
        }
        stock, ours = rows["activation checkpointing"], rows["memo_hf"]
        assert ours["fits"]
        assert not stock["fits"] or ours["step_seconds"] <= stock["step_seconds"]


def test_the_comparison_has_the_peers_with_the_loss_of_memo_hf_and_with_the_stock_one(capsys):
    arguments = ["--model", "qwen3-8b", "--seq-len", "32K", "--train", "lora", "--compare"]
    rows, whole = (answer(capsys, *arguments, *more)["compare"] for more in ([], ["--full-logits"]))
    *peers, paper, ours = rows
    assert [row["whole_logits_peak_bytes"] for row in peers] == [row["device_peak_bytes"] for row in whole[:-2]]
    assert all(row["device_peak_bytes"] < row["whole_logits_peak_bytes"] for row in peers)
    assert ours["whole_logits_peak_bytes"] is paper["whole_logits_peak_bytes"] is None
    main(["plan", *arguments])
    assert "device peak  whole logits  host a rank" in capsys.readouterr().out
    main(["plan", *arguments, "--full-logits"])
    assert "device peak  host a rank" in capsys.readouterr().out


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_loss_of_one_chunk_takes_what_whole_logits_take(train):
    """A chunk is 1,024 tokens at least. More of them sum the head's gradient, in fp32, and take no more otherwise."""
    for tokens, is_one in ((512, True), (1024, True), (1025, False), (16384, False)):
        setup = make_setup("llama-3.1-8b", tokens, train=train)
        chunked, whole = (loss_parts(setup.replace(chunked_loss=is_chunked))["loss"] for is_chunked in (True, False))
        summed = 4 * 128256 * 4096 if train == "full" else 0
        assert chunked == whole if is_one else chunked <= whole + summed
    assert chunked < 0.5 * whole


def test_short_sequences_keep_activation_checkpointing(capsys):
    # case 95
    found = answer(capsys, "--model", "qwen3-8b", "--seq-len", "1K", "--device", "h200")
    assert found["strategy"] == "checkpoint" and found["host_bytes_per_rank"] == 0
    assert found["binding_limit"].startswith("step time:")


@pytest.mark.parametrize("device, train", [("h100", "lora"), ("4090", "full")])
def test_the_strategy_changes_once_over_lengths(device, train):
    model = "llama-3.1-8b" if train == "lora" else "smollm2-135m"
    lengths = range(4096, 20480, 1280) if train == "lora" else range(52 * 1024, 66 * 1024, 1280)
    found = [memo_hf.forecast(model, length, device=device, train=train).strategy for length in lengths]
    assert found[0] == "checkpoint" and found == sorted(found)  # "memo" from some length on


def test_text_names_what_matters(capsys):
    assert main(["plan", *HEADLINE, "--compare"]) == 0
    text = capsys.readouterr().out
    for words in (
        "fits            yes",
        "decided by      host memory",
        "gathered weights",
        "MEMO (paper)",
        "a rank",
        "% (model FLOPs, causal attention by half, no recompute; docs/forecast.md)",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    ("more", "loss"),
    [
        ([], 'a chunked loss, whoever computes it. Under "whole logits": the device'),
        (["--device", "h200", "--full-logits"], "whole logits, no chunked loss.\n"),
    ],
)
def test_the_comparison_says_what_its_rows_have(more, loss, capsys):
    main(["plan", "--model", "qwen3-8b", "--seq-len", "16K", "--compare", *more])
    under = capsys.readouterr().out.split("\nmemo_hf  ")[1].split("\n", 1)[1]
    assert under.startswith(f"All rows have {loss}")


@pytest.mark.parametrize("more", [[], ["--device", "a6000"], ["--compare"]])
def test_every_plan_says_how_far_its_times_were_off(more, capsys):
    main(["plan", "--model", "qwen3-8b", "--seq-len", "16K", *more])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(" times memo_hf's own step on an H200 ") == 1

    # The numbers are those of the table that benchmarks/bench_forecast.py prints.
    table = (ROOT / "docs" / "forecast.md").read_text()

    def misses(run, figure):
        found = re.findall(rf"^\| {run} \| {figure} at .*\| ([+-].*) % \|", table, re.M)
        assert found, run
        return [abs(float(miss)) for miss in found]

    own = misses("H200, 8 layers, memo_hf", "step")
    assert len(own) == 3 and f"{min(own):.0f} to {max(own):.0f} % less in the forecast than measured" in said
    for words, run, figure in (
        ("8 A800 (MFU within {} %)", "MEMO 7B.*", "MFU"),
        ("8 H100 (within {} %)", "TRL.*", "step"),
        ("and an H200 (within {} %)", "H200, 8 layers, (?!memo_hf).*", "step"),
    ):
        assert words.format(math.ceil(max(misses(run, figure)))) in said
    assert "other devices are scaled by peak and held against no run (docs/forecast.md)" in said


def test_host_memory_that_is_given_may_be_taken_whole_and_of_an_assumed_one_a_tenth_is_left(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "128K", "--gpus", "2", "--device", "3090", "--train", "lora"]
    assumed, given = (answer(capsys, *arguments, *more) for more in ([], ["--host-memory", "128GiB"]))
    assert (assumed["host_budget_bytes_per_node"], given["host_budget_bytes_per_node"]) == (round(0.9 * 2**37), 2**37)
    assert assumed["binding_limit"].endswith("has 57.60 GiB") and given["binding_limit"].endswith("has 64.00 GiB")
    headline = answer(capsys, *HEADLINE)
    assert headline["host_bytes_per_node"] == headline["host_budget_bytes_per_node"] == 2 * 2**40


@pytest.mark.parametrize(
    ("more", "assumed"), [([], True), (["--host-memory", "240GiB"], False), (["--device", "cpu"], False)]
)
def test_host_memory_that_was_not_given_is_said_to_be_assumed(more, assumed, capsys):
    arguments = ["--model", "smollm2-135m", "--seq-len", "4K", *more]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    said = f"\n{'':16}host memory assumed for h100: nine tenths of 240.0 GiB; give --host-memory"
    assert (said in text) is assumed and ("host memory assumed" in text) is assumed
    assert answer(capsys, *arguments)["host_memory_assumed"] is assumed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], None),
        (["--gpus", "8"], "between GPUs    360 GB/s each way, assumed"),
        (["--gpus", "16"], "between GPUs    360 GB/s each way, 50 GB/s a GPU between nodes, assumed"),
        (["--gpus", "16", "--device", "4090"], "between GPUs    20 GB/s each way, 3 GB/s a GPU between nodes, assumed"),
    ],
)
def test_the_bandwidths_between_gpus_are_told(more, said, capsys):
    main(["plan", "--model", "qwen3-8b", "--seq-len", "8K", "--train", "lora", *more])
    text = capsys.readouterr().out
    assert (said or "fits") in text and ("between GPUs" in text) is bool(said)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert ("copies to the host take the same PCIe" in text) is ("4090" in more)


def test_what_travels_between_gpus_is_in_the_seconds():
    """Weights in forward, weights and gradients in backward: as long as they take, where nothing hides them."""
    free = {"flops": 1e30, "memory_bytes_per_second": 1e30, "chunk_seconds": 0.0}
    for train, gpus, shards, rate in (("full", 8, 8, 20e9), ("lora", 8, 8, 20e9), ("full", 16, 16, 3e9)):
        setup = make_setup("qwen3-8b", "1K", train=train, gpus=gpus, shards=shards, device="4090")
        setup = setup.replace(device=setup.device.with_rates(**free))
        kind = setup.kinds[0]
        found = layer_seconds(setup, kind)
        weights = 2 * setup.model.layer_parameters(kind) * (shards - 1) / shards / rate
        gradients = weights if train == "full" else 4 * setup.adapter_parameters / 36 * 7 / 8 / rate
        assert found.attend_forward == pytest.approx(weights)
        assert found.attend_backward == pytest.approx(weights + gradients)
    setup = setup.replace(gpus=4, shards=1)  # DDP: nothing to fetch, and the sum goes to all
    found = layer_seconds(setup, kind)
    assert found.attend_forward == pytest.approx(0, abs=1e-9)
    assert found.attend_backward == pytest.approx(2 * 2 * setup.model.layer_parameters(kind) * 3 / 4 / 20e9)


def test_what_does_not_fit_has_no_step_time(capsys):
    assert main(["plan", "--model", "llama-3.1-8b", "--seq-len", "1M", "--device", "4090"]) == 1
    text = capsys.readouterr().out
    assert "fits            NO" in text and "\nstep " not in text and "\nMFU " not in text


@pytest.mark.parametrize(
    ("find", "model", "more", "key", "words"),
    [
        ("max-seq-len", "llama-3.1-70b", ["--device", "4090"], "max_seq_len", "max seq len: none fits"),
        ("min-gpus", "smollm2-135m", ["--seq-len", "256M", "--host-memory", "1GiB"], "min_gpus", "none up to 4,096"),
    ],
)
def test_what_is_not_found_is_an_answer_too(find, model, more, key, words, capsys):
    found = answer(capsys, "--model", model, *more, "--find", find)
    assert not found[key] and not found["fits"]
    assert main(["plan", "--model", model, *more, "--find", find]) == 1
    text = capsys.readouterr().out
    assert words in text and "fits            NO" in text and "to change" in text


def test_what_is_found_says_what_it_replaces(capsys):
    arguments = ["plan", "--model", "qwen3-8b", "--device", "h200", "--train", "lora", "--seq-len", "1M", "--gpus", "2"]
    for find, words in {
        "max-seq-len": r"max seq len: [\d,]+ \(in place of --seq-len 1M\)",
        "min-gpus": r"min gpus: (\d+) GPUs, each sequence shared by \1 \(--gpus .*\) \(in place of --gpus 2\)\n",
    }.items():
        main([*arguments, "--find", find])
        assert re.match(words, capsys.readouterr().out)


@pytest.mark.parametrize("written", ["989T", "989TFLOPS", "989 TFLOP/s", "989e12", "9.89e14", "0.989P"])
def test_flops_as_people_write_them(written):
    assert make_setup("qwen3-8b", "8K", flops=written).device.flops == 989e12
    assert make_setup("qwen3-8b", "8K", flops=989e12).device.flops == 989e12


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("4090", ["rtx4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"]),
        ("a100-80", ["A100_80GB", "a100-80gb", "NVIDIA A100-SXM4-80GB"]),
        ("h100", ["H100 SXM", "NVIDIA H100 80GB HBM3"]),
        ("a6000", ["RTX A6000"]),
        ("l40s", ["NVIDIA L40S"]),
    ],
)
def test_devices_as_people_and_torch_write_them(name, written):
    assert {find_device(text).name for text in written} == {name}


def test_every_device_is_in_the_docs_and_another_is_refused_with_the_nearest(capsys):
    page, arguments = (
        (ROOT / "docs" / "forecast.md").read_text(),
        ["--model", "qwen3-8b", "--seq-len", "8K", "--device"],
    )
    assert [name for name in DEVICES if f"`{name}`" not in page] == []
    assert f"| `--device` | `h100` | {', '.join(DEVICES)}, or cpu" in (ROOT / "docs" / "command_line.md").read_text()
    for name, words in {
        "a100": "device 'a100' is unknown (did you mean 'a100-40' or 'a100-80'?); choose from ['3090', '4090', ",
        "h100-pcie": "device 'h100-pcie' is unknown (did you mean 'h100'?); choose from",
        "L40": "device 'L40' is unknown (did you mean 'l4' or 'l40s'?); choose from",
        "mi300x": "device 'mi300x' is unknown; choose from",
    }.items():
        assert main(["plan", *arguments, name]) == 2
        said = capsys.readouterr().err
        assert words in said and "give numbers (--device-memory, --flops, --link-bandwidth)" in said
    assert answer(capsys, *arguments, "l40s", "--train", "lora")["fits"]


def test_tokens_as_people_write_them(capsys):
    written = {"100,000": 100_000, "100_000": 100_000, "1e5": 100_000, " 128k ": 131_072, "1.5M": 1_572_864, 512.0: 512}
    assert {text: parse_count(text) for text in written} == written
    whole = "; it must be a whole number of at least 1, written as 4096, 100,000, 128K (131,072) or 1M (1,048,576)"
    for text, words in {
        "128000.5": f"seq_len is 128000.5{whole}",
        "100.000": f"seq_len is 100.000{whole}",  # a hundred, or a hundred thousand
        "0.3K": f"seq_len is 0.3K{whole}",
        "0": f"seq_len is 0{whole}",
        "-5": "seq_len: '-5' is negative or not finite; write it as 4096, 100,000,",
        "1,5M": "seq_len: cannot read '1,5M'; write it as 4096",
        "abc": "seq_len: cannot read 'abc'; write it as 4096",
    }.items():
        assert main(["plan", "--model", "gpt-7b", "--seq-len", text]) == 2
        assert capsys.readouterr().err.startswith(f"memo-hf plan: {words}")


def test_flops_reach_the_forecast(capsys):
    arguments = ["--model", "qwen3-8b", "--seq-len", "8K"]
    same, half = (answer(capsys, *arguments, "--flops", flops) for flops in ("989T", "494.5e12"))
    assert same == answer(capsys, *arguments)
    assert same["step_seconds"] < half["step_seconds"]


def test_positions_beyond_the_trained_ones_are_told(tmp_path, capsys):
    said = "positions       over the 131,072 positions it was trained for; RoPE scaling, docs/long_text.md"
    main(["plan", "--model", "llama-3.1-8b", "--device", "b200", "--train", "lora", "--find", "max-seq-len"])
    assert said in capsys.readouterr().out
    main(["plan", "--model", "llama-3.1-8b", "--device", "b200", "--train", "lora", "--seq-len", "128K"])
    assert "positions  " not in capsys.readouterr().out
    assert answer(capsys, "--model", "qwen3-8b", "--seq-len", "1K")["trained_positions"] == 40960
    assert answer(capsys, "--model", "gpt-7b", "--seq-len", "1M", "--gpus", "64")["trained_positions"] is None
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 99, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["plan", "--model", str(tmp_path), "--seq-len", "2K"])
    assert "over the 1,024 positions it was trained for; its table of positions ends there" in capsys.readouterr().out


def test_options_may_be_written_with_underscores(capsys):
    found = answer(capsys, "--model", "qwen3-8b", "--seq_len", "8K", "--host_memory=1TiB")
    assert found["seq_len"] == 8192 and found["host_budget_bytes_per_node"] == 2**40


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # A name that is not known comes before what is missing.
        (["plan", "--seqlen", "8K"], "memo-hf plan: there is no argument --seqlen (did you mean '--seq-len'?)"),
        (["plan", "--gpu=8"], "memo-hf plan: there is no argument --gpu (did you mean '--gpus' or '--gpus-per-node'?)"),
        (
            ["plan", "--host_mem", "1TiB"],
            "memo-hf plan: there is no argument --host-mem (did you mean '--host-memory'?)",
        ),
        (["plan", "--tokens", "8K"], "memo-hf plan: there is no argument --tokens; see --help"),
        (["plan", "--model", "qwen3-8b", "8K"], "memo-hf plan: there is no argument 8K; see --help"),
        (["plan"], "memo-hf plan: the following arguments are required: --model"),
        (["plan", "--model", "m", "--gpus", "two"], "memo-hf plan: argument --gpus: invalid int value: 'two'"),
        (["--verion"], "memo-hf: there is no argument --verion (did you mean '--version'?)"),
    ],
)
def test_a_wrong_argument_is_one_line_without_the_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr() == ("", f"{said}\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"memo-hf {memo_hf.__version__}\n"


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "memo_hf", "plan", "--model", "gpt-7b"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("memo-hf plan: --seq-len is missing")


def test_a_reader_that_stops_early_is_no_error():
    command = [sys.executable, "-m", "memo_hf", "plan", "--model", "qwen3-8b", "--seq-len", "8K"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_many_seconds_are_told_in_hours_and_rounding_as_none():
    assert [format_seconds(s) for s in (0, 2.012e-16, 1.5e-6, 0.12345, 500.44, 9_999, 1.063e5)] == [
        "0 s",
        "0 s",
        "1.5e-06 s",
        "0.1235 s",
        "500.4 s",
        "9999 s",
        "29.5 h",
    ]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["plan", *HEADLINE, "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_where_nothing_fits_comes_after_the_forecast(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--model", "llama-3.1-8b", "--seq-len", "1M", "--plot", str(tmp_path / "out.png")]
    assert main(["plan", *arguments]) == 1
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert text.index("fits            NO") < text.index("to change") < text.index(f"plot: {tmp_path / 'out.png'}")


def test_plot_that_cannot_be_written_says_so(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plan", *HEADLINE, "--plot", str(tmp_path / "no" / "out.png")]) == 2
    captured = capsys.readouterr()
    assert f"there is no folder '{tmp_path / 'no'}'; make it" in captured.err and not captured.out
    (tmp_path / "taken.png").mkdir()
    assert main(["plan", *HEADLINE, "--plot", str(tmp_path / "taken.png")]) == 2
    assert "plot: cannot write" in capsys.readouterr().err
    (tmp_path / "taken.png").rmdir()
    for name in ("out", "out.txt", "out.json"):
        assert main(["plan", *HEADLINE, "--plot", str(tmp_path / name)]) == 2
        assert f"--plot, a picture, is '{tmp_path / name}'; end the name in .png or" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere", "--seq-len", "1K"], "is neither a config.json"),
        (["--model", "./nope/llama-3.1-8b", "--seq-len", "1K"], "'./nope/llama-3.1-8b' is neither a config.json"),
        (["--model", "/a/gpt-7b", "--seq-len", "1K"], "is neither a config.json"),
        (["--model", "a/b/gpt-7b", "--seq-len", "1K"], "is neither a config.json"),
        (["--model", "llama-3-8b", "--seq-len", "1K"], "'smollm2-135m'] (did you mean 'llama-3.1-8b' or"),
        (["--model", "Qwen/Qwen3-8", "--seq-len", "1K"], "'smollm2-135m'] (did you mean 'qwen3-8b' or"),
        (["--model", "gpt-7b"], "--seq-len is missing"),
        (
            ["--model", "gpt-7b", "--find", "min-gpus", "--find", "max-seq-len"],
            "--find is given 2 times (min-gpus, max-seq-len); ask for one at a time",
        ),
        (["--model", "gpt-7b", "--seq-len", "1Q"], "cannot read '1Q'"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--device", "abacus"], "choose from"),
        (
            ["--model", "gpt-7b", "--seq-len", "1K", "--gpus", "8", "--sequence-parallel", "3"],
            "does not divide the 8 GPUs",
        ),
        (
            ["--model", "smollm2-135m", "--seq-len", "1K", "--gpus", "8", "--sequence-parallel", "8"],
            "9 attention heads",
        ),
        (["--model", "gpt-7b", "--seq-len", "1K", "--host-memory", "64"], "write the unit, for example 64GiB"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--device-memory", "24"], "device_memory: 24 without a unit"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--link-bandwidth", "25"], "means 25 bytes"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--flops", "989"], "flops: 989 without a unit means 989 FLOPs"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--flops", "fast"], "flops: cannot read 'fast'"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--host-memory", "64 big"], "'64 big'; write it as 64GiB, 500MB or"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--chunk-size", "0"], "chunk_size is 0; it must be a whole number"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--unswapped-layers", "-1"], "unswapped_layers is -1; it must be a"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--swap-fraction", "2"], "a number from 0 to 1"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--train", "lora", "--lora-targets", "dense"], "are unknown"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--lora-rank", "16"], "lora_rank is 16 and train is 'full', which"),
        (["--model", "gpt-7b", "--seq-len", "1K", "--lora-targets", "q_proj"], "lora_targets is 'q_proj' and train is"),
        (
            ["--model", "gpt-7b", "--seq-len", "1K", "--gpus", "2", "--shards", "1", "--weights-device", "host"],
            "shards > 1",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_folder_with_a_config(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    assert answer(capsys, "--model", str(tmp_path), "--seq-len", "64K")["fits"]
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", "--model", str(tmp_path), "--seq-len", "1K"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_name_of_the_hub_is_shipped_and_a_folder_without_a_config_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", "meta-llama/Llama-3.1-8B", "--seq-len", "1K"]
    assert answer(capsys, *arguments)["model"] == "llama-3.1-8b"
    (tmp_path / "meta-llama" / "Llama-3.1-8B").mkdir(parents=True)
    assert main(["plan", *arguments]) == 2
    assert "is neither a config.json" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert main(["plan", "--model", str(tmp_path), "--seq-len", "1K"]) == 2
    assert f"{tmp_path} holds an adapter; give its base (some/base)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"layer_types": ["linear_attention"] * 2}, r"layer_types \['linear_attention'\]"),
        ({"vocab_size": None}, r"has none of \['vocab_size'\]"),
    ],
)
def test_models_that_are_not_described_are_refused(more, words):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "model_type": "x"}
    with pytest.raises(ConfigError, match=words):
        memo_hf.forecast({**config, **more}, 1024)


def test_the_public_function():
    found = memo_hf.forecast("llama-3.1-8b", "128K", device="h200", optimizer_device="host", train="lora")
    assert found.fits and found.swap_fraction > 0
    with pytest.raises(
        ConfigError, match=r"no option 'chunksize' \(did you mean 'chunk_size'\?\); its options are \['batch'"
    ):
        memo_hf.forecast("llama-3.1-8b", "128K", chunksize=3)
    with pytest.raises(ConfigError, match=r"no option 'nonsense'; its options are"):
        memo_hf.forecast("llama-3.1-8b", "128K", nonsense=3)


def test_a_configuration_of_transformers(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=99)
    config.save_pretrained(tmp_path)
    assert memo_hf.forecast(config, "4K") == memo_hf.forecast(str(tmp_path), "4K") == memo_hf.forecast(tmp_path, "4K")
    with pytest.raises(ConfigError, match="model is a object; give a name, a path, or a configuration: model.config"):
        memo_hf.forecast(object(), "4K")


def test_sequence_parallelism_splits_bytes_and_time():
    one, eight = (make_setup("gpt-7b", "64K", gpus=8, sequence_parallel=n, device="a800") for n in (1, 8))
    kind = one.model.kinds(2)[0]
    assert layer_bytes(one, kind).others == 8 * layer_bytes(eight, kind).others
    assert layer_seconds(one, kind).finish_forward == pytest.approx(8 * layer_seconds(eight, kind).finish_forward)
    # Fewer key heads than ranks: some ranks hold copies of a head.
    many = make_setup("llama-3.1-8b", "64K", gpus=16, sequence_parallel=16, device="h100")
    few = many.replace(sequence_parallel=8)
    kind = many.model.kinds(2)[0]
    assert layer_bytes(many, kind).key_value == layer_bytes(few, kind).key_value


def test_optimizer_and_weights_move_to_the_host():
    here = memo_hf.forecast("llama-3.1-8b", "32K", device="h200")
    there = memo_hf.forecast("llama-3.1-8b", "32K", device="h200", optimizer_device="host", weights_device="host")
    assert here.device_peak_by_part["optimizer"] == 12 * make_setup("llama-3.1-8b", 1).model.num_parameters
    assert "optimizer" not in there.device_peak_by_part and "weights" not in there.device_peak_by_part
    assert there.host_bytes_per_rank > 18 * 8.03e9
    assert there.step_seconds > here.step_seconds


def test_on_a_cpu_nothing_is_swapped_unless_its_memory_is_limited():
    options = {"device": "cpu", "host_memory": "64GiB"}
    found = memo_hf.forecast("smollm2-135m", "4K", **options)
    assert found.swap_fraction == 0 and found.binding_limit.startswith("the CPU, where fraction 0")
    short = memo_hf.forecast("smollm2-135m", "4K", device="cpu", host_memory="400MiB")
    assert short.fits and short.num_input_only and short.binding_limit.startswith("host memory, which has no room")
    assert memo_hf.forecast("smollm2-135m", "4K", **options, swap_fraction=0.5).swap_fraction == 0.5
    assert make_setup("smollm2-135m", "4K", **options, device_memory="3GiB").set_fraction is None


def test_a_cpus_budget_that_moves_is_told(capsys):
    arguments = ["plan", "--model", "smollm2-135m", "--seq-len", "4K", "--device", "cpu"]
    assert main(arguments) == 0 and "half of what is free now" in capsys.readouterr().out
    assert main([*arguments, "--device-memory", "8GiB"]) == 0 and "free now" not in capsys.readouterr().out


def test_lora_trains_little():
    full, lora = (memo_hf.forecast("llama-3.1-8b", "16K", device="h200", train=train) for train in ("full", "lora"))
    assert lora.device_peak_by_part["optimizer"] < 0.01 * full.device_peak_by_part["optimizer"]
    setup = make_setup("llama-3.1-8b", "16K", train="lora", lora_rank=16)
    assert setup.adapter_parameters == 41_943_040


def test_kept_layers_are_given_up_where_that_is_what_it_takes():
    options = {"device": "h200", "host_memory": "4TiB", "unswapped_layers": 20, "swap_fraction": 0.0}
    assert memo_hf.forecast("qwen3-8b", "16K", **options).num_kept == 20
    assert memo_hf.forecast("qwen3-8b", "128K", **options).num_kept == 0


def test_calibration_carries_to_another_length():
    setup = make_setup("smollm2-135m", 4096, device="a100-80")
    kind = setup.model.kinds(0)[0]
    predicted = layer_seconds(setup, kind, chunked=False)
    slower = LayerSeconds(**{name: 3 * value for name, value in vars(predicted).items()})
    device = calibrate(setup, slower)
    long = setup.replace(seq_len=16384)
    expected = layer_seconds(long, kind, chunked=False)
    found = layer_seconds(long.replace(device=device), kind)
    for name, value in vars(expected).items():
        assert getattr(found, name) == pytest.approx(3 * value), name


def test_layers_of_two_kinds():
    config = {
        "model_type": "x",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "intermediate_size": 128,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    setup = make_setup(config, 65536, host_memory="1GiB")
    windowed, whole = layer_costs(setup)
    assert (windowed.num_layers, whole.num_layers, windowed.num_kept, whole.num_kept) == (2, 2, 1, 1)
    assert windowed.attend_forward_seconds < whole.attend_forward_seconds / 20
    assert isinstance(setup, Setup) and memo_hf.forecast(config, 65536).fits


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-7b", "qwen3-30b-a3b", "smollm2-135m"])
@pytest.mark.parametrize("train", ["full", "lora"])
def test_peaks_that_are_estimated_from_measured_bytes_are_near_the_described(model, train):
    """What bounds the plan of models that are not described here, held against models that are."""
    for seq_len in ("32K", "256K"):
        setup = make_setup(model, seq_len, device="h100", train=train)
        of_a_layer = max(4 * setup.model.finish_parameters(kind) for kind in setup.kinds) if train == "full" else 0
        layers = layer_costs(setup)
        estimated = estimated_peaks(layers, of_a_layer, setup.chunk / setup.local_tokens)
        moments = [m for kind in setup.kinds for m in layer_moments(setup, kind) if m.when != "loss"]
        for treatment in ("swap", "rebuild", "input"):
            for fraction in (0.0, 0.5, 1.0):
                ours = max(p.bytes_at(fraction) for p in estimated if p.treatment == treatment)
                theirs = max(sum(m.at(fraction).values()) for m in moments if m.treatment == treatment)
                assert 0.85 < ours / theirs < 1.6, (seq_len, treatment, fraction, ours / theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "falcon"},
        {"model_type": "bloom"},
        {"model_type": "glm4_moe", "n_routed_experts": 128},
        {"model_type": "t5", "is_encoder_decoder": True},
        {"intermediate_size": [64, 32]},
    ],
)
def test_layers_that_are_not_described_are_refused(changes):
    config = dict(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        intermediate_size=64,
    )
    ModelShape.from_config("like a llama", config)
    for odd in ({"model_type": None}, {"text_config": "none"}):
        ModelShape.from_config("odd", {**config, **odd})
    for odd in ({"num_key_value_heads": "two"}, {"num_experts": "4"}, {"mlp_only_layers": 3}):
        with pytest.raises(ConfigError, match="has another type than its name"):
            ModelShape.from_config("odd", {**config, **odd}).kinds(0)
    with pytest.raises(ConfigError, match="whose bytes the forecast does not describe; train without one"):
        ModelShape.from_config("another", {**config, **changes})
