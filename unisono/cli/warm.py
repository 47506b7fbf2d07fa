"""`unisono warm`: a process that has imported what `unisono run` needs, and starts it in milliseconds."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from importlib.util import find_spec
from typing import Any, NoReturn

from unisono.cli import run_options
from unisono.cli.main import run_command
from unisono.cli.run_options import parse_modules

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "warm",
        help="import torch and more once, so that unisono run starts at once",
        description="Starts a process of yours that imports torch and the modules that you name, and stays. Until it "
        "ends, `unisono run` is a fork of it. It ends by --stop, by itself when it is not used, and when a file that "
        "it has imported has changed. A second call replaces it. Linux only.",
    )
    parser.add_argument("--preload", metavar="M,..", type=parse_modules, default=[], help="modules to import, too")
    parser.add_argument(
        "--for", dest="idle_s", metavar="T", type=_parse_time, default=1800.0, help="idle time: 90s, 30m (default), 2h"
    )
    parser.add_argument("--stop", action="store_true", help="end it; runs started from it continue")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from unisono.launch.starting.warm_start import start

    if sys.platform != "linux":
        print("unisono warm: it needs Linux", file=sys.stderr)
        return 2
    missing = [name for name in arguments.preload if find_spec(name.partition(".")[0]) is None]
    if missing:
        print(f"unisono warm: there is no module {missing[0]} in the import path", file=sys.stderr)
        return 2
    stopped = _stop()
    if arguments.stop:
        print(f"unisono warm: {stopped or 'there was none'}")
        return 0
    began = time.monotonic()
    pid = start(f"from {__name__} import serve; serve({{control}})", arguments.preload, arguments.idle_s)
    if pid is None:
        print("unisono warm: the process has ended; its output is above", file=sys.stderr)
        return 1
    names = ", ".join(["torch", *arguments.preload])
    print(
        f"unisono warm: imported {names} in {time.monotonic() - began:.1f} s; unisono run now starts from process "
        f"{pid}, until it has been idle for {arguments.idle_s:,.0f} s or you call unisono warm --stop"
    )
    return 0


def serve(control: int) -> NoReturn:
    """What the process runs; `control` is a socket to its starter."""
    from unisono.launch.starting.warm_process import main

    main(control, run_command, _script_directory)


def _script_directory(arguments: list[str], directory: str) -> str | None:
    """Where the script of a command line called in that directory is; None if there is no script."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    run_options.add_parser(parser.add_subparsers())
    try:
        parsed, _ = parser.parse_known_args(arguments)
    except (SystemExit, argparse.ArgumentError):  # which the command says itself
        return None
    return directory if parsed.module else os.path.dirname(os.path.join(directory, parsed.target))


def _stop() -> str:
    """End the running process, and say so; empty if there is none."""
    from unisono.launch.starting import wire
    from unisono.launch.starting.warm_start import connect

    with contextlib.suppress(OSError, EOFError):
        if (sock := connect()) is not None:
            wire.send(sock, {"op": "stop"})
            answer, _ = wire.receive(sock)
            waits = " after the runs that started from it" if answer["running"] else ""
            return f"process {answer['pid']} ends{waits}"
    return ""


def _parse_time(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m or 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]
