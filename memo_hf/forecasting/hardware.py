"""Devices in numbers: memory, arithmetic, bandwidths. Called by `memory`, `speed` and the command line.

Peaks are the vendors' dense figures. The achieved fractions are assumptions, calibrated on published runs (which ones,
docs/forecast.md says); `Device.with_rates` replaces them by measured ones.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass

from memo_hf.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its share of the node.

    Attributes:
        memory_bytes: as the driver reports it.
        reserve_bytes: of it, for the context, communication buffers, and the allocator's rounding.
        flops: dense peak per second in the training dtype.
        gemm_efficiency, attention_forward_efficiency, attention_backward_efficiency: achieved fractions of `flops`.
        memory_bytes_per_second: achieved bandwidth of element-wise kernels.
        link_bytes_per_second: to and from host memory, each way, while every device of the node copies.
        peer_bytes_per_second: between the devices of a node, each way.
        network_bytes_per_second: for each device between nodes, each way.
        chunk_seconds: what launching one chunk of project or finish takes at least.
        flash_workspace: the attention's backward holds an fp32 sum of dq, and with grouped keys full-width dk and dv.
        host_bytes_per_device: host memory that a node offers for each of its devices, where none is given.
    """

    name: str
    memory_bytes: float
    reserve_bytes: float = 2 * GIB
    flops: float
    gemm_efficiency: float = 0.65
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    peer_bytes_per_second: float
    network_bytes_per_second: float = 50e9
    chunk_seconds: float = 1e-3
    flash_workspace: bool = True
    host_bytes_per_device: float = 128 * GIB

    def __post_init__(self):
        for field, value in vars(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
                raise ConfigError(f"device {self.name!r}: {field} is {value}; it must not be negative")

    @property
    def budget_bytes(self) -> float:
        return max(0.0, self.memory_bytes - self.reserve_bytes)

    def with_rates(self, **rates: float) -> Device:
        """This device with measured numbers in place of assumed ones. Raises `ConfigError` for an unknown field."""
        unknown = sorted(set(rates) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise ConfigError(f"device {self.name!r} has no field {unknown}")
        return dataclasses.replace(self, **rates)


_AMPERE_RATES = {"attention_forward_efficiency": 0.65, "attention_backward_efficiency": 0.60}
_AMPERE = _AMPERE_RATES | {"flops": 312e12, "network_bytes_per_second": 25e9}
_HOPPER = {
    "attention_forward_efficiency": 0.55,
    "attention_backward_efficiency": 0.48,
    "flops": 989e12,
    "link_bytes_per_second": 45e9,
    "peer_bytes_per_second": 360e9,
    "host_bytes_per_device": 240 * GIB,
}
# On PCIe alone: the exchange between them takes the same way as copies to the host, and a node of eight has 200 Gb/s.
_CARD = _AMPERE_RATES | {
    "link_bytes_per_second": 20e9,
    "peer_bytes_per_second": 20e9,
    "network_bytes_per_second": 3e9,
    "host_bytes_per_device": 64 * GIB,
}
# Their peak, with sums in fp32, is half of what their tensor cores do in fp16, so they come closer to it.
_GEFORCE = _CARD | {
    "attention_forward_efficiency": 0.80,
    "attention_backward_efficiency": 0.70,
    "reserve_bytes": 1 * GIB,
}
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            # The matrix products of the paper's runs have the exchange of tensor parallelism in them.
            name="a800", memory_bytes=79.3 * GIB, gemm_efficiency=0.53, memory_bytes_per_second=1.6e12,
            link_bytes_per_second=12.5e9,
            peer_bytes_per_second=160e9, host_bytes_per_device=256 * GIB, **_AMPERE,
        ),
        Device(
            name="a100-40", memory_bytes=39.4 * GIB, memory_bytes_per_second=1.25e12, link_bytes_per_second=20e9,
            peer_bytes_per_second=240e9, **_AMPERE,
        ),
        Device(
            name="a100-80", memory_bytes=79.3 * GIB, memory_bytes_per_second=1.6e12, link_bytes_per_second=20e9,
            peer_bytes_per_second=240e9, **_AMPERE,
        ),
        Device(
            name="h100", memory_bytes=79.2 * GIB, memory_bytes_per_second=2.7e12, **_HOPPER,
        ),
        Device(
            name="h200", memory_bytes=139.8 * GIB, memory_bytes_per_second=3.9e12, **_HOPPER,
        ),
        Device(
            name="b200", memory_bytes=178.4 * GIB, flops=2250e12, attention_forward_efficiency=0.50,
            attention_backward_efficiency=0.42, memory_bytes_per_second=6.4e12, link_bytes_per_second=50e9,
            peer_bytes_per_second=720e9, host_bytes_per_device=256 * GIB,
        ),
        Device(name="3090", memory_bytes=23.5 * GIB, flops=71e12, memory_bytes_per_second=0.79e12, **_GEFORCE),
        Device(name="4090", memory_bytes=23.5 * GIB, flops=165e12, memory_bytes_per_second=0.85e12, **_GEFORCE),
        Device(
            name="5090", memory_bytes=31.3 * GIB, flops=209e12, memory_bytes_per_second=1.5e12,
            **_GEFORCE | {"link_bytes_per_second": 45e9, "peer_bytes_per_second": 45e9},
        ),
        Device(name="a6000", memory_bytes=47.5 * GIB, flops=154e12, memory_bytes_per_second=0.65e12, **_CARD),
        Device(
            name="l4", memory_bytes=22.0 * GIB, reserve_bytes=1 * GIB, flops=121e12, memory_bytes_per_second=0.25e12,
            **_CARD,
        ),
        Device(
            name="l40s", memory_bytes=44.4 * GIB, flops=362e12, memory_bytes_per_second=0.73e12,
            **_CARD | {"host_bytes_per_device": 128 * GIB},
        ),
    )
}  # fmt: skip


