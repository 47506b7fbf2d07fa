"""`unisono compare`: the first step in which two runs with virtual ranks differ."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="the first step in which two runs with virtual ranks differ",
        description="Compares the digests of two runs with Accelerator(virtual_ranks=...), on any numbers of devices: "
        "it names the first step, and the first parameter, that differ. Each run has its files in a log directory: "
        "unisono run --log-dir logs, or spawn(output=Output('logs')). Exit code: 0 if all steps are equal, 1 if some "
        "step differs, 2 if the runs cannot be compared.",
    )
    parser.add_argument("one", metavar="RUN", help="a run's directory, or a log directory: its latest run")
    parser.add_argument("other", metavar="RUN2", help="the other run")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from unisono.report.digests import check_two, compare_digests, read_digests  # here, since it imports torch

    try:
        check_two(arguments.one, arguments.other)
        code, text = compare_digests(read_digests(arguments.one), read_digests(arguments.other))
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"unisono compare: {error}", file=sys.stderr)
        return 2
    print(text)
    return code
