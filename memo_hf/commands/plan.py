"""`memo-hf plan`: forecast a run, find the longest sequence or the fewest GPUs, compare strategies, plot. No torch."""

from __future__ import annotations

import json
from pathlib import Path

_EPILOG = """examples:
  memo-hf plan --model llama-3.1-8b --seq-len 256K --device h200 --host-memory 1TiB --optimizer-device host
  memo-hf plan --model ./my-model --seq-len 1M --gpus 8 --sequence-parallel 8 --device a800 --host-memory 2TiB --json
  memo-hf plan --model qwen3-8b --device h200 --train lora --find max-seq-len

exit code: 0 where the run fits, 1 where it does not, or where --find finds nothing that fits.
"""
# Not read from the table, which takes a solver with it.
_DEVICES = "a800, a100-40, a100-80, h100, h200, b200, 3090, 4090, 5090, a6000, l4, l40s"
_MFU = "model FLOPs, causal attention by half, no recompute; docs/forecast.md"
# How far to trust the times: errors of docs/forecast.md's rows.
_TRUST = """\
times           memo_hf's own step on an H200 took 18 to 30 % less in the forecast than measured, with a slower
                attention kernel than today's; steps of others were met on 8 A800 (MFU within 2 %), 8 H100 (within 6 %)
                and an H200 (within 9 %); other devices are scaled by peak and held against no run (docs/forecast.md)"""

_TRUST_CPU = """\
times           a CPU's are guessed from its number of cores: a step that you have timed says more (docs/forecast.md)"""


def add_parser(subparsers):
    """Adds `plan` and its options; returns its parser."""
    import argparse

    parser = subparsers.add_parser(
        "plan",
        help="forecast memory and time of a run before it starts",
        description="Forecast a run: whether it fits, the swap fraction, device and host memory by part, step time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a shipped name (see docs/forecast.md), a config.json or its folder")
    add("--seq-len", help="tokens of a sequence: 4096, 100,000, 128K or 1M; not needed for --find max-seq-len")
    add("--batch", type=int, default=1, help="sequences that a data-parallel group works on at once")
    add("--train", choices=["full", "lora"], default="full", help="all weights, or an adapter")
    add("--lora-rank", type=int, help="of the adapter; default: 16")
    add("--lora-targets", help="names such as q_proj,v_proj; default: all-linear")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on a CPU float32")
    add("--no-master-weights", action="store_true", help="no fp32 weights beside the 16-bit ones")
    add("--optimizer", choices=["adamw", "adamw-8bit", "sgd-momentum", "sgd"], default="adamw", help="for its states")
    add("--optimizer-device", choices=["device", "host"], default="device", help="where its states are")
    add("--weights-device", choices=["device", "host"], default="device", help="host: as ZeRO-3 offloads parameters")
    add("--gpus", type=int, default=1, help="GPUs of the run")
    add("--gpus-per-node", type=int, default=8, help="GPUs that share a node's host memory")
    add("--sequence-parallel", type=int, default=1, help="GPUs that share one sequence (Ulysses)")
    add("--shards", type=int, help="GPUs that share weights, gradients and optimizer; default: all")
    add("--device", default="h100", help=f"{_DEVICES}, or cpu for this machine's")
    add("--device-memory", help="for example 48GiB; default: the device's own")
    add("--flops", help="dense peak in the dtype, FLOPs per second: 989T or 989e12; default: the device's own")
    add(
        "--link-bandwidth",
        help="to and from host memory per second and device, for example 25GB; default: the device's own",
    )
    add(
        "--host-memory",
        help="of one node, for example 2TiB: exactly what activations and offloaded states may take, so leave out what"
        " the system needs; default: nine tenths of what is usual for the device",
    )
    add("--chunk-size", type=int, help="tokens in project or finish at once; default: chosen for you")
    add("--unswapped-layers", type=int, default=2, help="the last layers, which keep their activations on the device")
    add("--swap-fraction", type=float, help="by hand, 0 to 1; default: solved for")
    add("--qkv", choices=["swap", "rebuild"], help="by hand; default: chosen for you")
    add("--full-logits", action="store_true", help="whole logits: the loss is not chunked")
    add("--gradient-accumulation", action="store_true", help="gradients of earlier passes are held during forward")
    add(
        "--find",
        action="append",
        choices=["max-seq-len", "min-gpus"],
        help="the longest sequence, whatever --seq-len is, or the fewest GPUs that fit, whatever --gpus is",
    )
    add("--compare", action="store_true", help="beside what a user would otherwise pick")
    add("--plot", metavar="FILE", help="bytes and step time over sequence length, as .png, .svg, .pdf or .jpg")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(args) -> int:
    """Runs `memo-hf plan`. Returns 0, or 1 where the run does not fit."""
    from memo_hf.errors import ConfigError
    from memo_hf.forecasting.compare import compare
    from memo_hf.forecasting.find import advise, max_seq_len, min_gpus
    from memo_hf.forecasting.forecast import forecast_setup
    from memo_hf.paths import PICTURES, require_suffix

    if args.plot:
        require_suffix(args.plot, "--plot, a picture,", PICTURES)
        if not Path(args.plot).absolute().parent.is_dir():
            raise ConfigError(
                f"--plot is {args.plot!r}, and there is no folder {str(Path(args.plot).parent)!r}; make it"
            )
    if args.find and len(args.find) > 1:
        raise ConfigError(f"--find is given {len(args.find)} times ({', '.join(args.find)}); ask for one at a time")
    find = args.find[0] if args.find else None
    if args.seq_len is None and find != "max-seq-len":
        raise ConfigError("--seq-len is missing; give the tokens of a sequence, for example --seq-len 128K")
    setup = _setup(args)
    found = {}
    if find == "max-seq-len":
        found["max_seq_len"] = max_seq_len(setup)
        setup = setup.replace(seq_len=found["max_seq_len"] or setup.sequence_parallel)
    elif find == "min-gpus":
        fewest = min_gpus(setup)
        found["min_gpus"] = fewest and fewest.gpus
        setup = fewest or setup
    forecast = forecast_setup(setup, advise)
    code = 0 if forecast.fits and all(found.values()) else 1
    rows = compare(setup, forecast) if args.compare else None
    if args.json:
        answer = {**found, **_inputs(setup), **forecast.to_dict()}
        if rows is not None:
            answer["compare"] = rows
        print(json.dumps(answer, indent=2))
    else:
        _print_text(setup, forecast, found, _unused(args, find), rows)
    if args.plot:
        from memo_hf.report.forecast_plot import plot_forecast

        plot_forecast(setup, args.plot)
        if not args.json:
            print(f"\nplot: {args.plot}")
    return code


