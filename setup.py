"""Builds the C++ libraries of csrc/ where a compiler and torch are found. All else is in pyproject.toml.

Without them the package installs as pure Python, with the stock allocator, and one line says so.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
MENDING = "to add it: pip install torch, a C++ compiler, then pip install --no-build-isolation memo_hf"


CORE = ["csrc/core.cpp", "csrc/arena.cpp", "csrc/c_api.cpp"]
LIBRARIES = {
    "memo_hf.allocator.libmemo_cpu": ["csrc/cpu_allocator.cpp", *CORE],
    "memo_hf.allocator.libmemo_cuda": [
        "csrc/cuda_allocator.cpp",
        "csrc/cuda_runtime.cpp",
        "csrc/torch_error.cpp",
        *CORE,
    ],
}


def library(name, sources, torch_path):
    version = {}
    exec((torch_path / "version.py").read_text(), version)
    release = version["__version__"].split("+")[0]
    return Extension(
        name,
        sources=sources,
        depends=[str(header.relative_to(HERE)) for header in HERE.glob("csrc/*.h*")],
        define_macros=[("MEMO_TORCH_VERSION", f'"{release}"')],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", f"-isystem{torch_path / 'include'}"],
        library_dirs=[str(torch_path / "lib")],
        libraries=["c10", "dl"],
        language="c++",
        optional=True,
    )


class OptionalBuild(build_ext):
    """Plain shared libraries for ctypes, not Python modules; a failure leaves them out and is not an error.

    `--werror` is for the tests: it builds everything again, with every warning an error, and a failure is one.
    """

    user_options = [*build_ext.user_options, ("werror", None, "build all again; warnings and failures are errors")]
    boolean_options = [*build_ext.boolean_options, "werror"]

    def initialize_options(self):
        super().initialize_options()
        self.werror = False

    def finalize_options(self):
        super().finalize_options()
        if self.werror:
            self.force = True
            for extension in self.extensions:
                extension.extra_compile_args += ["-Wall", "-Wextra", "-Werror"]

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            if self.werror:
                raise
            print(f"memo_hf: installed without its C++ allocator ({error}); {MENDING}")

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext):
        return []


def extensions():
    spec = importlib.util.find_spec("torch")
    if spec is None:
        if not {"egg_info", "dist_info"} & set(sys.argv):  # once, not at each step of an installation
            print(f"memo_hf: installed without its C++ allocator (torch is not here while building); {MENDING}")
        return []
    return [library(name, sources, Path(spec.origin).parent) for name, sources in LIBRARIES.items()]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
