"""The command `unisono-simulate`, which predicts step time, efficiency and memory of a model on a fleet."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy

from unisono_simulate.description import read
from unisono_simulate.output import save_picture, table
from unisono_simulate.prediction import predict

_DEVICES = (1, 8, 64, 512, 4096, 32_768, 100_000)
_EXAMPLES = """
examples:
  unisono-simulate fleet.toml                               a table, to 100,000 devices
  unisono-simulate fleet.toml --report logs                 times from a small run: unisono run --log-dir logs
  unisono-simulate fleet.toml --devices 8,256 --json        the same numbers, for programs
  unisono-simulate fleet.toml --picture fleet.png

exit codes: 0 success; 1 the description cannot be simulated; 2 wrong usage.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the predictions, and draw them if asked to.

    Args:
        argv: the command line, without the program's name; None uses the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="unisono-simulate",
        description="Predict step time, efficiency and memory of a model on a fleet that is not at hand.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fleet", type=Path, metavar="FLEET", help="a TOML file: [model], [fleet]; see README.md")
    parser.add_argument("--report", type=Path, metavar="RUN", help="the log directory of a run of the model")
    parser.add_argument("--devices", type=_numbers, default=_DEVICES, metavar="N,N", help="numbers of devices")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a PNG file, up to the largest number")
    return _run(parser.parse_args(argv))


def _numbers(text: str) -> tuple[int, ...]:
    if not all(each.isdecimal() and 0 < int(each) <= 10**9 for each in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected integers from 1 to 10**9, separated by commas, and got {text!r}")
    return tuple(map(int, text.split(",")))


def _run(arguments: argparse.Namespace) -> int:
    try:
        model, fleet = read(arguments.fleet, arguments.report)
        predictions = [predict(model, fleet, devices) for devices in arguments.devices]
        if arguments.picture:
            numbers = numpy.unique(numpy.geomspace(1, max(arguments.devices), 60).round().astype(int)).tolist()
            save_picture([predict(model, fleet, devices) for devices in numbers], arguments.picture)
    except (ValueError, ImportError, OSError) as error:
        print(f"unisono-simulate: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(each) for each in predictions], indent=1) if arguments.json else table(predictions))
    return 0