def _unused(args, find: str | None) -> str:
    """What was given and is found instead."""
    given = {
        "max-seq-len": {"--seq-len": args.seq_len},
        "min-gpus": {
            "--gpus": args.gpus if args.gpus > 1 else None,
            "--sequence-parallel": args.sequence_parallel if args.sequence_parallel > 1 else None,
            "--shards": args.shards,
        },
    }
    named = [f"{name} {value}" for name, value in given.get(find, {}).items() if value is not None]
    return f" (in place of {', '.join(named)})" if named else ""


def _print_text(setup, forecast, found: dict, unused: str, rows: list[dict] | None) -> None:
    from memo_hf.forecasting.find import MOST_GPUS, describe_gpus

    none = {"max_seq_len": "none fits", "min_gpus": f"none up to {MOST_GPUS:,} fits; as given:"}
    for name, value in found.items():
        told = describe_gpus(setup) if name == "min_gpus" else f"{value:,}"
        print(f"{name.replace('_', ' ')}: {told if value else none[name]}{unused}\n")
    print(_text(setup, forecast))
    if rows is not None:
        print("\n" + _table(rows, setup.chunked_loss))
        print(_under_table(setup))


def _setup(args):
    from memo_hf.forecasting.api import make_setup

    return make_setup(
        args.model,
        1024 * args.sequence_parallel if args.seq_len is None else args.seq_len,
        batch=args.batch,
        train=args.train,
        lora_rank=args.lora_rank,
        lora_targets=args.lora_targets,
        dtype=args.dtype,
        master_weights=not args.no_master_weights,
        optimizer=args.optimizer,
        optimizer_device=args.optimizer_device,
        weights_device=args.weights_device,
        gpus=args.gpus,
        gpus_per_node=args.gpus_per_node,
        sequence_parallel=args.sequence_parallel,
        shards=args.shards,
        device=args.device,
        device_memory=args.device_memory,
        flops=args.flops,
        link_bandwidth=args.link_bandwidth,
        host_memory=args.host_memory,
        chunk_size=args.chunk_size,
        unswapped_layers=args.unswapped_layers,
        swap_fraction=args.swap_fraction,
        qkv=args.qkv,
        chunked_loss=not args.full_logits,
        gradient_accumulation=args.gradient_accumulation,
    )


def _inputs(setup) -> dict:
    return {
        "model": setup.model.name,
        "num_parameters": setup.model.num_parameters,
        "seq_len": setup.seq_len,
        "trained_positions": setup.model.trained_positions,
        "batch": setup.batch,
        "gpus": setup.gpus,
        "sequence_parallel": setup.sequence_parallel,
        "shards": setup.shards,
        "device": setup.device.name,
        "chunk_tokens": setup.chunk,
        "host_memory_assumed": setup.host_bytes is None,
    }


