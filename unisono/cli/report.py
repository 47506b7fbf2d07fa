"""`unisono report`: where the time of a run went, as a table and a page; or two runs side by side."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from unisono.cli.top import DEFAULT, running_runs


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="where the time of a run went",
        description="Prints where the time of a run went, and writes it as one HTML page, which needs no network. The "
        "run has its files in a log directory: unisono run --log-dir logs, or spawn(output=Output('logs')). With a "
        "second run, prints both, and their ratio.",
    )
    parser.add_argument(
        "run_directory",
        metavar="RUN",
        nargs="?",
        help="a run's directory, or a log directory: its latest run; default: yours on this machine; without one, logs",
    )
    parser.add_argument("other", metavar="RUN2", nargs="?", help="another run, to compare")
    parser.add_argument("-o", "--output", help="the page; default: RUN/report.html")
    parser.add_argument("--trace", metavar="FILE", help="also write a trace for https://ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print it as JSON (docs/profiling.md), and write no page")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    # Here: other commands need none of it.
    from unisono.report.as_json import as_json
    from unisono.report.comparison import compare
    from unisono.report.page import write_page
    from unisono.report.run import read_run
    from unisono.report.text import table_of
    from unisono.report.trace import write_trace

    if arguments.other is not None and (arguments.output or arguments.trace or arguments.json):
        arguments.parser.error("-o, --trace and --json are for one run: two are compared as text")
    if arguments.json and (arguments.output or arguments.trace):
        arguments.parser.error("--json writes no file; call it again for -o and --trace")
    runs = running_runs() if arguments.run_directory is None else []
    if len(runs) > 1:
        arguments.parser.error(f"several of your runs are going: {', '.join(map(str, runs))}; pass one of them as RUN")
    try:
        found = read_run(arguments.run_directory or (runs or [DEFAULT])[0])
        if arguments.other is not None:
            print(compare(found, read_run(arguments.other), (arguments.run_directory, arguments.other)))
            return 0
        if arguments.json:
            print(json.dumps(as_json(found), indent=1))
            return 0
        if found.report.ranks:
            print(table_of(found.report))
        print(found.verdict, *found.failures, sep="\n")
        if found.restarts.all:
            print(
                found.restarts.summary, *found.restarts.all, "the other numbers are those of the last attempt", sep="\n"
            )
        try:
            print(f"page: {write_page(found, arguments.output or found.directory / 'report.html')}")
            if arguments.trace:
                print(f"trace: {write_trace(found, arguments.trace)}")
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(f"{error}; choose another place for the page by -o FILE, for the trace by --trace") from None
        finally:  # it is known once all files were read
            for text in found.missing:
                print(f"missing: {text}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"unisono report: {error}", file=sys.stderr)
        return 1
    return 0
