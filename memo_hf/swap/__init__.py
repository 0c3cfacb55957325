"""Swapping of activations by storage, between one device and host memory. Knows no model."""

from memo_hf.swap.engine import Handle, SwapEngine, SwapGroup, SwapStats

__all__ = ["Handle", "SwapEngine", "SwapGroup", "SwapStats"]
