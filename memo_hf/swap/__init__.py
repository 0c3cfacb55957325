"""Swapping of activations by storage, between one device and host memory. Knows no model."""

from memo_hf.swap.engine import SwapEngine, SwapStats
from memo_hf.swap.group import Handle, SwapGroup

__all__ = ["Handle", "SwapEngine", "SwapGroup", "SwapStats"]
