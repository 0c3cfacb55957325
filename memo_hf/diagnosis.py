"""What memo_hf finds on this machine: versions, devices, link, host memory, kernels, and one training step, tried.

Called by `memo-hf doctor`. Each part answers in rows, `name` and `found` in words, with numbers beside them where there
are any. Nothing is guessed: what cannot be measured here is said to be so. Torch is imported where it is used, since it
may be what is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from memo_hf.errors import HostMemoryError
from memo_hf.planner.budgets import host_budget_bytes, read_host_memory
from memo_hf.units import format_bytes

_OPTIONAL = {
    "trl": "SFTTrainer, DPOTrainer",
    "deepspeed": "ZeRO, sequence parallelism",
    "flash-attn": "FlashAttention 2 beside torch's own",
    "flash-attn-4": "FlashAttention 4",
    "kernels": "flash kernels from the hub",
    "bitsandbytes": "QLoRA",
    "matplotlib": "plots, reports as HTML",
    "tensorboard": "metrics of a run",
}
_COPY_BYTES = 256 * 2**20
_PIN_BYTES = 64 * 2**20
_WORST_ERROR = 1e-4


class _Missing(list):
    """What is missing, as dictionaries: `what`, `mend` (a line to type or a setting), `needed` to train."""

    def add(self, what: str, mend: str, needed: bool = False) -> None:
        self.append({"what": what, "mend": mend, "needed": needed})


def examine() -> dict:
    """Everything, as plain values: `versions`, `devices`, `link`, `host`, `attention`, `allocator`, `step`, `missing`
    and `can_train`."""
    missing = _Missing()
    found = {"versions": _versions(missing), "host": _host(missing)}
    parts = {"devices": _devices, "link": _link, "attention": _attention, "allocator": _allocator, "step": _step}
    complete = not any(item["needed"] for item in missing)
    for name, part in parts.items():
        found[name] = part(missing) if complete else [_row("-", "not looked at: something needed is missing")]
    return {**found, "missing": list(missing), "can_train": not any(item["needed"] for item in missing)}


def requirements() -> list[Requirement]:
    """What memo_hf cannot do without: of the installed package, or of the checkout that runs."""
    try:
        lines = importlib.metadata.requires("memo-hf") or []
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    return [needed for line in lines if not (needed := Requirement(line)).marker]


def _row(name: str, found: str, **numbers) -> dict:
    return {"name": name, "found": found, **numbers}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(missing: _Missing) -> list[dict]:
    rows = [{"name": "python", "version": platform.python_version(), "role": "needed", "problem": ""}]
    for needed in requirements():
        version, problem = _version(needed.name), ""
        if version is None:
            problem = "not installed"
        elif not needed.specifier.contains(version, prereleases=True):
            problem = f"{needed.specifier} is needed"
        if problem:
            missing.add(f"{needed.name}: {problem}", f"pip install '{needed}'", needed=True)
        rows.append({"name": needed.name, "version": version, "role": "needed", "problem": problem})
    for name, role in _OPTIONAL.items():
        rows.append({"name": name, "version": _version(name), "role": f"optional: {role}", "problem": ""})
    if _version("matplotlib") is None:
        missing.add("matplotlib, for plots", "pip install matplotlib")
    return rows


def _host(missing: _Missing) -> list[dict]:
    rows = []
    try:
        memory = read_host_memory()
        budget = host_budget_bytes()
        rows.append(_row("free", f"{format_bytes(memory.free_bytes)} ({memory.source})", bytes=memory.free_bytes))
        rows.append(_row("budget", f"{format_bytes(budget)} for swapped activations of this node", bytes=budget))
    except HostMemoryError as error:
        rows.append(_row("free", str(error)))
        missing.add("the size of the host memory", "MemoConfig(host_memory='64GiB')", needed=True)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    rows.append(_row("lockable", "no limit" if unlimited else f"{format_bytes(limit)} (ulimit -l)"))
    return rows


def _devices(missing: _Missing) -> list[dict]:
    import torch

    counts = {"core": len(os.sched_getaffinity(0)), "thread": torch.get_num_threads()}
    cores, threads = (f"{count} {what}{'s' if count != 1 else ''}" for what, count in counts.items())
    rows = [_row("cpu", f"{cores}, {threads} in torch")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        about = f"compute capability {properties.major}.{properties.minor}"
        text = f"{properties.name}, {about}, {format_bytes(free)} of {format_bytes(total)} free"
        rows.append(_row(f"cuda:{index}", text, free_bytes=free, total_bytes=total))
    if not torch.cuda.device_count():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        rows.append(_row("cuda", f"no GPU is seen; torch is {built}"))
        if torch.version.cuda is None and shutil.which("nvidia-smi"):
            missing.add("a torch for the GPU that is here", "pip install --force-reinstall torch  # a CUDA build")
    return rows


def _link(missing: _Missing) -> list[dict]:
    import torch

    if not torch.cuda.is_available():
        return [_row("bandwidth", "not measurable: there is no GPU, and host and device are one memory")]
    rows = [_pinning(missing)]
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=rows[0]["pinned"])
    for name, target, source in (("to host", host, device), ("to device", device, host)):
        rate = _COPY_BYTES / _copy_seconds(target, source)
        rows.append(_row(name, f"{rate / 1e9:.1f} GB/s", bytes_per_second=rate))
    return rows


def _copy_seconds(target, source) -> float:
    """The quickest of five copies, after one that warms up."""
    import torch

    seconds = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds[1:])


def _pinning(missing: _Missing) -> dict:
    """Whether host memory can be locked the way the swap engine does."""
    import torch

    from memo_hf.errors import MemoError
    from memo_hf.swap.cuda_streams import CudaStreams

    streams, buffer = CudaStreams(torch.device("cuda", 0)), torch.empty(_PIN_BYTES, dtype=torch.uint8, device="cpu")
    try:
        streams.pin(buffer)
    except MemoError as error:
        missing.add(f"pinned host memory, without which copies do not overlap: {error}", "ulimit -l unlimited")
        return _row("pinning", f"fails: {error}", pinned=False)
    streams.unpin(buffer)
    return _row("pinning", f"works ({format_bytes(_PIN_BYTES)} tried)", pinned=True)


def _attention(missing: _Missing) -> list[dict]:
    import torch
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

    on_cpu = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    rows = [_row("torch, CPU", "flash kernel" if on_cpu else "no flash kernel: blocks in plain torch are used")]
    if torch.cuda.is_available():
        built = torch.backends.cuda.is_flash_attention_available()
        capable = torch.cuda.get_device_capability() >= (8, 0)
        rows.append(_row("torch, CUDA", "flash kernel" if built and capable else "no flash kernel for this GPU"))
        if not built:
            missing.add("a torch with its flash kernel", "pip install --force-reinstall torch  # a CUDA build")
    for name, is_there in (
        ("FlashAttention 2", is_flash_attn_2_available()),
        ("FlashAttention 3", is_flash_attn_3_available()),
        ("FlashAttention 4", is_flash_attn_4_available()),
    ):
        rows.append(_row(name, "usable" if is_there else "not usable here"))
    return rows


def _allocator(missing: _Missing) -> list[dict]:
    import torch

    from memo_hf.allocator import native

    rows = []
    for name, load in (("CPU library", native.load_cpu_library), ("CUDA library", native.load_cuda_library)):
        if name == "CUDA library" and torch.version.cuda is None:
            built = "built" if native.CUDA_LIBRARY.is_file() else "not built"
            rows.append(_row(name, f"{built}; this torch has no CUDA to load it beside"))
            continue
        try:
            load()
            rows.append(_row(name, "built, loads"))
        except native.NativeLibraryError as error:
            rows.append(_row(name, f"does not load: {error}"))
            what = f"the {name} of MemoConfig(allocator='planned')"
            if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
                what += ", and a C++ compiler to build it with"
            missing.add(what, str(error).rpartition("Build it with a C++ compiler beside the installed torch: ")[2])
    return rows


def _step(missing: _Missing) -> list[dict]:
    """One step of a tiny model, its gradients held against those of the same step without memo_hf."""
    import torch

    rows = []
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            error, swapped = try_one_step(kind)
            text = f"{format_bytes(swapped)} swapped; gradients differ from the plain step's by {error:.0e}"
            problem = "" if swapped and error <= _WORST_ERROR else text
        except Exception as failure:  # whatever it is, the doctor's task is to say so and go on
            text = problem = f"{type(failure).__name__}: {failure}"
            error, swapped = None, 0
        rows.append(_row(kind, text if not problem else f"FAILS: {text}", error=error, swapped_bytes=swapped))
        if problem:
            missing.add(f"a training step on {kind}: {problem}", "report it with the output of memo-hf doctor", True)
    return rows


def try_one_step(device: str) -> tuple[float, int]:
    """The worst relative error of any gradient of one memo_hf step on `device`, and the bytes that it swapped."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from memo_hf.api import disable, enable
    from memo_hf.config import MemoConfig

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)).to(device).train()
        ids = torch.randint(0, 64, (1, 96), device=device)
    found = []
    for is_on in (False, True):
        session = enable(model, MemoConfig(swap_fraction=0.5, chunk_size=32, unswapped_layers=1)) if is_on else None
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    swapped = session.stats.swapped_bytes
    disable(model)
    plain, ours = found
    worst = max(((ours[n] - plain[n]).norm() / plain[n].norm().clamp_min(1e-30)).item() for n in plain)
    return worst, swapped
