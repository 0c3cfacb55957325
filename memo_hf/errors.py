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
    """What to add after a name that is not among `known`: " (did you mean 'gpus' or 'shards'?)", or nothing.

    At most two: those that begin with the name, then those that are spelt alike.
    """
    import difflib  # only where something went wrong

    bare = {other.lstrip("-"): other for other in known}
    name = name.lstrip("-")
    begin = sorted((other for other in bare if other.startswith(name)), key=len)
    close = dict.fromkeys([*begin, *difflib.get_close_matches(name, bare, n=2)])
    return f" (did you mean {' or '.join(repr(bare[other]) for other in [*close][:2])}?)" if close else ""
