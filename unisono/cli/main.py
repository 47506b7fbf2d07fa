"""The command `unisono`: finds the subcommand and runs it.

Each subcommand is a module with `add_parser(subparsers)`, which sets `parser`, and `run`, a function of the parsed
arguments that returns an exit code.

Exit codes: 0 success; 1 something failed; 2 invalid command line; 130 after Ctrl-C; if a worker ended the run, that
worker's exit code, or 128 + n for signal n.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

COMMANDS = ("run", "doctor", "checkpoint", "simulate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; `argv` is without the program's name, and None uses the process's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Multi-device data-parallel training for PyTorch: one script, any number of devices.",
        epilog="See `unisono COMMAND --help` for details.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {version('unisono')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"unisono.cli.{name}").add_parser(subparsers)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", parsed.parser.format_help())
        close = [hint for each in unknown for hint in get_close_matches(each.partition("=")[0], known, n=1)]
        hint = f"; is it {' or '.join(close)}?" if close else ""
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        return 130
