"""The only loader of the C++ libraries in `csrc/`: finds them, checks that they fit, says what is missing otherwise.

Called by the other modules of `memo_hf.allocator`. Knows nothing of plans, models or training.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from memo_hf.errors import MemoError

ABI_VERSION = 3
ALIGNMENT = 512
NO_PHASE = NO_PLAN = 0xFFFFFFFF

_PACKAGE = Path(__file__).resolve().parents[1]
CPU_LIBRARY = _PACKAGE / "allocator" / "libmemo_cpu.so"
CUDA_LIBRARY = _PACKAGE / "allocator" / "libmemo_cuda.so"

_NUMBERS = {"I": ctypes.c_uint32, "Q": ctypes.c_uint64}


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """The ctypes twin of a struct in csrc/c_api.h: "Q live_bytes" is a uint64_t, "I phase" a uint32_t."""
    typed = [field.split() for field in fields.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": [(field, _NUMBERS[kind]) for kind, field in typed]})


Statistics = _structure(
    "Statistics",
    "Q live_bytes, Q peak_bytes, Q num_allocs, Q num_frees, Q planned_live_bytes, Q planned_bytes, Q dynamic_bytes,"
    "Q arena_bytes, Q num_planned, Q num_missed, Q num_conflicts, Q num_outside",
)
Held = _structure("Held", "Q bytes, Q peak_bytes")
PlannedRequest = _structure("PlannedRequest", "I phase, I stream, Q bytes, Q offset")
Event = _structure("Event", "Q request, Q bytes, I kind, I phase, I stream, I thread")
EVENT_ALLOC, EVENT_FREE, EVENT_MARK, EVENT_STEP = range(4)

_size, _number, _pointer, _text = ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p
_CORE_FUNCTIONS = {
    "memo_core_statistics": (None, [_pointer, ctypes.POINTER(Statistics)]),
    "memo_core_take_peak": (ctypes.c_uint64, [_pointer]),
    "memo_core_add_plan": (
        _text,
        [_pointer, ctypes.POINTER(PlannedRequest), _size, ctypes.c_uint64, ctypes.POINTER(_number)],
    ),
    "memo_core_clear_plans": (None, [_pointer]),
    "memo_core_retire_arena": (None, [_pointer]),
    "memo_core_begin_step": (ctypes.c_int, [_pointer, _number]),
    "memo_core_mark": (None, [_pointer, _number]),
    "memo_core_end_step": (None, [_pointer]),
    "memo_core_misses": (_size, [_pointer, ctypes.POINTER(_number), ctypes.POINTER(ctypes.c_uint64), _size]),
    "memo_core_release_idle": (None, [_pointer]),
    "memo_core_start_recording": (None, [_pointer, _size]),
    "memo_core_stop_recording": (_size, [_pointer]),
    "memo_core_read_events": (None, [_pointer, ctypes.POINTER(Event), _size]),
}
_CPU_FUNCTIONS = _CORE_FUNCTIONS | {
    "memo_cpu_core": (_pointer, []),
    "memo_cpu_install": (None, []),
    "memo_cpu_uninstall": (None, []),
}
_CUDA_FUNCTIONS = _CORE_FUNCTIONS | {
    "memo_cuda_open": (_text, [_text]),
    "memo_cuda_core": (_pointer, [ctypes.c_int]),
    "memo_cuda_held": (None, [ctypes.c_int, ctypes.POINTER(Held)]),
    "memo_cuda_reset_peak_held": (None, [ctypes.c_int]),
    "memo_cuda_try_malloc": (_pointer, [_size, ctypes.c_int, _pointer, ctypes.POINTER(_text)]),
    "memo_cuda_free": (None, [_pointer, _size, ctypes.c_int, _pointer]),
    "memo_cuda_record_stream": (None, [_pointer, _pointer]),
    "memo_cuda_empty_cache": (None, []),
}


class NativeLibraryError(MemoError):
    """A library of csrc/ is missing or was built for another release of torch or memo_hf."""


def _build_line() -> str:
    if (_PACKAGE.parent / "csrc").is_dir():
        return f"pip install --no-build-isolation --no-deps -e {_PACKAGE.parent}"
    return "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall memo_hf"


def _refuse(what: str) -> NativeLibraryError:
    return NativeLibraryError(f"{what}. Build it with a C++ compiler beside the installed torch: {_build_line()}")


def _load(path: Path, functions: dict) -> ctypes.CDLL:
    import torch  # its import loads libc10, against which the library is resolved

    if not path.is_file():
        raise _refuse(f"memo_hf's C++ allocator is not built: there is no {path}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _refuse(f"memo_hf's C++ allocator cannot be loaded beside torch {torch.__version__}: {error}") from error
    library.memo_abi_version.restype = ctypes.c_uint64
    found = library.memo_abi_version()
    if found != ABI_VERSION:
        raise _refuse(f"{path} has interface number {found}; this memo_hf needs {ABI_VERSION}")
    library.memo_torch_version.restype = ctypes.c_char_p
    built_with = library.memo_torch_version().decode()
    if built_with.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise _refuse(f"{path} was built with torch {built_with}; torch {torch.__version__} is installed")
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def load_cpu_library(path: Path = CPU_LIBRARY) -> ctypes.CDLL:
    """The CPU library, with argument and result types declared.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded, or belongs to another release; the message names the
            command that builds it.
    """
    return _load(path, _CPU_FUNCTIONS)


@functools.cache
def load_cuda_library(path: Path = CUDA_LIBRARY, runtime: Path | None = None) -> ctypes.CDLL:
    """The CUDA library, with types declared and the CUDA runtime opened. Does not initialise CUDA.

    Args:
        path: The library.
        runtime: The file of the CUDA runtime; the one that torch has loaded where None.

    Raises:
        NativeLibraryError: as for `load_cpu_library`, and where there is no CUDA runtime.
    """
    library = _load(path, _CUDA_FUNCTIONS)
    runtime = runtime or _loaded_cuda_runtime()
    error = library.memo_cuda_open(str(runtime).encode())
    if error is not None:
        raise NativeLibraryError(f"the CUDA runtime cannot be used: {error.decode()}")
    return library


def _loaded_cuda_runtime() -> Path:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcudart"):
            return path
    raise NativeLibraryError(
        "torch has loaded no CUDA runtime, so its memory cannot be planned on CUDA. Install a CUDA build of torch, or "
        "plan for the CPU"
    )
