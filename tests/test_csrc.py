"""Builds and runs the C++ test programs under the sanitizers, and holds the CUDA part against CUDA's own compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CORE = ["core.cpp", "arena.cpp"]
CUDA = [*CORE, "c_api.cpp", "cuda_allocator.cpp", "cuda_runtime.cpp"]
STRICT = ["-std=c++20", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", '-DMEMO_TORCH_VERSION="test"']
SANITIZERS = ["address,undefined", "thread"]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")


def build(output, sources, *flags, compiler="g++"):
    command = [compiler, *flags, *(str(CSRC / source) for source in sources), "-o", str(output), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def run(*command):
    """Runs a test program; a sanitizer's report or a failed check ends it with an error."""
    # The allocator's devices and the stand-in's events live as long as the process, on purpose: nothing to report.
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    source = (CSRC / "tests" / f"{Path(command[0]).name}.cpp").read_text()
    assert done.stdout.count("passed") == source.count("RUN(") > 0


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_core(tmp_path, sanitizer):
    flags = [*STRICT, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    run(build(tmp_path / "core_test", ["tests/core_test.cpp", *CORE], *flags))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_cuda_on_a_stand_in_runtime(tmp_path, sanitizer):
    flags = [*STRICT, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    fake = build(tmp_path / "fake_cudart.so", ["tests/fake_cudart.cpp"], *flags, "-fPIC", "-shared")
    run(build(tmp_path / "cuda_test", ["tests/cuda_test.cpp", *CUDA], *flags), fake)


@needs_nvcc
def test_cuda_built_with_nvcc(tmp_path):
    flags = ["-std=c++20", "-O1", "-Xcompiler", "-Wall,-Wextra,-Werror", '-DMEMO_TORCH_VERSION="test"']
    fake = build(tmp_path / "fake_cudart.so", ["tests/fake_cudart.cpp"], *STRICT, "-fPIC", "-shared")
    run(build(tmp_path / "cuda_test", ["tests/cuda_test.cpp", *CUDA], *flags, compiler="nvcc"), fake)


@needs_nvcc
def test_cuda_functions_are_declared_as_in_cudas_header(tmp_path):
    build(tmp_path / "signatures.o", ["tests/cuda_signatures.cpp"], "-std=c++20", "-c", compiler="nvcc")
