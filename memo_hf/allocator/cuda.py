"""Puts the allocator of csrc/ in charge of CUDA memory, and answers torch's memory statistics from it.

Called once per process, before CUDA is used. Torch's own statistics raise under any allocator but its own, and Trainer,
accelerate and DeepSpeed ask for them freely.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

import torch

from memo_hf.allocator import native
from memo_hf.errors import MemoError

_installed: ctypes.CDLL | None = None
_allocator = None  # torch's handle of it, which must live as long as any tensor


def install() -> None:
    """Makes the planned allocator CUDA's. A second call does nothing. It stays for the life of the process.

    Raises:
        NativeLibraryError: the C++ part is not built, or this torch has no CUDA.
        MemoError: CUDA has been used, so that its allocator cannot be changed any more.
    """
    global _installed, _allocator
    if _installed is not None:
        return
    if torch.cuda.is_initialized():
        if "bitsandbytes" in sys.modules:
            raise MemoError(
                "bitsandbytes, which peft imports, uses CUDA as soon as it is imported, and after that CUDA's memory "
                "allocator cannot be changed any more. Call memo_hf.allocator.cuda.install() before importing peft or "
                "transformers.Trainer, which imports peft, or use MemoConfig(allocator='stock')"
            )
        raise MemoError(
            "CUDA has been used in this process, so its memory allocator cannot be changed any more. Move the line "
            "memo_hf.allocator.cuda.install() up, before the first tensor or model on 'cuda' and before Accelerator() "
            "or TrainingArguments(), or use MemoConfig(allocator='stock')"
        )
    settings = " ".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        warnings.warn(
            "expandable_segments:True has no effect with memo_hf's planned allocator, which has no segments; remove it "
            "from PYTORCH_CUDA_ALLOC_CONF, or use MemoConfig(allocator='stock')",
            stacklevel=2,
        )
    library = native.load_cuda_library()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(native.CUDA_LIBRARY), "memo_cuda_malloc", "memo_cuda_free")
    hooks = allocator.allocator()
    hooks.set_record_stream_fn(_address(library.memo_cuda_record_stream))
    hooks.set_reset_fn(_address(library.memo_cuda_empty_cache))
    torch.cuda.memory.change_current_allocator(allocator)
    for name in (memory_stats_as_nested_dict, reset_peak_memory_stats, reset_accumulated_memory_stats):
        for module in (torch.cuda.memory, torch.cuda):
            setattr(module, name.__name__, name)
    _installed, _allocator = library, allocator


def installed_library() -> ctypes.CDLL:
    """The library that serves CUDA. Raises `MemoError` where `install` was not called."""
    if _installed is None:
        raise MemoError(
            "memo_hf's allocator is not in charge of CUDA memory. Call memo_hf.allocator.cuda.install() before CUDA is "
            "first used, or use MemoConfig(allocator='stock')"
        )
    return _installed


def memory_stats_as_nested_dict(device=None) -> dict:
    """What torch.cuda.memory_stats is made of.

    Bytes are as requested; those reserved are what is held from the device: arenas, and CUDA's pool for dynamic blocks.
    torch's large and small pools are not told apart.
    """
    if not torch.cuda.is_initialized():
        return {}
    library, index = installed_library(), _index(device)
    counts, held = native.Statistics(), native.Held()
    library.memo_core_statistics(library.memo_cuda_core(index), ctypes.byref(counts))
    library.memo_cuda_held(index, ctypes.byref(held))
    requested = counts.planned_bytes + counts.dynamic_bytes
    in_use = _figure(counts.live_bytes, counts.peak_bytes, requested)
    reserved = _figure(held.bytes, held.peak_bytes, held.bytes)  # CUDA does not sum up what it gave and took back
    blocks = _figure(counts.num_allocs - counts.num_frees, counts.num_allocs - counts.num_frees, counts.num_allocs)
    nothing = _figure(0, 0, 0)
    figures = {
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": in_use,
        "reserved_bytes": reserved,
        "allocation": blocks,
        "active": blocks,
        "segment": nothing,
        "inactive_split": nothing,
        "inactive_split_bytes": nothing,
    }
    pools = {name: {"all": all_, "large_pool": all_, "small_pool": nothing} for name, all_ in figures.items()}
    zeros = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    plain = dict.fromkeys(zeros, 0) | {"max_split_size": -1}
    return pools | {"oversize_allocations": nothing, "oversize_segments": nothing} | plain


def reset_peak_memory_stats(device=None) -> None:
    """torch.cuda.reset_peak_memory_stats: the peaks start again from what is there now."""
    library, index = installed_library(), _index(device)
    library.memo_core_take_peak(library.memo_cuda_core(index))
    library.memo_cuda_reset_peak_held(index)


def reset_accumulated_memory_stats(device=None) -> None:
    """torch.cuda.reset_accumulated_memory_stats: nothing to do, since sums here are of the whole process."""


def _index(device) -> int:
    return torch.cuda._utils._get_device_index(device, optional=True)


def _figure(current: int, peak: int, allocated: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": allocated - current}


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value
