"""The forecast of a run before it starts: `memo_hf.forecast`. Imports no torch."""

from memo_hf.forecasting.api import forecast

__all__ = ["forecast"]
