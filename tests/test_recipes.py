"""The recipes run, as a user runs them, on a tiny random checkpoint and the text that comes with Python."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import disable_progress_bars
from huggingface_hub import constants
from safetensors.torch import load_file
from tiny_checkpoint import write_checkpoint
from transformers import LlamaForCausalLM

import memo_hf

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def ended_run(*command, timeout=120):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def run(*command, timeout=120):
    done = ended_run(*command, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def recipe(monkeypatch):
    """The flagship recipe as a module."""
    monkeypatch.syspath_prepend(str(RECIPES))
    disable_progress_bars()
    import llama7b_1m

    return llama7b_1m


def test_the_flagship_trains_compares_saves_and_reloads_on_two_ranks(checkpoint, tmp_path):
    out = run(
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", RECIPES / "configs/cpu_2ranks.yaml",
        "--main_process_port", 0, RECIPES / "llama7b_1m.py", "--preset", "cpu", "--model", checkpoint,
        "--dtype", "float32", "--seq-len", "256", "--max_steps", 2, "--swap_fraction", 0.5, "--chunk_size", 64,
        "--lora_rank", 2, "--output_dir", tmp_path / "adapter",
    )  # fmt: skip
    assert "made for 128 positions" in out
    assert "3 layers in token mode" in out
    assert "swap fraction 0.5" in out
    assert "with activation checkpointing: " in out
    assert out.count("memo_hf: 3 layers in token mode") == 2  # at the start and in the report, of one rank
    assert "goes on from the prompt:\n  A list comprehension" in out
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 2
    assert adapter["base_model_name_or_path"] == str(checkpoint)


def test_fine_tuning_of_local_chats(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPES))
    disable_progress_bars()
    pytest.importorskip("matplotlib")
    import finetune_checkpoint

    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "one and"}, {"role": "assistant", "content": "another. " * 20}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 5)
    output = tmp_path / "model"
    size = chats.stat().st_size // 4
    finetune_checkpoint.main(
        ["--model", str(checkpoint), "--dataset", str(chats), "--full", "--dtype", "float32", "--seq_len", "64",
         "--max_steps", "9", "--chunk_size", "16", "--use_cpu", "true", "--output_dir", str(output)]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert re.search(rf"text has about [\d,]+ tokens: 9 steps of 64 read it about {9 * 64 / size:.2g} times\.", said)
    assert (output / "memo_report.html").read_text().startswith("<!DOCTYPE html>")
    assert f"The report is in {output / 'memo_report.html'}" in said
    trained, before = (LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (output, checkpoint))
    assert trained.keys() == before.keys()
    assert any((trained[name] != before[name]).any() for name in before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised inside peft
@pytest.mark.parametrize("name", ["finetune_checkpoint", "llama7b_1m"])
def test_a_run_with_an_adapter_is_reproducible(checkpoint, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(RECIPES))
    disable_progress_bars()

    def trained(run, *seed):
        output = tmp_path / str(run)
        torch.manual_seed(run)  # a process begins with a seed of its own
        importlib.import_module(name).main(
            ["--model", str(checkpoint), "--dataset", "manual", "--dtype", "float32", "--seq_len", "64", "--max_steps",
             "3", "--save_steps", "3", "--lora_rank", "2", "--learning_rate", "0.1", "--chunk_size", "16",
             "--swap_fraction", "0.5", "--use_cpu", "true", "--output_dir", str(output), *seed]
        )  # fmt: skip
        history = json.loads((output / "checkpoint-3/trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry], load_file(output / "adapter_model.safetensors")

    (losses, adapter), (others, other) = trained(1), trained(2)
    assert len(set(losses)) == 3 and losses == others
    assert all(torch.equal(adapter[key], other[key]) for key in adapter)
    assert trained(3, "--seed", "7")[0] != losses


def test_less_text_than_a_sequence_is_refused_before_the_model_is_loaded(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPES))
    import finetune_checkpoint

    monkeypatch.setattr(finetune_checkpoint, "AutoTokenizer", None)
    text = tmp_path / "short.txt"

    def said(num_tokens):
        text.write_text("word" * num_tokens)
        settings = ["--dataset", str(text), "--seq_len", "256", "--max_steps", "2", "--use_cpu", "true"]
        with pytest.raises((SystemExit, AttributeError)) as ended:  # the latter where it goes on
            finetune_checkpoint.main(["--model", str(checkpoint), "--output_dir", str(tmp_path / "out"), *settings])
        return getattr(ended.value, "code", None) or capsys.readouterr().out

    assert said(127) == "the text has about 130 tokens, and one sequence takes 256: give more text, or --seq_len 64"
    near = "The text has 1 document with about {} tokens: that may or may not make one sequence of 256.\n"
    assert said(128) == near.format(130) and said(383) == near.format(380)
    assert said(384) == "The text has 1 document with about 380 tokens: 2 steps of 256 read it about 1.3 times.\n"


def test_settings_are_named_as_arguments(recipe):
    import launching

    said = "use MemoConfig(allocator='stock') or MemoConfig(min_tokens=0), and more host_memory"
    assert launching._as_typed(said) == "use --allocator stock or --min_tokens 0, and more host_memory"


def test_help_is_short_and_what_it_leaves_out_works(recipe):
    import launching

    parser = recipe.parser_for(["--model", "m", "--weight_decay", "0.5"])
    shown = parser.format_help()
    assert len(shown.splitlines()) < 200 and "--weight_decay" not in shown and "--max_steps" in shown
    named = re.findall(r"--(\w+)", shown)
    for settings in (launching.RecipeArguments, memo_hf.MemoConfig):
        assert {spec.name for spec in dataclasses.fields(settings)} <= {*named}
    assert launching._LISTED <= {*named}
    assert parser.parse_args(["--model", "m", "--dataset", "d", "--weight_decay", "0.5"]).weight_decay == 0.5


def test_an_error_is_on_a_line_of_its_own(checkpoint, tmp_path):
    arguments = ["--model", checkpoint, "--dataset", "manual", "--seq_len", "4096", "--max_steps", "2", "--use_cpu"]
    command = [sys.executable, RECIPES / "finetune_checkpoint.py", *arguments, "--output_dir", tmp_path / "out"]
    ended = ended_run(*command, "--host_memory", "1KiB")
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith("host memory does not suffice")


def test_presets_and_settings(recipe, tmp_path, capsys):
    def parsed(*argv):
        return recipe.parser_for(list(argv)).parse_args_into_dataclasses(list(argv))

    gpu = ["--model", "m", "--output_dir", str(tmp_path), "--swap_fraction", "0.25", "--use_cpu", "true"]
    arguments, training, memo = parsed(*gpu)
    assert (arguments.seq_len, arguments.compare, arguments.memo) == ("1M", False, True)
    assert training.per_device_train_batch_size == 1 and training.learning_rate == 2e-4
    assert training.accelerator_config.dispatch_batches is False
    assert "'last': the newest in --output_dir" in " ".join(recipe.parser_for([]).format_help().split())
    found = recipe.parser_for(["--model", "m"]).get_default("dataloader_pin_memory")
    assert found == torch.cuda.is_available()  # torch warns where there is nothing to pin for
    assert memo.swap_fraction == 0.25
    assert parsed(*gpu, "--full")[1].learning_rate == 1e-5
    arguments, training, memo = parsed("--preset", "cpu", "--seq-len", "64")
    assert (arguments.model, arguments.seq_len, arguments.compare) == ("outputs/smollm2-135m", "64", True)
    with pytest.raises(SystemExit):
        recipe.main([])
    assert "--model: give a folder" in capsys.readouterr().err


# Wrong arguments; the exit code is 2.
MISTAKES = [
    (["--swap_fracton", "0.5"], "there is no argument --swap_fracton (did you mean '--swap_fraction'?)"),
    (["--seqlen=4K", "--max_step", "1"], "--seqlen (did you mean '--seq_len' or '--seed'?), --max_step (did you mean"),
    (["--epochs", "1"], "there is no argument --epochs; see --help"),
    (["--lora_rank", "8", "--full"], "--lora_rank is of an adapter, and --full trains none"),
    (["--device", "cpu"], "--device is what --dry-run forecasts; training takes the GPUs that it finds"),
    (["--swap_fraction", "5"], ": --swap_fraction is 5.0; it must be"),
    (["--host_memory", "64"], ": --host_memory: 64 without a unit means 64 bytes"),
    (["--chunk_size", "banana"], "--chunk_size: invalid int value: 'banana'"),
    (["--bf16", "true", "--fp16", "true"], "At most one of fp16 and bf16 can be True"),
    (["--accelerator_config", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
    (["--gradient_checkpointing", "true", "--full"], "activation checkpointing is on"),
    (["--seq_len", "4k8"], "--seq_len: cannot read '4k8'"),
    (["--model", "outputs/nowhere"], "--model: there is no folder outputs/nowhere"),
    (["--model", "nowhere"], "--model: there is no folder nowhere with a config.json; from the hub: "),
    (["--resume_from_checkpoint", "last", "--full"], "--resume_from_checkpoint last: there is no checkpoint in "),
    (["--resume_from_checkpoint", "x/checkpoint-2", "--full"], "checkpoint x/checkpoint-2: there is no such folder"),
    (["--model", "path/to/nowhere"], "--model: there is no folder path/to/nowhere"),
    (["--dataset", "books/a.txt"], "--dataset: there is no file or folder books/a.txt"),
]
UNFIT = (["--host_memory", "1KiB", "--swap_fraction", "1", "--full"], "Raise --host_memory, shorten the sequence")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # by newer transformers
@pytest.mark.parametrize("name", ["finetune_checkpoint", "llama7b_1m"])
@pytest.mark.parametrize("mistake, words", [*MISTAKES, UNFIT], ids=lambda given: " ".join(given[:2]))
def test_a_mistake_ends_in_its_words(checkpoint, tmp_path, monkeypatch, capsys, name, mistake, words):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    disable_progress_bars()
    settings = ["--dataset", "manual", "--seq_len", "4096", "--max_steps", "1", "--use_cpu", "true"]
    output = tmp_path / "made/for/it"
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(
            ["--model", str(checkpoint), "--output_dir", str(output), *settings, *mistake]
        )
    assert not (tmp_path / "made").exists()
    if mistake is UNFIT[0]:
        said = ended.value.code  # Python prints it and exits with 1
    else:
        assert ended.value.code == 2
        (said,) = (line for line in capsys.readouterr().err.splitlines() if line and "Loading weights" not in line)
    assert words in said and "MemoConfig(" not in said and len(said) < 1000


@pytest.mark.parametrize("name", ["finetune_checkpoint", "llama7b_1m"])
def test_what_to_resume_is_looked_at_before_the_model_is_loaded(checkpoint, tmp_path, monkeypatch, capsys, name):
    """Trainer would train a finished run for one step more."""
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = importlib.import_module(name)
    monkeypatch.setattr(recipe, "AutoModelForCausalLM", None)
    finished = tmp_path / "checkpoint-3"
    finished.mkdir()

    def resumed(which):
        settings = ["--dataset", "manual", "--seq_len", "64", "--max_steps", "3", "--use_cpu", "true"]
        with pytest.raises(SystemExit) as ended:
            recipe.main(["--model", str(checkpoint), "--output_dir", str(tmp_path), *settings]
                        + ["--resume_from_checkpoint", str(which)])  # fmt: skip
        return ended.value.code, capsys.readouterr()

    for which, ending in (
        (finished, "trainer_state.json"),
        (tmp_path, f"trainer_state.json; did you mean {finished}?"),
    ):
        code, said = resumed(which)
        assert code == 2 and said.err.endswith(f"{which}: no checkpoint, as it has no {ending}\n")
    (finished / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    for which in ("last", finished):
        code, said = resumed(which)
        assert code == 0
        assert said.out == f"{finished} has trained 3 steps of 3 (--max_steps): nothing to do\n"


@pytest.mark.parametrize("name", ["finetune_checkpoint", "llama7b_1m"])
def test_a_folder_without_a_model_comes_with_those_in_it(tmp_path, monkeypatch, capsys, name):
    monkeypatch.syspath_prepend(str(RECIPES))

    def said():
        with pytest.raises(SystemExit, match="2"):
            importlib.import_module(name).main(["--model", str(tmp_path), "--dataset", "manual", "--use_cpu", "true"])
        return capsys.readouterr().err.split(": ", 1)[1]

    assert said() == f"--model: {tmp_path} holds no config.json\n"
    for made in ("run/checkpoint-2", "smollm", "a/b/c"):
        (tmp_path / made).mkdir(parents=True)
        (tmp_path / made / "config.json").touch()
    assert said() == f"--model: {tmp_path} holds no config.json; did you mean {tmp_path}/smollm?\n"
    (tmp_path / "smollm/config.json").unlink()
    assert said() == f"--model: {tmp_path} holds no config.json; did you mean {tmp_path}/run/checkpoint-2?\n"


@pytest.mark.parametrize("name", ["finetune_checkpoint", "llama7b_1m"])
def test_an_adapter_is_not_a_model(tmp_path, monkeypatch, capsys, name):
    monkeypatch.syspath_prepend(str(RECIPES))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    said = f"{tmp_path} holds an adapter; give its base (some/base) as --model and --resume_from_checkpoint {tmp_path}"
    for checkpoint, end in (
        ("", "/checkpoint-N\n"),
        ("checkpoint-7", "/checkpoint-7\n"),
        ("checkpoint-40", "/checkpoint-40\n"),
    ):
        (tmp_path / checkpoint).mkdir(exist_ok=True)
        with pytest.raises(SystemExit):
            importlib.import_module(name).main(["--model", str(tmp_path), "--dataset", "manual", "--use_cpu", "true"])
        assert capsys.readouterr().err.endswith(said + end)


def test_defaults_are_the_same(monkeypatch, recipe):
    import finetune_checkpoint

    for parser_for in (recipe.parser_for, finetune_checkpoint.parser_for):
        for full, rate in ([], 2e-4), (["--full"], 1e-5):
            argv = ["--model", "m", "--dataset", "d", "--use_cpu", "true", *full]
            training = parser_for(argv).parse_args_into_dataclasses(argv)[1]
            assert (training.learning_rate, training.lr_scheduler_type) == (rate, "constant")
            assert (training.max_steps, training.save_steps) == (100, 20)


def test_a_model_read_from_gguf_becomes_ordinary(checkpoint, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import get_checkpoint

    quantized = LlamaForCausalLM.from_pretrained(checkpoint)
    quantized.config.quantization_config = {"quant_method": "gguf"}
    model = get_checkpoint.as_ordinary_model(quantized, 2, torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded, expected = LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), quantized.state_dict()
    assert all(torch.equal(loaded[name], expected[name].bfloat16()) for name in loaded)
    assert loaded.keys() == {name for name in expected if "layers.2." not in name}
    assert quantized.config.num_hidden_layers == 3
    with pytest.raises(SystemExit, match="--layers is 4; the checkpoint has 1 to 3"):
        get_checkpoint.as_ordinary_model(quantized, 4, torch.float32)


@pytest.mark.slow
def test_get_checkpoint_makes_an_ordinary_folder(tmp_path):
    pytest.importorskip("gguf", reason="pip install --no-deps -r recipes/requirements.txt")
    out = run(sys.executable, RECIPES / "get_checkpoint.py", "--output", tmp_path, "--layers", 2)
    assert "2 layers" in out and "rounded to 4 bits" in out
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert "quantization_config" not in config
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in tmp_path.iterdir()}
