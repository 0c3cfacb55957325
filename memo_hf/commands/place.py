"""`memo-hf place`: addresses for the buffers of a problem, a recorded step or a PyTorch memory snapshot. No torch."""

from __future__ import annotations

import argparse

_EPILOG = """examples:
  memo-hf place step.csv --capacity 40GiB --output plan.csv
  memo-hf place --snapshot snapshot.pickle --time-limit 30 --plot map.png

step.csv has one buffer a line, `id,lower,upper,size`: alive from lower up to, not including, upper. A file that begins
with `op,id,size,phase,stream,thread` is the trace of a step, which is planned in two levels: layers, then the step.
With a --method other than auto it is planned flat. Streams never share bytes of a trace or a snapshot.

exit code: 0 where a plan was found, within --capacity where that is given; 1 where the best plan needs more.
"""
_METHODS = ("auto", "greedy", "tree", "core", "order", "mip", "cbc", "cpsat", "supermalloc")


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Adds `place` and its options; returns its parser."""
    parser = subparsers.add_parser(
        "place",
        help="plan the addresses of a step's buffers",
        description="Find addresses with the lowest peak, check them, and say how far from optimal they can be.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("instance", nargs="?", metavar="INSTANCE.csv", help="buffers, or the trace of a step")
    source.add_argument("--snapshot", metavar="FILE", help="a file of torch.cuda.memory._dump_snapshot, instead")
    add = parser.add_argument
    add("--capacity", metavar="BYTES", help="of the arena, for example 40GiB")
    add("--time-limit", type=float, default=10.0, metavar="S", help="seconds to search")
    add("--method", choices=_METHODS, default="auto", help="auto, or what to run after the greedy orders")
    add("--output", metavar="PLAN.csv", help="write the buffers with their offsets")
    add("--plot", metavar="FILE", help="draw addresses over time, as .png, .svg, .pdf or .jpg; needs matplotlib")
    return parser


def run(args) -> int:
    """Runs `memo-hf place`. Returns 0, or 1 where the capacity is not met."""
    from memo_hf.paths import PICTURES, require_suffix
    from memo_hf.planner.problem import write_placement
    from memo_hf.units import format_bytes, parse_bytes

    if args.output:
        require_suffix(args.output, "--output, a table,", (".csv",))
    if args.plot:
        require_suffix(args.plot, "--plot, a picture,", PICTURES)
    capacity = None if args.capacity is None else parse_bytes(args.capacity, "--capacity")
    placement, pytorch = _place(args, capacity)
    if args.output:
        write_placement(placement, args.output)
    if args.plot:
        from memo_hf.report.address_map import plot_address_map

        plot_address_map(placement, args.plot)
    print(f"buffers      {len(placement.problem):,}")
    print(f"peak         {placement.peak:,} bytes ({format_bytes(placement.peak)})")
    print(f"lower bound  {placement.lower_bound:,} bytes, the most alive at once")
    print(f"gap          {100 * placement.gap:.3f} %, {'proved optimal' if placement.proved else 'not proved optimal'}")
    print(f"method       {placement.method}, {placement.seconds:.2f} s")
    if pytorch:
        print(f"PyTorch      {pytorch}")
    if capacity is not None and placement.peak > capacity:
        print(f"NOT within the capacity of {capacity:,} bytes: the best peak found is {placement.peak:,}")
        return 1
    return 0


def _place(args, capacity):
    """The placement, and where the requests are known in their order what PyTorch's own allocator makes of them."""
    from memo_hf.errors import PlanError
    from memo_hf.planner.bilevel import plan_step
    from memo_hf.planner.caching import reserved_bytes
    from memo_hf.planner.placement import place
    from memo_hf.planner.problem import read_problem
    from memo_hf.planner.snapshot import read_snapshot
    from memo_hf.planner.trace import is_trace, read_trace
    from memo_hf.units import format_bytes

    try:
        if args.snapshot:
            trace, reserved = read_snapshot(args.snapshot)
            pytorch = f"had reserved {reserved:,} bytes ({format_bytes(reserved)}) at most"
        elif is_trace(args.instance):
            trace = read_trace(args.instance)
            reserved = reserved_bytes(trace)
            pytorch = f"would reserve about {reserved:,} bytes ({format_bytes(reserved)}) for the same requests"
        else:
            return place(read_problem(args.instance), capacity, args.time_limit, args.method), None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the input: {error}") from None
    return plan_step(trace, time_limit=args.time_limit, capacity=capacity, method=args.method), pytorch
