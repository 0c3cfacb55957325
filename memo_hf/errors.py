"""Every error that memo_hf raises on purpose. Each says what happened, the value, the limit and what to do."""


class MemoError(RuntimeError):
    """Base of all memo_hf errors."""


class ConfigError(MemoError, ValueError):
    """A setting is wrong, unknown, or contradicts another setting."""


class UnsupportedModelError(MemoError):
    """The model, or what it was asked to do, cannot run under memo_hf."""


class HostMemoryError(MemoError):
    """Host memory for swapped activations does not suffice."""


class DeviceMemoryError(MemoError):
    """Device memory does not suffice. The message contains "out of memory.", which accelerate looks for."""


class PlanError(MemoError):
    """A plan is invalid, stale, or does not belong to this model, shape or machine."""


class RankError(MemoError):
    """Ranks that train one model disagree, or one of them does not come."""


def did_you_mean(name: str, known) -> str:
    """What to add after a name that is not among `known`: " (did you mean 'gpus'?)", or nothing where none is close."""
    import difflib  # only where something went wrong

    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
