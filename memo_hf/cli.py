"""The command `memo-hf`: finds the subcommands and hands over to one. Each is a module of `memo_hf.commands`."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

from memo_hf import __version__, commands
from memo_hf.arguments import Parser
from memo_hf.errors import MemoError


def build_parser() -> Parser:
    """The parser, with every module of `memo_hf.commands` as a subcommand."""
    parser = Parser(prog="memo-hf", description="Long-context training: plan a run before it starts.")
    parser.add_argument("--version", action="version", version=f"memo-hf {__version__}", help="print the version")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for found in sorted(pkgutil.iter_modules(commands.__path__), key=lambda module: module.name):
        module = importlib.import_module(f"memo_hf.commands.{found.name}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    return parser


def _dashed(text: str) -> str:
    """`--seq_len=1M` as `--seq-len=1M`: Trainer's options are written with underscores, and so are habits."""
    name, sign, value = text.partition("=")
    return name.replace("_", "-") + sign + value if name.startswith("--") else text


def main(argv: list[str] | None = None) -> int:
    """Run `memo-hf` with `argv`, by default the process's; returns the exit code (2 for a mistake in the arguments)."""
    args = build_parser().parse_args([_dashed(text) for text in (sys.argv[1:] if argv is None else argv)])
    try:
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants. What is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoError as error:
        print(f"memo-hf {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
