"""The longest sequence that fits, and the fewest GPUs that do. Called by the command line and for advice."""

from __future__ import annotations

import dataclasses

from memo_hf.config import MIN_TOKENS
from memo_hf.forecasting.activations import ALL_LINEAR, LORA_RANK
from memo_hf.forecasting.forecast import fits
from memo_hf.forecasting.setup import Setup

# Lengths are found to 1/64 of themselves; further apart than the forecast is exact.
_RESOLUTION = 64
_LONGEST = 2**28
MOST_GPUS = 4096
# In advice: no shorter sequence than this is, being one that memo_hf leaves untouched, and a length is further where it
# is this much longer.
_WORTH_TELLING = MIN_TOKENS
_FURTHER = 1.25


def max_seq_len(setup: Setup, fits=fits) -> int:
    """The longest sequence of `setup` that fits, a multiple of the ranks that share it; 0 where none does.

    Args:
        fits: of a setup, whether it does; by default under memo_hf.
    """
    step = setup.sequence_parallel
    low, high = 0, None
    length = max(step, 1024 // step * step)
    while high is None and length <= _LONGEST:
        if fits(setup.replace(seq_len=length)):
            low, length = length, 2 * length
        else:
            high = length
    if high is None:
        return low
    while high - low > max(step, low // _RESOLUTION):
        middle = (low + high) // 2 // step * step
        if middle in (low, high):
            break
        if fits(setup.replace(seq_len=middle)):
            low = middle
        else:
            high = middle
    return low


def with_gpus(setup: Setup, gpus: int) -> Setup:
    """`setup` on `gpus` GPUs, all of which share the weights, and the sequence as far as its heads allow."""
    return setup.replace(gpus=gpus, sequence_parallel=_most_ranks(setup, gpus), shards=gpus)


def _most_ranks(setup: Setup, gpus: int) -> int:
    """How many of `gpus` GPUs can share one sequence of `setup`."""
    return max(n for n in range(1, gpus + 1) if gpus % n == 0 and setup.model.heads % n == 0 and n <= setup.seq_len)


def min_gpus(setup: Setup) -> Setup | None:
    """`setup` on the fewest GPUs, a power of two, on which it fits; None where no number up to 4,096 suffices."""
    gpus = 1
    while gpus <= MOST_GPUS:
        candidate = with_gpus(setup, gpus)
        if fits(candidate):
            return candidate
        gpus *= 2
    return None


def advise(setup: Setup) -> list[str]:
    """What would make `setup` fit, each checked."""
    found = _about_length(setup)
    if setup.optimizer_device == "device" and fits(setup.replace(optimizer_device="host")):
        found.append("it fits with the optimizer on the host (--optimizer-device host)")
    adapter = dataclasses.replace(setup.training, lora_rank=LORA_RANK, lora_targets=frozenset(ALL_LINEAR))
    if setup.training.is_full and fits(setup.replace(training=adapter)):
        found.append("it fits with LoRA (--train lora)")
    if setup.swap_fraction is not None and fits(setup.replace(swap_fraction=None, qkv=None)):
        found.append("it fits with a swap fraction that is chosen for you")
    if fits(setup.replace(host_bytes=1e18)):
        found.append("it fits with more host memory (--host-memory)")
    if setup.device.name == "cpu":
        return found or ["more host memory does not make it fit: use a smaller model or a larger machine"]
    more = min_gpus(setup)
    if more is not None and more.gpus > setup.gpus:
        found.append(f"it fits on {describe_gpus(more)}")
    if not found:
        found.append("neither more GPUs nor more host memory make it fit: use a smaller model or a larger device")
    if more is None:
        found.append(
            f"no number of GPUs up to {MOST_GPUS:,} suffices: its {setup.model.heads} attention heads bound how many "
            "ranks can share a sequence"
        )
    return found


def describe_gpus(setup: Setup) -> str:
    """How many GPUs, and how they share a sequence where they do, with the options that ask for it."""
    if setup.sequence_parallel == 1:
        return f"{setup.gpus:,} GPU{'s' if setup.gpus > 1 else ''} (--gpus {setup.gpus})"
    return (
        f"{setup.gpus:,} GPUs, each sequence shared by {setup.sequence_parallel}"
        f" (--gpus {setup.gpus} --sequence-parallel {setup.sequence_parallel})"
    )


def _about_length(setup: Setup) -> list[str]:
    """How long a sequence may be as asked, and if more of the GPUs that are there shared it."""
    ranks, asked = _most_ranks(setup, setup.gpus), max_seq_len(setup)
    found = [f"{asked:,} tokens fit as asked"] if asked >= _WORTH_TELLING else []
    if ranks == setup.sequence_parallel:
        return found
    shared, how = setup.replace(sequence_parallel=ranks), f"each sequence over {ranks} of the {setup.gpus} GPUs"
    if fits(shared):
        return [f"it fits with {how} (--sequence-parallel {ranks})", *found]
    longer = max_seq_len(shared)
    if longer > max(_FURTHER * asked, _WORTH_TELLING):
        less = f"{asked:,} tokens fit as asked, {longer:,}" if found else f"{longer:,} tokens fit"
        return [f"{less} with {how} (--sequence-parallel {ranks})"]
    return found
