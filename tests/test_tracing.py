"""Steps traced on FakeTensors, without being run, beside the same steps run and recorded."""

from collections import Counter

import pytest
import torch

import memo_hf
from memo_hf.errors import ConfigError, UnsupportedModelError
from memo_hf.planner.bilevel import plan_step
from memo_hf.planner.problem import Problem
from memo_hf.planner.trace import to_buffer
from memo_hf.tracing import trace_step
from tests.tiny_models import random_ids, tiny

IDS = random_ids(1, 256)
BATCH = dict(input_ids=IDS, labels=IDS)
SETTINGS = dict(chunk_size=64, unswapped_layers=1)


def record(model, folder, **settings):
    """The same step, recorded by the allocator."""
    config = memo_hf.MemoConfig(allocator="planned", plan_folder=str(folder), **SETTINGS, **settings)
    session = memo_hf.enable(model, config)
    for _ in range(3):
        model(**BATCH).loss.backward()
        model.zero_grad()
    session.serving.end_step()
    (trace,) = session.serving.recorded_traces
    session.close()
    return trace


@pytest.mark.parametrize(("family", "fraction"), [("llama", 0.5), ("qwen3", 0.0)])
def test_a_step_that_does_not_run_has_the_requests_of_one_that_does(tmp_path, monkeypatch, family, fraction):
    monkeypatch.setattr("memo_hf.serving.PLANNING_SECONDS", 0.0)
    model = tiny(family, num_hidden_layers=4)
    before = {name: (parameter, parameter._version) for name, parameter in model.named_parameters()}
    traced = trace_step(model, BATCH, memo_hf.MemoConfig(swap_fraction=fraction, **SETTINGS))
    assert {name: (parameter, parameter._version) for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())
    recorded = record(model, tmp_path, swap_fraction=fraction)

    # Random states and single numbers are ordinary tensors in both, and not seen by the trace.
    unseen = torch.get_rng_state().nbytes
    ours, theirs = ([r for r in t.requests if r.size > 8 and r.size != unseen] for t in (traced, recorded))
    missing = Counter((r.phase, r.size) for r in theirs) - Counter((r.phase, r.size) for r in ours)
    # The attention kernel's own memory: one block forward, two backward.
    assert len([phase for phase, _ in missing if phase.endswith("attend")]) == 4 + 2 * 4
    assert all(phase.endswith("attend") or phase == "before the layers" for phase, _ in missing), missing
    assert len(ours) < 1.1 * len(theirs)
    seen = [[r for r in requests if (r.phase, r.size) not in missing] for requests in (ours, theirs)]
    most = [Problem(tuple(to_buffer(r) for r in requests)).lower_bound for requests in seen]
    assert most[0] == most[1] > 500_000
    assert plan_step(traced, time_limit=1.0).gap < 0.05


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ConfigError, match="set MemoConfig\\(swap_fraction=...\\) to trace it"):
        trace_step(tiny("llama"), BATCH, memo_hf.MemoConfig(**SETTINGS))
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="layers.0 runs in layer mode .*mode='layer' was asked for"):
        trace_step(model, BATCH, memo_hf.MemoConfig(swap_fraction=0.0, mode="layer", **SETTINGS))
    memo_hf.enable(model, memo_hf.MemoConfig(**SETTINGS)).close()  # nothing is left of the attempt
