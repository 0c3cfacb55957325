"""Subcommands of `memo-hf`, one module each: `add_parser(subparsers)` returns the parser, `run(args)` the exit code."""
