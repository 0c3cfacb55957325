"""Single-line mutations of memo_hf, applied in this process and taken back by `monkeypatch`.

A function is compiled again from its source with one line changed, in the module that it comes from.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap


def mutate(monkeypatch, owner, name: str, line: str, changed: str) -> None:
    """Put `changed` where the source of `owner.name` has `line`, which must be there exactly once.

    Args:
        owner: a class or a module.
        name: a function of it.
        line: a piece of its source.
        changed: what stands there instead; "pass" drops a statement.
    """
    function = _plain(inspect.getattr_static(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{line!r} is {source.count(line)} times in {name}: mend the mutation"
    module = sys.modules[function.__module__]
    code = compile(source.replace(line, changed), module.__file__, "exec", __future__.annotations.compiler_flag)
    names = dict(vars(module))
    exec(code, names)
    # The code, not the function: whoever has imported or wrapped it runs the mutation too.
    monkeypatch.setattr(function, "__code__", _plain(names[function.__name__]).__code__)


def _plain(function):
    function = getattr(function, "__func__", getattr(function, "fget", None) or function)
    return inspect.unwrap(function)