def _text(setup, forecast) -> str:
    from memo_hf.planner.swap_fraction import QKV_IN_WORDS
    from memo_hf.units import format_bytes, format_seconds

    trained = "full fine-tuning" if setup.training.is_full else f"LoRA of rank {setup.training.lora_rank}"
    head = (
        f"{setup.model.name} ({setup.model.num_parameters / 1e9:.2f} B parameters), {trained}, {setup.seq_len:,} tokens"
        f" x {setup.batch}, {setup.gpus} x {setup.device.name} (sequence over {setup.sequence_parallel}, weights over"
        f" {setup.shards})"
    )
    where = f"{forecast.num_swapped} layers swapped, {forecast.num_kept} kept on the device"
    if forecast.num_input_only:
        where += f", {forecast.num_input_only} with their input alone swapped and attention recomputed"
    way = f"swap fraction   {forecast.swap_fraction:.3f} of tokens; {QKV_IN_WORDS[forecast.qkv]}; {where}"
    if forecast.strategy == "checkpoint":
        way = "strategy        activation checkpointing, nothing swapped"
    step, exposed = format_seconds(forecast.step_seconds), format_seconds(forecast.exposed_seconds)
    speed = [
        f"step            {step}, {exposed} of it waiting for copies",
        f"tokens          {forecast.tokens_per_second:,.0f} a second, over all GPUs",
        f"MFU             {100 * forecast.mfu:.1f} % ({_MFU})",
    ]
    lines = [
        head,
        "",
        f"fits            {'yes' if forecast.fits else 'NO'}",
        way,
        *(speed if forecast.fits else []),
        *_positions(setup),
        f"decided by      {forecast.binding_limit}",
        f"device peak     {format_bytes(forecast.device_peak_bytes)} of {format_bytes(forecast.device_budget_bytes)}",
        f"  when          {forecast.device_peak_moment}",
    ]
    lines += [f"  {name:<22}{format_bytes(value):>12}" for name, value in forecast.device_peak_by_part.items()]
    lines.append(
        f"host            {format_bytes(forecast.host_bytes_per_rank)} a rank,"
        f" {format_bytes(forecast.host_bytes_per_node)} of {format_bytes(forecast.host_budget_bytes_per_node)} a node"
    )
    if setup.host_bytes is None:
        assumed = f"{setup.device.name}: nine tenths of {format_bytes(setup.assumed_host_bytes)}"
        lines.append(f"{'':16}host memory assumed for {assumed}; give --host-memory")
    if setup.is_one_memory:
        lines.append(f"{'':16}the device's budget is half of what is free now, so it moves; --device-memory sets one")
    lines += _bandwidths(setup)
    lines.append(_TRUST_CPU if setup.device.name == "cpu" else _TRUST)
    lines += [f"to change       {advice}" for advice in forecast.advice]
    return "\n".join(lines)


def _bandwidths(setup) -> list[str]:
    """A line on what is assumed between GPUs, where there are several."""
    if setup.gpus == 1:
        return []
    device = setup.device
    text = f"between GPUs    {device.peer_bytes_per_second / 1e9:g} GB/s each way"
    if setup.gpus > setup.gpus_per_node:
        text += f", {device.network_bytes_per_second / 1e9:g} GB/s a GPU between nodes"
    text += ", assumed, for weights, gradients, q, k, v and o"
    if device.peer_bytes_per_second == device.link_bytes_per_second:
        text += "\n" + " " * 16 + "copies to the host take the same PCIe: that they slow each other is not counted"
    return [text]


def _positions(setup) -> list[str]:
    """A line where the sequence is longer than what the model was trained for."""
    trained = setup.model.trained_positions
    if trained is None or setup.seq_len <= trained:
        return []
    more = "its table of positions ends there" if setup.model.num_positions else "RoPE scaling, docs/long_text.md"
    return [f"positions       over the {trained:,} positions it was trained for; {more}"]


def _table(rows, has_chunked_loss: bool) -> str:
    from memo_hf.units import format_bytes, format_seconds

    def cells(strategy, fits, peak, whole, host, step, mfu):
        whole = f"{whole:>14}" if has_chunked_loss else ""
        return f"{strategy:<42}{fits:>5}{peak:>13}{whole}{host:>13}{step:>11}{mfu:>8}"

    lines = [cells("strategy", "fits", "device peak", "whole logits", "host a rank", "step", "MFU")]
    for row in rows:
        whole = row["whole_logits_peak_bytes"]
        lines.append(
            cells(
                row["strategy"],
                "yes" if row["fits"] else "no",
                format_bytes(row["device_peak_bytes"]),
                "-" if whole is None else format_bytes(whole),
                format_bytes(row["host_bytes_per_rank"]),
                format_seconds(row["step_seconds"]),
                f"{100 * row['mfu']:.1f} %",
            )
        )
    return "\n".join(lines)


def _under_table(setup) -> str:
    """What the rows have in common."""
    if not setup.chunked_loss:
        return "All rows have whole logits, no chunked loss."
    return (
        'All rows have a chunked loss, whoever computes it. Under "whole logits": the device peak with a loss that'
        "\nmakes them all, as transformers' own does."
    )
