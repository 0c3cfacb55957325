"""The package as it is installed: with the C++ part where a compiler is there, pure Python with one line where not."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memo_hf

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"memo_hf/allocator/libmemo_cpu.so", "memo_hf/allocator/libmemo_cuda.so"}


def build_wheel(folder, **environment):
    """Names of the files in a wheel made from a copy of the source, and what the build printed."""
    source = folder / "source"
    source.mkdir()
    for name in ("memo_hf", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "README.md").write_text("The readme.\n")
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--disable-pip-version-check", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-index", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob(f"memo_hf-{memo_hf.__version__}-*.whl")
    return set(zipfile.ZipFile(wheel).namelist()), done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_has_both_libraries(tmp_path):
    files, printed = build_wheel(tmp_path)
    assert files >= LIBRARIES | {"memo_hf/__init__.py", "memo_hf/allocator/native.py"}
    assert not any(name.startswith(("tests/", "csrc/")) for name in files)
    assert "without its C++ allocator" not in printed


@pytest.mark.slow
def test_without_a_compiler_it_is_pure_python_and_says_so(tmp_path):
    files, printed = build_wheel(tmp_path, CC="/no/compiler", CXX="/no/compiler")
    assert "memo_hf/allocator/native.py" in files and not files & LIBRARIES
    assert "installed without its C++ allocator" in printed and "pip install --no-build-isolation" in printed


@pytest.mark.slow
def test_without_torch_it_is_pure_python_and_says_so(tmp_path):
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    files, printed = build_wheel(tmp_path, PYTHONPATH=str(hide))
    assert not files & LIBRARIES
    assert printed.count("installed without its C++ allocator (torch is not here while building)") == 1
