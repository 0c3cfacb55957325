"""The only loader of the C++ libraries in `csrc/`: finds them, checks that they fit, says what is missing otherwise.

Called by the other modules of `memo_hf.allocator`. Knows nothing of plans, models or training.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from memo_hf.errors import MemoError

ABI_VERSION = 1

_PACKAGE = Path(__file__).resolve().parents[1]
_CPU_LIBRARY = _PACKAGE / "allocator" / "libmemo_cpu.so"


class Statistics(ctypes.Structure):
    """`memo_statistics` of csrc/c_api.h."""

    _fields_ = [
        ("live_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("num_allocs", ctypes.c_uint64),
        ("num_frees", ctypes.c_uint64),
    ]


class NativeLibraryError(MemoError):
    """A library of csrc/ is missing or was built for another release of torch or memo_hf."""


def _build_line() -> str:
    if (_PACKAGE.parent / "csrc").is_dir():
        return f"pip install --no-build-isolation --no-deps -e {_PACKAGE.parent}"
    return "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall memo_hf"


def _refuse(what: str) -> NativeLibraryError:
    return NativeLibraryError(f"{what}. Build it with a C++ compiler beside the installed torch: {_build_line()}")


@functools.cache
def load_cpu_library(path: Path = _CPU_LIBRARY) -> ctypes.CDLL:
    """The CPU library, with argument and result types declared.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded, or belongs to another release; the message names the
            command that builds it.
    """
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

    library.memo_cpu_install.restype = None
    library.memo_cpu_uninstall.restype = None
    library.memo_cpu_statistics.argtypes = [ctypes.POINTER(Statistics)]
    library.memo_cpu_statistics.restype = None
    library.memo_cpu_take_peak.restype = ctypes.c_uint64
    return library
