"""Bytes, FLOPs and token counts as people write them: "2GiB", "64 GB", "989T", "1M" tokens."""

from __future__ import annotations

import re

from memo_hf.errors import ConfigError

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_FLOPS_UNITS = {"": 1, "g": 10**9, "t": 10**12, "p": 10**15}
_FLOPS_UNITS |= {f"{unit}flop{s}": factor for unit, factor in _FLOPS_UNITS.items() if unit for s in ("s", "/s")}


def _parse(text: str | int | float, units: dict[str, int], what: str) -> int:
    if isinstance(text, bool):
        raise ConfigError(f"{what}: expected a number, got {text!r}")
    if isinstance(text, (int, float)):
        number, factor = float(text), 1
    else:
        match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-zA-Z/]*)\s*", text)
        if not match or match[2].lower() not in units:
            raise ConfigError(f"{what}: cannot read {text!r}; write a number with one of the units {sorted(units)[1:]}")
        number, factor = float(match[1].replace("_", "")), units[match[2].lower()]
    if number < 0 or number * factor != number * factor or number == float("inf"):
        raise ConfigError(f"{what}: {text!r} is negative or not finite")
    return int(number * factor)


def parse_bytes(text: str | int | float, what: str = "bytes") -> int:
    """Bytes from "64GiB", "64GB" (decimal), "512 MiB" or a plain number. Raises `ConfigError`."""
    return _parse(text, _BYTE_UNITS, what)


def parse_memory(text: str | int | float, what: str) -> int:
    """As `parse_bytes`, for memory or bandwidth of a machine: refuses a number below 1 MiB without a unit.

    Nobody has a machine of 64 bytes, and who writes 64 means GiB. Raises `ConfigError`.
    """
    number = parse_bytes(text, what)
    is_bare = isinstance(text, (int, float)) or text.strip()[-1].isdigit()
    if is_bare and 0 < number < 2**20:
        raise ConfigError(f"{what}: {text} without a unit means {number} bytes; write the unit, for example {text}GiB")
    return number


def parse_flops(text: str | int | float, what: str) -> int:
    """FLOPs per second from "989T", "989 TFLOPS", "1P" or a plain number such as 989e12.

    Refuses a number below a billion: nobody has a device of 989 FLOPs, and who writes 989 means trillions. Raises
    `ConfigError`.
    """
    number = _parse(text, _FLOPS_UNITS, what)
    if 0 < number < 10**9:
        raise ConfigError(f"{what}: {text} without a unit means {number} FLOPs per second; write {text}T or {text}e12")
    return number


def parse_count(text: str | int | float, what: str = "tokens") -> int:
    """A token count from "128K" (131,072), "1M" (1,048,576, as in the paper) or a number. Raises `ConfigError`."""
    return _parse(text, _COUNT_UNITS, what)


def format_seconds(seconds: float) -> str:
    """`500.4 s`, or `29.5 h` from 10,000 seconds on; below a microsecond, where rounding is all that is left, `0 s`."""
    seconds = seconds if seconds >= 1e-6 else 0.0
    return f"{seconds:.4g} s" if seconds < 9_999.5 else f"{seconds / 3600:,.1f} h"


def format_bytes(num_bytes: float) -> str:
    """`61.2 GiB`: three significant figures and a binary unit."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.1f} {unit}" if abs(value) >= 100 else f"{value:.2f} {unit}"
