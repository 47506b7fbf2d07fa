"""`unisono compare`: the first step in which two runs with virtual ranks differ; two runs side by side, as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="the first step in which two runs with virtual ranks differ; two runs side by side, as a page",
        description="Compares the digests of two runs with Accelerator(virtual_ranks=...), on any numbers of devices: "
        "it names the first step, and the first parameter, that differ. Each run has its files in a log directory: "
        "unisono run --log-dir logs, or spawn(output=Output('logs')). Exit code: 0 if all steps are equal, 1 if some "
        "step differs, 2 if the runs cannot be compared. With -o, also writes a page of both, which needs no network; "
        "then two runs without digests are no error.",
    )
    parser.add_argument("one", metavar="RUN", help="a run's directory, or a log directory: its latest run")
    parser.add_argument("other", metavar="RUN2", help="the other run")
    parser.add_argument("-o", "--output", metavar="PAGE.html", help="write a page of both runs side by side")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    # Here: other commands need none of it.
    from unisono.report.comparison import write_comparison
    from unisono.report.digests import EQUAL, NOT_COMPARABLE, check_two, compare_digests, has_digests, read_digests
    from unisono.report.run import read_run

    paths, page = (arguments.one, arguments.other), arguments.output
    if page is not None and not page.endswith(".html"):
        arguments.parser.error(f"-o {page} names no page: its name ends with .html")
    if page is not None and not Path(page).absolute().parent.is_dir():
        arguments.parser.error(f"-o {page}: there is no directory {Path(page).parent}; create it, or name another one")
    try:
        check_two(*paths)
        runs = None if page is None else (read_run(paths[0]), read_run(paths[1]))
        try:
            code, text = compare_digests(*map(read_digests, paths))
        except FileNotFoundError as error:
            if runs is None:
                raise
            # Where only one run has digests, the bits were meant to be compared.
            code, text = NOT_COMPARABLE, str(error)
            if not any(map(has_digests, paths)):
                unknown = "whether their bits differ is unknown"
                code, text = EQUAL, f"{unknown}: Accelerator(virtual_ranks=...) writes digests, and neither has"
        print(text)
        if runs is not None:
            print(f"page: {write_comparison(runs, paths, text, page)}")
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"unisono compare: {error}", file=sys.stderr)
        return 2
    return code
