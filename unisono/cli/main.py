"""The command `unisono`: finds the subcommand and runs it.

Each subcommand is a module with `add_parser(subparsers)`, which sets `run`, a function of the parsed arguments that
returns an exit code.

Exit codes: 0 success; 1 something failed, or two runs differ; 2 invalid command line, or runs that cannot be compared
or replayed; 130 after Ctrl-C; if a worker ended the run, that worker's exit code, or 128 + n for signal n.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

COMMANDS = ("run", "doctor", "checkpoint", "report", "compare", "replay", "top", "warm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; `argv` is without the program's name, and None uses the process's own."""
    if argv is None and sys.argv[1:2] == ["run"] and sys.platform == "linux":
        from unisono.launch.starting.warm_start import hand_over

        if (code := hand_over(sys.argv[1:])) is not None:
            return code
    return run_command(sys.argv[1:] if argv is None else argv)


def _refuse_unknown(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    known = re.findall(r"--[a-z-]+", command.format_help())
    near = [*chain(*(get_close_matches(each.partition("=")[0], known, 1) for each in unknown))]
    command.print_usage(sys.stderr)
    advice = f"; is it {near[0]}?" if near else ""
    print(f"{command.prog}: error: there is no option {unknown[0]}{advice}", file=sys.stderr)
    sys.exit(2)


def run_command(arguments: Sequence[str], inherited: int | None = None) -> int:
    """Run the command line in this process; a fork of `unisono warm` has `inherited` a descriptor from it."""
    import argparse  # here: a command that is handed over needs neither of them
    from importlib.metadata import version

    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Multi-device data-parallel training for PyTorch: one script, any number of devices.",
        epilog="See `unisono COMMAND --help` for details.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {version('unisono')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"unisono.cli.{name}").add_parser(subparsers)
    if not arguments:
        parser.print_help()
        return 0
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(subparsers.choices[arguments[0]], unknown)
    parsed.inherited = inherited
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return 1
