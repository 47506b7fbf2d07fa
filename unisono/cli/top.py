"""`unisono top`: what each rank of the user's runs is doing, once a second, from the records that they keep anyway."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0  # with workers that are being started
_IDLE = 5  # times as long as looking
DEFAULT = Path("logs")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="what each rank of your runs that have a log directory is doing now",
        description="Shows each rank of a run with a log directory, once a second, until the run ends or Ctrl-C. It "
        "reads files, also those of other machines in a shared directory, and costs the run nothing.",
    )
    parser.add_argument(
        "run_directory", metavar="RUN", nargs="?", help="default: your runs on this machine; without one, logs"
    )
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, a list of runs (docs/profiling.md)")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    from unisono.launch.messages import understands_codes, wants_colours
    from unisono.report.as_json import as_json  # here: other commands need none of it
    from unisono.report.live import describe, is_alive
    from unisono.report.run import read_run

    if arguments.json and not arguments.once:
        arguments.parser.error("--json is for one look: unisono top --once --json")
    is_terminal, is_coloured = understands_codes(sys.stdout), wants_colours(sys.stdout)
    is_live = is_terminal and not arguments.once
    began = time.monotonic()
    shown: dict[Path, None] = {} if arguments.run_directory is None else {Path(arguments.run_directory): None}
    while True:
        looked = time.monotonic()
        if arguments.run_directory is None:
            shown |= dict.fromkeys(running_runs())
        found, failed = [], {}
        for each in shown or [DEFAULT]:
            try:
                found.append(read_run(each))
            except OSError as error:
                failed[each] = error
        if not found:
            directory, failure = next(iter(failed.items()))
            is_new = time.monotonic() - began < _PATIENCE_S
            is_known = arguments.run_directory is None and directory in shown
            if is_live and is_new and (is_known or (directory / "latest").exists()):  # workers are being started
                print(f"\x1b[H\x1b[J{directory}: no rank has recorded anything yet", end="", flush=True)
                time.sleep(1)
                continue
            print("\n" * is_live + f"unisono top: {failure}", file=sys.stderr)
            return 1
        if arguments.json:
            print(json.dumps([as_json(each) for each in found], indent=1))
            return 0
        columns, rows = shutil.get_terminal_size() if is_live else (0, 0)
        lines = [line for each in found for line in (*describe(each, columns, is_coloured), "")][:-1]
        if is_live:
            # Over the lines that are there, then erase the rest: no line is missing for a moment.
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines[: rows - 1]) + "\x1b[J", end="", flush=True)
        else:
            print(*lines, sep="\n", flush=True)
        if arguments.once or not any(is_alive(rank) for each in found for rank in each.ranks):
            return 0
        # The records of a long run take a while to read, on cores that the run may need.
        time.sleep(max(1.0, _IDLE * (time.monotonic() - looked)))


def running_runs() -> list[Path]:
    """The directories of this user's runs on this machine: the starter of each keeps its output files open."""
    import psutil  # here: `unisono doctor` also runs without it

    found = set()
    for process in psutil.process_iter(["uids", "open_files"]):
        if process.info["uids"] is not None and process.info["uids"].real == os.getuid():
            paths = [Path(each.path) for each in process.info["open_files"] or ()]
            found |= {path.parent for path in paths if re.fullmatch(r"rank-\d+\.stderr", path.name)}
    return sorted(found)
