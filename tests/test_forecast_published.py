"""The forecast against the paper's figures and the peers', as `benchmarks/bench_forecast.py` prints them."""

import runpy
from pathlib import Path

import pytest

from memo_hf.forecasting.api import forecast, make_setup
from memo_hf.forecasting.speed import model_flops

BENCH = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks/bench_forecast.py"))
PAPER = {"gpus": 8, "sequence_parallel": 8, "device": "a800", "host_memory": "2TiB"}
NOT_DESCRIBED = ("ring attention", "memory switches", "what its loss held")
ROWS = [row for row in BENCH["paper_rows"]() + BENCH["peer_rows"]() if not row.note.startswith(NOT_DESCRIBED)]
OWN = [row for row in BENCH["own_rows"]() if not row.note]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.run}: {row.figure}")
def test_published_figures_are_met(row):
    # A length is where a peak meets the memory, so its error is that of the peak magnified by what does not grow.
    bound = 0.05 if row.run.startswith("MEMO") or row.unit == "s" else 0.12 if row.unit == "GiB" else 0.25
    assert abs(row.error) <= bound + 0.003, f"published {row.published}, forecast {row.forecast}"


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row.run}: {row.figure}")
def test_what_was_measured_on_a_gpu_is_met(row):
    assert abs(row.error) <= {"GiB": 0.02, "s": 0.10}[row.unit], f"measured {row.published}, forecast {row.forecast}"


def test_the_paper_headline_fits_and_is_capped_by_host_memory():
    found = forecast("gpt-7b", "1M", **PAPER)
    assert found.fits
    assert found.swap_fraction == pytest.approx(0.467, abs=0.005)
    assert found.binding_limit == "host memory: 256.0 of 256.0 GiB"
    assert found.host_bytes_per_node <= 2 * 2**40
    assert found.device_peak_bytes < 80 * 2**30


def test_full_swapping_is_hidden_from_192k_and_not_before():
    plenty = {**PAPER, "host_memory": "64TiB", "device_memory": "640GiB"}
    assert forecast("gpt-7b", "192K", **plenty).swap_fraction == 1
    shorter = forecast("gpt-7b", "160K", **plenty)
    assert shorter.swap_fraction < 1 and shorter.binding_limit == "link: 12.5 GB/s"


def test_flops_follow_the_papers_convention():
    """6 s P + 6 n h s^2 (causal), P the matrices with the head."""
    setup = make_setup("gpt-7b", "1M", **PAPER)
    tokens, layers, hidden = 2**20, 32, 4096
    matrices = layers * 12 * hidden**2 + 50257 * hidden
    assert model_flops(setup) == pytest.approx(6 * tokens * matrices + 6 * layers * hidden * tokens**2)


def test_the_larger_models_of_the_paper_are_there():
    # Table 2 of the paper; the names are the sizes.
    for name, billions in (("gpt-7b", 6.7), ("gpt-13b", 12.9), ("gpt-30b", 30.0), ("gpt-65b", 65.0)):
        assert make_setup(name, 1024).model.num_parameters == pytest.approx(billions * 1e9, rel=0.03)
    for name, billions in (
        ("llama-2-7b", 6.738),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
        ("qwen3-30b-a3b", 30.532),
        ("smollm2-135m", 0.1345),
    ):
        assert make_setup(name, 1024).model.num_parameters == pytest.approx(billions * 1e9, rel=1e-3)