def this_cpu(memory_bytes: float) -> Device:
    """This machine's CPU as the device, from its number of cores and what a server's core does in fp32, roughly.

    CPUs differ more than GPUs do: calibrate on one measured length before trusting seconds (`speed.calibrate`).

    Args:
        memory_bytes: memory that the "device" half of a run may take.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Device(
        name="cpu",
        memory_bytes=memory_bytes,
        reserve_bytes=0.0,
        flops=80e9 * cores,
        gemm_efficiency=0.75,
        attention_forward_efficiency=0.5,
        attention_backward_efficiency=0.7,
        chunk_seconds=5e-4,
        memory_bytes_per_second=4e9 * cores,
        link_bytes_per_second=6e9,
        peer_bytes_per_second=3e9,
        network_bytes_per_second=3e9,
        flash_workspace=False,
        host_bytes_per_device=memory_bytes,
    )


# Names without what is between letters and digits; torch calls only one of these by its memory as well.
_BARE = {re.sub("[^a-z0-9]", "", name): name for name in DEVICES} | {"h10080": "h100"}


def find_device(name: str) -> Device:
    """A device of the table by its name, as people write it ("RTX 4090") or as torch does ("NVIDIA A100-SXM4-80GB").

    Raises `ConfigError` that lists the names.
    """
    key = re.sub(r"nvidia|geforce|tesla|rtx|sxm[0-9]?|hbm[0-9]e?|gb\b|[^a-z0-9]", "", name.lower())
    if key not in _BARE:
        # Names that are spelt alike are other devices: only one that goes on, or ends early, can be what was meant.
        near = [repr(known) for bare, known in _BARE.items() if key and (bare.startswith(key) or key.startswith(bare))]
        asked = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"device {name!r} is unknown{asked}; choose from"
            f" {sorted([*DEVICES, 'cpu'])}, or start from the one that is most alike and give numbers (--device-memory,"
            " --flops, --link-bandwidth)"
        )
    return DEVICES[_BARE[key]]
