"""The comparison with peers is fair: each computes the same gradients, and the command writes its table and picture."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import alternatives  # noqa: E402
import compare_peers  # noqa: E402
from bench_step import step  # noqa: E402

sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, vocab_size=61)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, max_position_embeddings=2048, **sizes)).train()


def gradients(model, ids, name):
    model.zero_grad(set_to_none=True)
    with alternatives.ALTERNATIVES[name](model) as around, around:
        step(model, ids, decoder_only=False)
    return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [name for name in alternatives.ALTERNATIVES if name != "plain"])
def test_every_alternative_computes_the_same_gradients(model, name):
    ids = torch.randint(0, 61, (1, 2048), generator=torch.Generator().manual_seed(1))
    expected = gradients(model, ids, "plain")
    if name == "TRL's activation offloading" and not torch.accelerator.is_available():
        with pytest.raises(alternatives.NotHere, match="it needs an accelerator"):
            gradients(model, ids, name)
        return
    if name.startswith("tiled"):
        pytest.importorskip("deepspeed", reason="pip install deepspeed")
    found = gradients(model, ids, name)
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(
            found[key], expected[key], rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    # And the model is left as it was.
    again = gradients(model, ids, "plain")
    assert all(torch.equal(again[key], expected[key]) for key in expected)


def test_one_command_writes_table_and_picture(tmp_path, capsys):
    output = tmp_path / "peers.csv"
    chosen = ["plain", "activation checkpointing", "TRL's activation offloading", "memo_hf"]
    command = ["--tokens", "64", "--layers", "1", "--repeats", "1", "--output", str(output), "--only", ",".join(chosen)]
    compare_peers.main(command)
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["alternative"] for row in rows] == chosen * 2
    assert [row["what"] for row in rows] == ["decoder alone"] * 4 + ["loss included"] * 4
    for row in rows:
        assert bool(row["peak_bytes"]) == bool(row["step_seconds_median"]) != bool(row["not_run"])
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "| memo_hf | " in capsys.readouterr().out
