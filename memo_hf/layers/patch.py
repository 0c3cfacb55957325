"""`Patch`: a method of one module replaced on the instance, and put back.

Used by the session and the chunked loss. Being on the instance, the replacement leaves the hooks, FSDP and DDP around
the module as they are. Knows nothing of what the replacement does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class Patch:
    """Until `undo`, calls of a method of `module` go to `replacement`.

    Copies of the module, by `copy` or by `pickle`, have the module's own method: a copy is not enabled.

    Args:
        module: any module.
        replacement: called with the method's arguments, without the module.
        method: name of the method.
    """

    def __init__(self, module: nn.Module, replacement: Callable, method: str = "forward"):
        self.module, self._method, self._had = module, method, method in module.__dict__
        self._stand_in = _StandIn(getattr(module, method), replacement)
        setattr(module, method, self._stand_in)

    def undo(self) -> None:
        """Give the module its own method back. A wrapper that somebody put around ours stays and calls the module's."""
        own = self._stand_in.retire()
        if self.module.__dict__.get(self._method) is not self._stand_in:
            return
        if self._had:
            setattr(self.module, self._method, own)
        else:
            delattr(self.module, self._method)


class _StandIn:
    """What stands in for a module's own method; copied or pickled, it becomes that method again."""

    def __init__(self, own: Callable, replacement: Callable):
        self.__wrapped__, self._replacement = own, replacement

    def __call__(self, *args, **kwargs):
        return self._replacement(*args, **kwargs)

    def retire(self) -> Callable:
        """Call the module's own method from now on, and return it."""
        self._replacement = self.__wrapped__
        return self.__wrapped__

    def __reduce_ex__(self, protocol):
        return self.__wrapped__.__reduce_ex__(protocol)
