"""A command line whose mistakes end in one line. Used by `memo-hf` and the recipes; knows none of the options."""

from __future__ import annotations

import argparse
import sys

from memo_hf.errors import ConfigError, did_you_mean
from memo_hf.units import parse_count


def tokens(text: str) -> int:
    """`parse_count`, as the `type` of an argument: what is wrong with `text` is said in `parse_count`'s words."""
    try:
        return parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """As argparse's, but a mistake ends in one line, without the usage.

    A name that is not known comes with the closest ones that are, before anything is said of arguments that are
    missing. Names are not to be shortened: what is short today may be two options tomorrow.
    """

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        wrong = []
        for text in args:
            if text == "--" or (self._subparsers and not text.startswith("-")):
                break  # what follows is no option, or a subcommand's
            name = text.split("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                wrong.append(name)
        if wrong:
            self._refuse(wrong)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[:1])
        return options, unknown

    def _refuse(self, names: list[str]):
        options = [action.option_strings[0] for action in self._actions if action.option_strings]
        meant = [did_you_mean(name, options) for name in names]
        said = ", ".join(name + hint for name, hint in zip(names, meant, strict=True))
        self.error(f"there is no argument {said}{'' if all(meant) else '; see --help'}")
