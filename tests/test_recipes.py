"""The recipes run, as a user runs them, on a tiny random checkpoint and the text that comes with Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama of three layers with a vocabulary of bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=vocabulary["<end>"],
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*command, timeout=120):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def recipe(monkeypatch):
    """The flagship recipe as a module."""
    monkeypatch.syspath_prepend(str(RECIPES))
    disable_progress_bars()
    import llama7b_1m

    return llama7b_1m


def test_the_flagship_trains_compares_saves_and_reloads(checkpoint, tmp_path):
    out = run(
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 1, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no",
        RECIPES / "llama7b_1m.py", "--preset", "cpu", "--model", checkpoint,
        "--dtype", "float32", "--seq_len", "256", "--max_steps", 2, "--swap_fraction", 0.5, "--chunk_size", 64,
        "--lora_rank", 2, "--output_dir", tmp_path / "adapter",
    )  # fmt: skip
    assert "made for 128 positions" in out
    assert "3 layers in token mode" in out
    assert "swap fraction 0.5" in out
    assert "with activation checkpointing: " in out
    assert "goes on from the prompt:\n  A list comprehension" in out
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 2
    assert adapter["base_model_name_or_path"] == str(checkpoint)


def test_full_fine_tuning_of_local_files(checkpoint, tmp_path, recipe, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a", "b"):
        (texts / f"{name}.txt").write_text("one line\nand another. " * 20)
    output = tmp_path / "model"
    recipe.main(
        ["--model", str(checkpoint), "--dataset", str(texts), "--full", "--dtype", "float32", "--seq_len", "64",
         "--max_steps", "2", "--chunk_size", "16", "--compare", "false", "--output_dir", str(output)]
    )  # fmt: skip
    assert "with activation checkpointing" not in capsys.readouterr().out
    trained, before = (LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (output, checkpoint))
    assert trained.keys() == before.keys()
    assert any((trained[name] != before[name]).any() for name in before)


def test_presets_and_settings(recipe, tmp_path):
    gpu = ["--preset", "gpu", "--model", "m", "--output_dir", str(tmp_path), "--swap_fraction", "0.25"]
    arguments, training, memo = recipe.parse_arguments(gpu)
    assert (arguments.seq_len, arguments.compare) == ("1M", False)
    assert training.per_device_train_batch_size == 1
    assert memo.swap_fraction == 0.25
    arguments, training, memo = recipe.parse_arguments([])
    assert (arguments.model, arguments.seq_len, arguments.compare) == ("outputs/smollm2-135m", "4096", True)
    with pytest.raises(SystemExit):
        recipe.parse_arguments(["--preset", "gpu"])


def test_packing_keeps_every_token_in_order(recipe, checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = recipe.Dataset.from_dict({"body": ["abc", "", "defgh"]})
    packed = recipe.pack(texts, "body", tokenizer, 4)
    assert [tokenizer.decode(row) for row in packed["input_ids"]] == ["abc<end>", "<end>def"]
    assert (packed["labels"][0] == packed["input_ids"][0]).all()
    with pytest.raises(SystemExit, match="has 11 tokens, and one sequence takes 12"):
        recipe.pack(texts, "body", tokenizer, 12)


@pytest.mark.parametrize("suffix, content", [(".jsonl", '{"text": "x\\ny"}\n{"text": "z"}\n'), (".txt", "x\ny")])
def test_local_files(recipe, tmp_path, suffix, content):
    path = tmp_path / f"file{suffix}"
    path.write_text(content)
    assert recipe.load_texts(str(path), "text")["text"][0] == "x\ny"
    assert recipe.load_texts(str(tmp_path), "text")["text"][0] == "x\ny"
    (tmp_path / "other.parquet").write_text("")
    with pytest.raises(SystemExit, match="files of one kind"):
        recipe.load_texts(str(tmp_path), "text")


def test_the_default_text_needs_no_download(recipe):
    texts = recipe.load_texts(None, "text")
    assert sum(len(text) for text in texts["text"]) > 400_000


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
