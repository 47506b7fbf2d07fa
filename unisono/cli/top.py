"""`unisono top`: what each rank of a run is doing, once a second, from the records that the ranks write anyway."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0  # with workers that are being started


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "top",
        help="what each rank of a run is doing now",
        description="Shows each rank of a run with a log directory, once a second, until the run ends or Ctrl-C. It "
        "reads files, also those of other machines in a shared directory, and costs the run nothing.",
    )
    parser.add_argument("run_directory", metavar="RUN", nargs="?", default="logs", help="default: logs")
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from unisono.report.live import describe, is_alive  # here, since they import torch
    from unisono.report.run import read_run

    is_live = sys.stdout.isatty() and not arguments.once
    began = time.monotonic()
    while True:
        try:
            found = read_run(arguments.run_directory)
        except OSError as error:
            latest, is_new = Path(arguments.run_directory) / "latest", time.monotonic() - began < _PATIENCE_S
            if is_live and is_new and latest.exists():  # workers are being started
                print(f"\x1b[H\x1b[J{latest}: no rank has recorded anything yet", end="", flush=True)
                time.sleep(1)
                continue
            print("\n" * is_live + f"unisono top: {error}", file=sys.stderr)
            return 1
        if is_live:
            # Over the lines that are there, then erase the rest: no line is missing for a moment.
            columns, rows = shutil.get_terminal_size()
            lines = [line[:columns] for line in describe(found, columns)][: rows - 1]
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
        else:
            print(*describe(found), sep="\n", flush=True)
        if arguments.once or not any(is_alive(each) for each in found.ranks):
            return 0
        time.sleep(1)
