"""`Setup`: everything that decides a run, in one frozen object. Read by the rest of the forecast; computes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from memo_hf.errors import ConfigError
from memo_hf.forecasting.activations import Training
from memo_hf.forecasting.hardware import Device
from memo_hf.forecasting.shapes import LayerKind, ModelShape
from memo_hf.planner.budgets import USABLE_SHARE
from memo_hf.planner.chunks import default_chunk_tokens

# Bytes of optimizer state per trained parameter, beside the fp32 master weights.
OPTIMIZERS = {"adamw": 8, "adamw-8bit": 2, "sgd-momentum": 4, "sgd": 0}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run.

    Attributes:
        seq_len, batch: tokens of a sequence, and sequences, that one data-parallel group works on at once.
        training: full or LoRA, element size.
        master_weights: fp32 weights beside the 16-bit ones, as FSDP, DeepSpeed and Megatron keep them.
        optimizer: a name in `OPTIMIZERS`; `optimizer_device` and `weights_device` are "device" or "host".
        gpus: of the run; `sequence_parallel` of them share a sequence (Ulysses), `shards` share weights, gradients and
            optimizer (FSDP, ZeRO-3). The rest is data parallel.
        chunk_tokens: tokens that project and finish work on at once; None: `default_chunk_tokens`.
        num_kept: the last layers, whose activations stay on the device; none where that is what it takes to fit.
        chunked_loss: the logits never exist in full.
        accumulates: gradients of earlier passes are there during forward (gradient accumulation).
        host_bytes: host memory of one node for activations, and for optimizer and weights where they are kept there;
            None: nine tenths of what a node of such devices usually has (`node_host_bytes`).
        swap_fraction, qkv: by hand, or None.
        is_one_memory: device and host are the same memory, as on a CPU without a limit of its own: nothing is chosen.
        device: the device.
    """

    model: ModelShape
    device: Device
    seq_len: int
    batch: int = 1
    training: Training = field(default_factory=Training)
    master_weights: bool = True
    optimizer: str = "adamw"
    optimizer_device: str = "device"
    weights_device: str = "device"
    gpus: int = 1
    gpus_per_node: int = 8
    sequence_parallel: int = 1
    shards: int = 1
    chunk_tokens: int | None = None
    num_kept: int = 2
    chunked_loss: bool = True
    accumulates: bool = False
    host_bytes: float | None = None
    swap_fraction: float | None = None
    qkv: str | None = None
    is_one_memory: bool = False

    def __post_init__(self):
        for name in ("seq_len", "batch", "gpus", "gpus_per_node", "sequence_parallel", "shards"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name, least in (("chunk_tokens", 1), ("num_kept", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                written = {"chunk_tokens": "chunk_size", "num_kept": "unswapped_layers"}[name]
                raise ConfigError(f"{written} is {value!r}; it must be a whole number of at least {least}")
        for name in ("sequence_parallel", "shards"):
            if self.gpus % getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)}, which does not divide the {self.gpus} GPUs")
        if self.model.heads % self.sequence_parallel:
            raise ConfigError(
                f"sequence_parallel is {self.sequence_parallel}, which does not divide the {self.model.heads} attention"
                " heads"
            )
        if self.seq_len < self.sequence_parallel:
            raise ConfigError(
                f"seq_len is {self.seq_len}, fewer tokens than the {self.sequence_parallel} ranks that share it"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}; choose from {sorted(OPTIMIZERS)}")
        for name in ("optimizer_device", "weights_device"):
            if getattr(self, name) not in ("device", "host"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be 'device' or 'host'")
        if self.weights_device == "host" and self.shards == 1 and self.gpus > 1:
            raise ConfigError(
                "weights on the host need shards > 1 with several GPUs, or each rank keeps a copy of them"
            )

    def replace(self, **changes) -> Setup:
        return dataclasses.replace(self, **changes)

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of layer, the kept ones marked."""
        return self.model.kinds(self.num_kept, frozen_embedding=not self.training.is_full)

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank in project and finish."""
        return -(-self.batch * self.seq_len // self.sequence_parallel)

    @property
    def set_fraction(self) -> float | None:
        """`swap_fraction` as the run rounds it, to whole tokens of a sequence on a rank; None where it is chosen."""
        if self.swap_fraction is None:
            return 0.0 if self.is_one_memory else None
        tokens = max(1, self.seq_len // self.sequence_parallel)
        return round(self.swap_fraction * tokens) / tokens

    @property
    def local_ranks(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    def rate_among(self, ranks: int) -> float:
        """Bytes per second, each way, that each of `ranks` GPUs exchanges with the others: the network's if need be."""
        device = self.device
        if ranks <= self.gpus_per_node:
            return device.peer_bytes_per_second
        return min(device.peer_bytes_per_second, device.network_bytes_per_second)

    @property
    def node_host_bytes(self) -> float:
        """Host memory of one node that the run may take: as given, or of what is assumed the share that a run takes."""
        return USABLE_SHARE * self.assumed_host_bytes if self.host_bytes is None else self.host_bytes

    @property
    def assumed_host_bytes(self) -> float:
        """Host memory that a node usually has for those of its devices that are used."""
        return self.device.host_bytes_per_device * self.local_ranks

    @property
    def device_type(self) -> str:
        return "cpu" if self.device.name == "cpu" else "cuda"

    @property
    def chunk(self) -> int:
        return min(self.local_tokens, self.chunk_tokens or default_chunk_tokens(self.local_tokens, self.device_type))

    @property
    def adapter_parameters(self) -> int:
        """Trained parameters of all LoRA adapters; 0 for full fine-tuning."""
        model, rank = self.model, self.training.lora_rank
        if self.training.is_full:
            return 0
        widths = {
            "q_proj": model.hidden + model.query_width,
            "k_proj": model.hidden + model.kv_width,
            "v_proj": model.hidden + model.kv_width,
            "o_proj": model.hidden + model.query_width,
            "gate_proj": model.hidden + model.intermediate,
            "up_proj": model.hidden + model.intermediate,
            "down_proj": model.hidden + model.intermediate,
        }
        return model.num_layers * rank * sum(widths[name] for name in self.training.lora_targets)
