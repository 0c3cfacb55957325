"""Reads a PyTorch memory snapshot (`torch.cuda.memory._dump_snapshot`) as a trace, without torch and without trust.

Called by `memo-hf place --snapshot`. These files are pickles, and a pickle can run code when it is read; a snapshot
needs only dicts, lists, text and numbers, so anything else is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from memo_hf.errors import PlanError
from memo_hf.planner.trace import Event, Trace


class _DataOnly(pickle.Unpickler):
    def find_class(self, module, name):
        raise PlanError(
            f"the snapshot wants {module}.{name}, which could run code; a PyTorch memory snapshot holds plain data "
            "only. Do not open this file"
        )

    def persistent_load(self, pid):
        raise PlanError(f"the snapshot refers to an object outside it ({pid!r}); a PyTorch memory snapshot does not")


def read_snapshot(path: str | Path, device: int | None = None) -> tuple[Trace, int]:
    """The allocations and frees that the snapshot recorded, after those that were there before, and PyTorch's peak.

    Args:
        path: A file written by `torch.cuda.memory._dump_snapshot`.
        device: Which GPU's. Not set: the one with the most events.

    Returns:
        The trace, and the most bytes that PyTorch's allocator had reserved while it was recorded.

    Raises:
        PlanError: the file holds more than plain data, is no snapshot, or has no history for the device.
    """
    try:
        with open(path, "rb") as file:
            data = _DataOnly(file).load()
        histories, segments = data["device_traces"], data["segments"]
        if device is None:
            device = max(range(len(histories)), key=lambda index: len(histories[index]))
        history = histories[device]
        segments = [segment for segment in segments if segment.get("device", device) == device]
        return _to_trace(history, segments), _peak_reserved(history, segments)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise PlanError(
            f"{path} is not a memory snapshot of device {device} ({type(error).__name__}: {error}); "
            "write one with torch.cuda.memory._dump_snapshot"
        ) from None


def _peak_reserved(history, segments):
    """From the segments at the end, backwards through those that were made and given back."""
    grows = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    reserved = peak = sum(segment["total_size"] for segment in segments)
    for entry in reversed(history):
        reserved -= grows.get(entry["action"], 0) * entry["size"]
        peak = max(peak, reserved)
    return peak


def _to_trace(history, segments):
    live: dict[int, int] = {}  # address -> id
    base: list[Event] = []  # what was there before the history begins: known by its free, or by being there at the end
    events: list[Event] = []
    num_requests = 0

    def malloc(where, address, size, stream):
        nonlocal num_requests
        where.append(Event("malloc", num_requests, size, "", stream, 0))
        num_requests += 1
        return num_requests - 1

    for entry in history:
        address, size, stream = entry["addr"], entry["size"], entry["stream"]
        if entry["action"] == "alloc":
            live[address] = malloc(events, address, size, stream)
        elif entry["action"] == "free_completed":
            number = live.pop(address, None)
            if number is None:
                number = malloc(base, address, size, stream)
            events.append(Event("free", number, 0, "", stream, 0))
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"].startswith("active") and block["address"] not in live:
                malloc(base, block["address"], block["size"], segment["stream"])
    if not history:
        raise PlanError("no history was recorded; call torch.cuda.memory._record_memory_history before the step")
    return Trace((*base, *events), repeats=False)
