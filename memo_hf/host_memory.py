"""How much host memory this rank may use for swapped activations: read from the cgroup and the machine."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 0.9  # A tenth of what is free stays for the data loader, the page cache and everybody else.


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could still take: the least of what the machine and its cgroup have left.

    Args:
        root: where /proc and /sys are looked up; a test passes a folder of its own.
    """
    free = [_meminfo(root / "proc/meminfo")]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        text = _read(root / limit)
        if text and text != "max":
            free.append(int(text) - int(_read(root / used) or 0))
    return max(0, min(free))


def host_memory_for_this_rank(node_budget_bytes: int | None, root: Path = Path("/")) -> int:
    """This rank's share of the node's budget, or of nine tenths of what is free where no budget is set."""
    budget = node_budget_bytes if node_budget_bytes is not None else int(_SHARE * free_host_bytes(root))
    return budget // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _read(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no MemAvailable line; set MemoConfig(host_memory=...)")
