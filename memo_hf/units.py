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


_NUMBER = re.compile(
    r"\s*(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-zA-Z/]*)\s*"
)


def _parse(text: str | int | float, units: dict[str, int], what: str, written: str) -> float:
    """The number that `text` is written for, finite and not negative; `written` says how people write one."""
    if isinstance(text, bool):
        raise ConfigError(f"{what}: expected a number, got {text!r}")
    if isinstance(text, (int, float)):
        number, factor = float(text), 1
    else:
        match = _NUMBER.fullmatch(text)
        if not match or match[2].lower() not in units:
            raise ConfigError(f"{what}: cannot read {text!r}; write it as {written}")
        number, factor = float(re.sub("[,_]", "", match[1])), units[match[2].lower()]
    if not 0 <= number * factor < float("inf"):
        raise ConfigError(f"{what}: {text!r} is negative or not finite; write it as {written}")
    return number * factor


def parse_bytes(text: str | int | float, what: str = "bytes") -> int:
    """Bytes from "64GiB", "64GB" (decimal), "512 MiB" or a plain number. Raises `ConfigError`."""
    return int(_parse(text, _BYTE_UNITS, what, "64GiB, 500MB or 2TiB"))


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
    number = int(_parse(text, _FLOPS_UNITS, what, "989T, 989e12 or 1P"))
    if 0 < number < 10**9:
        raise ConfigError(f"{what}: {text} without a unit means {number} FLOPs per second; write {text}T or {text}e12")
    return number


def parse_count(text: str | int | float, what: str = "tokens") -> int:
    """A token count of at least 1 from "128K" (131,072), "1M" (1,048,576, as in the paper), "100,000" or a number.

    A point needs a unit after it ("1.5M"), since "100.000" is a hundred to some and a hundred thousand to others.
    Raises `ConfigError`.
    """
    written = "4096, 100,000, 128K (131,072) or 1M (1,048,576)"
    number = _parse(text, _COUNT_UNITS, what, written)
    has_lone_point = isinstance(text, str) and re.fullmatch(r"\s*[0-9,_]+\.[0-9]+\s*", text)
    if number < 1 or number % 1 or has_lone_point:
        raise ConfigError(f"{what} is {text}; it must be a whole number of at least 1, written as {written}")
    return int(number)


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
