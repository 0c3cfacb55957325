"""Paths that users give, whose suffix says what is in the file. Called wherever one is taken; knows no format."""

from __future__ import annotations

from pathlib import Path

from memo_hf.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf", ".jpg")


def require_suffix(path: str | Path, what: str, suffixes: tuple[str, ...]) -> str:
    """The suffix of `path`, in small letters, which is one of `suffixes`. To be asked before any work is done.

    Args:
        what: the option or argument, and what is written there: "--plot, a picture,".

    Raises:
        ConfigError: another suffix, or none: the file would hold something else than its name says.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise ConfigError(f"{what} is {str(path)!r}; end the name in {' or '.join(suffixes)}")
    return suffix
