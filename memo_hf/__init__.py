"""memo_hf: train Hugging Face models at several times the context, by swapping and recomputing activations per token.

Public names load lazily, so that `import memo_hf` costs nothing and `memo-hf plan` runs without torch.
"""

import importlib

_HOME = {
    "MemoConfig": "memo_hf.config",
    "MemoError": "memo_hf.errors",
    "enable": "memo_hf.api",
    "disable": "memo_hf.api",
    "forecast": "memo_hf.forecasting",
    "MemoPlugin": "memo_hf.integrations.accelerate",
    "MemoAccelerator": "memo_hf.integrations.accelerate",
    "MemoTrainer": "memo_hf.integrations.trainer",
    "MemoTrainerMixin": "memo_hf.integrations.trainer",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'memo_hf' has no attribute {name!r}; the public names are {__all__}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
