"""The data of address planning: buffers with sizes and lifetimes, and an address for each. CSV in and out.

Every planner module and the command line build on these types; this one knows no solver and does no search.

A lifetime is half-open, `[lower, upper)`: a buffer that is freed at time 4 and one that is made at time 4 may share an
address. This picture is the definition, everything else refers to it:

    address
      6 |     +-----------+            b: lower 2, upper 6, size 2, offset 4
      4 |-----+---+-------+
        |    a    |  c    |            a: lower 0, upper 4, size 4, offset 0
        |         |       |            c: lower 4, upper 8, size 4, offset 0   (a and c never live together)
      0 +----+----+---+---+---+---> time
        0    2    4   6   8
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from memo_hf.errors import PlanError

_COLUMNS = ("id", "lower", "upper", "size")


@dataclass(frozen=True)
class Buffer:
    """One memory block: `size` bytes, alive in `[lower, upper)`. Times are any whole numbers, often event indices.

    Raises:
        PlanError: the lifetime is empty or the size is not positive.
    """

    id: str
    lower: int
    upper: int
    size: int

    def __post_init__(self):
        if self.lower >= self.upper:
            raise PlanError(
                f"buffer {self.id!r} lives in [{self.lower}, {self.upper}), which is empty; need lower < upper"
            )
        if self.size < 1:
            raise PlanError(f"buffer {self.id!r} has size {self.size}; sizes start at 1, leave empty requests out")


@dataclass(frozen=True)
class Problem:
    """The buffers to place, and the same as arrays (int64, one entry a buffer, in the order of `buffers`).

    Raises:
        PlanError: two buffers have one id.
    """

    buffers: tuple[Buffer, ...]

    def __post_init__(self):
        object.__setattr__(self, "buffers", tuple(self.buffers))
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.id in seen:
                raise PlanError(f"buffer id {buffer.id!r} occurs twice; ids must be unique")
            seen.add(buffer.id)

    def __len__(self) -> int:
        return len(self.buffers)

    @cached_property
    def lower(self) -> np.ndarray:
        return np.array([buffer.lower for buffer in self.buffers], dtype=np.int64)

    @cached_property
    def upper(self) -> np.ndarray:
        return np.array([buffer.upper for buffer in self.buffers], dtype=np.int64)

    @cached_property
    def size(self) -> np.ndarray:
        return np.array([buffer.size for buffer in self.buffers], dtype=np.int64)

    @cached_property
    def lower_bound(self) -> int:
        """The most bytes ever alive at once: no plan can have a lower peak, so one that reaches it is optimal."""
        if not self.buffers:
            return 0
        times = np.concatenate((self.lower, self.upper))
        change = np.concatenate((self.size, -self.size))
        order = np.lexsort((change, times))  # at one time frees (negative) come first: lifetimes are half-open
        return int(np.cumsum(change[order]).max())

    def aligned(self, alignment: int) -> Problem:
        """The same with sizes rounded up to multiples of `alignment`; offsets, sums of sizes, are multiples too."""
        return Problem(tuple(Buffer(b.id, b.lower, b.upper, -(-b.size // alignment) * alignment) for b in self.buffers))


@dataclass(frozen=True)
class Placement:
    """An address for each buffer of a problem, and how good it is.

    Attributes:
        problem: What was placed.
        offsets: Bytes from the arena's start, in the order of `problem.buffers`.
        proved: No plan has a lower peak. Set where the peak equals the lower bound or an exact solver says so.
        method: Which method found it.
        seconds: Wall time the search took.
    """

    problem: Problem
    offsets: tuple[int, ...]
    method: str
    seconds: float = 0.0
    proved: bool = False

    def __post_init__(self):
        object.__setattr__(self, "offsets", tuple(int(offset) for offset in self.offsets))
        if len(self.offsets) != len(self.problem):
            raise PlanError(f"{len(self.offsets)} offsets for {len(self.problem)} buffers; need one for each")
        if self.peak == self.lower_bound:
            object.__setattr__(self, "proved", True)

    @cached_property
    def peak(self) -> int:
        """Bytes that the arena needs."""
        return max((o + b.size for o, b in zip(self.offsets, self.problem.buffers, strict=True)), default=0)

    @property
    def lower_bound(self) -> int:
        """The most bytes ever alive at once."""
        return self.problem.lower_bound

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound, as a fraction: 0.0 is optimal."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def read_problem(path: str | Path) -> Problem:
    """Reads the columns `id,lower,upper,size`, in any order. Raises `PlanError` naming file and line."""
    return Problem(tuple(buffer for buffer, _ in _read_rows(path)))


def read_placement(path: str | Path) -> Placement:
    """Reads a plan that `write_placement` wrote. Raises `PlanError` naming file and line."""
    rows = list(_read_rows(path, needs_offset=True))
    return Placement(Problem(tuple(buffer for buffer, _ in rows)), tuple(offset for _, offset in rows), method="file")


def write_placement(placement: Placement, path: str | Path) -> None:
    """Writes `id,lower,upper,size,offset`, one line a buffer."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_COLUMNS, "offset"))
        for b, offset in zip(placement.problem.buffers, placement.offsets, strict=True):
            writer.writerow((b.id, b.lower, b.upper, b.size, offset))


def _read_rows(path, needs_offset=False):
    columns = (*_COLUMNS, "offset") if needs_offset else _COLUMNS
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [name for name in columns if name not in (reader.fieldnames or [])]
        if missing:
            raise PlanError(f"{path}: the first line lacks the columns {missing}; it must name {list(columns)}")
        for row in reader:
            try:
                numbers = [int(row[name]) for name in columns[1:]]
                yield Buffer(row["id"], *numbers[:3]), numbers[3] if needs_offset else 0
            except (TypeError, ValueError) as error:
                raise PlanError(
                    f"{path}, line {reader.line_num}: {error}; need whole numbers in {columns[1:]}"
                ) from None
            except PlanError as error:
                raise PlanError(f"{path}, line {reader.line_num}: {error}") from None
