"""memo_hf beside what a user would otherwise pick, and beside the paper's MEMO. Called by `--compare` and the plot."""

from __future__ import annotations

from memo_hf.forecasting.baselines import STRATEGIES, baseline
from memo_hf.forecasting.forecast import Forecast, forecast_setup
from memo_hf.forecasting.memory import host_state_bytes, layer_bytes, static_parts
from memo_hf.forecasting.moments import loss_parts
from memo_hf.forecasting.setup import Setup


def compare(setup: Setup, forecast: Forecast | None = None) -> list[dict]:
    """One row per strategy: `strategy`, `fits`, `device_peak_bytes`, `host_bytes_per_rank`, `step_seconds`, `mfu`.

    All with the loss of `setup`, chunked unless it says otherwise. `whole_logits_peak_bytes` is what the device would
    hold with a loss that makes all logits, as transformers' own does; None for the rows of memo_hf and MEMO.
    """
    forecast = forecast or forecast_setup(setup)
    rows = []
    for strategy in STRATEGIES:
        row = baseline(setup, strategy)
        whole = baseline(setup.replace(chunked_loss=False), strategy).device_peak_bytes
        host = row.host_bytes + host_state_bytes(setup)
        rows.append(_row(row.name, row.fits, row.device_peak_bytes, host, row.step_seconds, row.mfu, whole))
    rows.append(paper_memo(setup))
    rows.append(
        _row(
            "memo_hf",
            forecast.fits,
            forecast.device_peak_bytes,
            forecast.host_bytes_per_rank,
            forecast.step_seconds,
            forecast.mfu,
        )
    )
    return rows


def paper_memo(setup: Setup) -> dict:
    """The paper's MEMO: the same fraction and step, but two rounding buffers that each hold a whole layer's skeletal
    activations and an MLP that is not chunked (sections 4.1 and 4.3.4)."""
    chosen = forecast_setup(setup.replace(qkv="rebuild", num_kept=2))
    peak = 0.0
    for kind in setup.model.kinds(2):
        of, tokens = layer_bytes(setup, kind), setup.local_tokens
        skeletal = of.input + of.output + of.logsumexp + of.qkv + of.others
        transient = max(
            tokens * (of.tokens.mlp_backward - of.tokens.mlp) + of.input,
            of.output + of.qkv + of.input + of.workspace,
        )
        peak = max(peak, 2 * skeletal + transient)
    before, after = (sum(static_parts(setup, has).values()) for has in (False, True))
    peak = max(after + peak, before + sum(loss_parts(setup).values()))
    fits = peak <= setup.device.budget_bytes and chosen.fits and chosen.num_input_only == 0
    return _row("MEMO (paper)", fits, peak, chosen.host_bytes_per_rank, chosen.step_seconds, chosen.mfu)


def _row(name, fits, device, host, seconds, utilisation, whole_logits=None) -> dict:
    return {
        "strategy": name,
        "fits": bool(fits),
        "device_peak_bytes": round(device),
        "whole_logits_peak_bytes": whole_logits and round(whole_logits),
        "host_bytes_per_rank": round(host),
        "step_seconds": seconds,
        "mfu": utilisation,
    }
