"""`memo-hf doctor`: what memo_hf finds on this machine, what is missing, and the line that mends it.

Found by the command line. Torch is imported in `run` alone, so that `memo-hf --help` stays quick.
"""

from __future__ import annotations

import json

_EPILOG = """exit code: 0 where memo_hf can train here, 1 where something that it needs is missing.

A tiny model is trained for one step on each kind of device, so that "can train" is seen and not guessed.
"""


def add_parser(subparsers):
    """Adds `doctor` and its options; returns its parser."""
    import argparse

    parser = subparsers.add_parser(
        "doctor",
        help="what is here, what is missing, and how to mend it",
        description="Print versions, devices, link bandwidth, host budget, attention kernels, and what is missing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args) -> int:
    """Runs `memo-hf doctor`. Returns 0, or 1 where something needed is missing."""
    from memo_hf.diagnosis import examine

    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(_text(found))
    return 0 if found["can_train"] else 1


def _text(found: dict) -> str:
    lines = ["versions"]
    for package in found["versions"]:
        note = f"   {package['problem']}" if package["problem"] else ""
        lines.append(f"  {package['name']:<18}{package['version'] or '-':<20}{package['role']}{note}")
    for title, rows in (
        ("devices", found["devices"]),
        ("link to host memory", found["link"]),
        ("host memory", found["host"]),
        ("attention kernels", found["attention"]),
        ("planned allocator", found["allocator"]),
        ("one training step", found["step"]),
    ):
        lines += ["", title]
        lines += [f"  {row['name']:<18}{row['found']}" for row in rows]
    lines += ["", "missing" if found["missing"] else "nothing is missing"]
    for item in found["missing"]:
        lines.append(f"  {'NEEDED' if item['needed'] else 'optional'}: {item['what']}")
        lines.append(f"    {item['mend']}")
    lines += ["", "memo_hf can train here" if found["can_train"] else "memo_hf can NOT train here"]
    return "\n".join(lines)
