"""How much memory there is: the host's, by cgroup and machine, and what a rank may take of it.

Called by the session before it plans and by the command line. All paths hang below a root, so that a test can point it
at files of its own. Knows no torch: free device memory is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memo_hf.errors import HostMemoryError
from memo_hf.units import format_bytes

# The rest, a tenth as MemoConfig.host_memory says, is left to everything that is not planned.
USABLE_SHARE = 0.9
# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Free host memory and where the number comes from ("cgroup /sys/fs/cgroup/x: 3.10 of 4.00 GiB free")."""

    free_bytes: int
    source: str


def read_host_memory(root: str | Path = "/") -> HostMemory:
    """The least of what the machine has free and what each cgroup above this process still allows.

    Args:
        root: where `proc` and `sys` are; another folder for tests.

    Raises:
        HostMemoryError: neither can be read (not a Linux machine); set host_memory.
    """
    root = Path(root)
    found = []
    meminfo = _read_fields(root / "proc/meminfo")
    if "MemAvailable" in meminfo:
        free = meminfo["MemAvailable"] * 1024
        found.append(HostMemory(free_bytes=free, source=f"machine: {format_bytes(free)} free"))
    for folder, limit, used in _cgroups(root):
        free = max(0, limit - used)
        source = f"cgroup {folder}: {format_bytes(free)} of {format_bytes(limit)} free"
        found.append(HostMemory(free_bytes=free, source=source))
    if not found:
        raise HostMemoryError(
            f"neither {root / 'proc/meminfo'} nor a cgroup says how much host memory is free; set host_memory"
        )
    return min(found, key=lambda memory: memory.free_bytes)


def host_budget_bytes(
    host_memory_bytes: int | None = None, *, local_ranks: int = 1, other_bytes: int = 0, root: str | Path = "/"
) -> int:
    """Host bytes that one rank may use for swapped activations.

    Args:
        host_memory_bytes: of this node, as the user set it; None: nine tenths of what is free.
        local_ranks: ranks of this node, which share it.
        other_bytes: of this node, that others will still take (an offloaded optimizer).
        root: as for `read_host_memory`.

    Raises:
        HostMemoryError: nothing is left.
    """
    if local_ranks < 1:
        raise ValueError(f"local_ranks is {local_ranks}; it must be at least 1")
    if host_memory_bytes is None:
        memory = read_host_memory(root)
        total, source = int(memory.free_bytes * USABLE_SHARE), memory.source
    else:
        total, source = host_memory_bytes, f"host_memory: {format_bytes(host_memory_bytes)}"
    left = total - other_bytes
    if left <= 0:
        raise HostMemoryError(
            f"no host memory is left for activations: {format_bytes(total)} may be used ({source}) and"
            f" {format_bytes(other_bytes)} are declared for others; move the optimizer to the device or use a larger"
            " host"
        )
    return left // local_ranks


def device_budget_bytes(free_bytes: int, *, total_bytes: int, margin: float = 0.05) -> int:
    """Device bytes that a step may hold: what is free less a margin of the whole, for fragments and small tensors."""
    return max(0, int(free_bytes - margin * total_bytes))


def _cgroups(root: Path):
    """(folder, limit, used) of this process's cgroup and of those above it that have a limit, version 2 or 1."""
    own = {}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own[controllers] = path.strip("/")
    except (OSError, ValueError):
        pass
    hierarchies = [(root / "sys/fs/cgroup", own.get("", ""), "memory.max", "memory.current", "inactive_file")]
    v1 = next((path for controllers, path in own.items() if "memory" in controllers.split(",")), "")
    hierarchies.append(
        (root / "sys/fs/cgroup/memory", v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    for base, path, limit_name, used_name, reclaimable_name in hierarchies:
        folder = base / path if (base / path).is_dir() else base  # inside a container the path is the host's
        while True:
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and limit < _NO_LIMIT and used is not None:
                # Cached file pages count as used but are given back under pressure.
                cached = _read_fields(folder / "memory.stat").get(reclaimable_name, 0)
                yield folder, limit, max(0, used - cached)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_fields(path: Path) -> dict[str, int]:
    """`name: value unit` or `name value` lines."""
    fields = {}
    try:
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                fields[words[0]] = int(words[1])
    except OSError:
        pass
    return fields
