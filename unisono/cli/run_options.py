"""The options of `unisono run`: its own, and torchrun's, each with hyphens and with underscores."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

_EXAMPLES = """
examples:
  unisono run train.py --epochs 3                    one worker per device of this machine
  unisono run -n 4 --backend cpu train.py            four workers on the CPU
  unisono run -n 2 -m package.training --epochs 3    a module, as `python -m` runs it
  unisono run -n 2 --max-restarts 3 --log-dir logs train.py

on two machines, the same on each (node1 is one of them); with 1:2 one may come later, or be lost:
  unisono run --nnodes 2 --rdzv-endpoint node1:29400 train.py
  unisono run --nnodes 1:2 --max-restarts 3 --rdzv-endpoint node1:29400 train.py

with SLURM, one agent per node; nothing else is needed:
  srun --ntasks-per-node=1 unisono run train.py

exit codes: 0 success; n when a worker ended by sys.exit(n), modulo 256 and never 0; 1 when it failed otherwise;
128 + n when signal n ended it; 2 wrong usage; 130 after Ctrl-C; 143 when the ranks stopped early, as
requested.
"""
_PORT = 29500  # torchrun's, if only --master-addr is given


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of `unisono run` to those of `unisono`, and return it."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a script as one worker per device, on one machine or several",
        description="Run a script or a module as one worker per device. Options precede it; what follows "
        "it is passed on to it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_workers(partial(_add_option, parser.add_argument_group("workers")))
    _add_cores(partial(_add_option, parser.add_argument_group("CPU cores")))
    _add_collectives(partial(_add_option, parser.add_argument_group("collectives")))
    _add_failing(partial(_add_option, parser.add_argument_group("failing and restarting")))
    _add_output(partial(_add_option, parser.add_argument_group("output")))
    _add_machines(partial(_add_option, parser.add_argument_group("more than one machine")))
    parser.add_argument("target", help="script.py; with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script", metavar="...")
    return parser


def endpoint_of(parsed: argparse.Namespace) -> str | None:
    """Where the machines meet, according to the command line; None if it does not say."""
    if parsed.rdzv_endpoint is None and parsed.master_addr is not None:
        return f"{parsed.master_addr}:{parsed.master_port or _PORT}"
    endpoint: str | None = parsed.rdzv_endpoint
    return endpoint


def _add_option(group: Any, *names: str, **settings: Any) -> None:
    """Add an option, with a hidden second spelling, which torchrun accepts as well."""
    group.add_argument(*names, **settings)
    spelled = [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]
    if spelled:
        settings["dest"] = settings.get("dest", next(name for name in names if name[1] == "-")[2:].replace("-", "_"))
        group.add_argument(*spelled, **{**settings, "help": argparse.SUPPRESS})


def _add_workers(add: Callable[..., None]) -> None:
    add(
        *("-n", "--nproc", "--nprocs", "--nproc-per-node"),
        dest="nproc",
        type=_parse_workers,
        metavar="N",
        help="workers on this machine, else one per device; gpu: one per accelerator, cpu: one per core, auto: the "
        "first that this machine has",
    )
    add("-m", "--module", action="store_true", help="the target is a module, which is run as `python -m` does")
    add("--backend", metavar="B", help="the device family; else the first that has devices")
    add("--start-method", metavar="M", help="how workers are started, zygote or spawn; see `spawn`")


def _add_cores(add: Callable[..., None]) -> None:
    text = "CPU threads of each worker; else its share of the cores"
    add("--num-threads", type=partial(_parse_number, least=1), metavar="N", help=text)
    text = "of each worker's DataLoader, which then get their share of the cores, too"
    add("--num-loader-workers", type=_parse_number, default=0, metavar="N", help=text)
    text = "keep each worker to the cores near its GPU: node, socket, exclusive or core-complex"
    add("--numa-binding", metavar="M", help=text)


def _add_collectives(add: Callable[..., None]) -> None:
    add("--timeout", type=_parse_seconds, default=1800.0, metavar="S", help="their time limit (%(default)s)")
    text = "gloo: let ranks on the CPU reduce over the network, and not in memory that they share"
    add("--process-group", metavar="G", help=text)


def _add_failing(add: Callable[..., None]) -> None:
    add("--max-restarts", type=_parse_number, metavar="N", help="restart all workers, at most N times")
    add("--hang-timeout", type=_parse_seconds, metavar="S", help="stop when no rank makes progress for S seconds")
    add("--grace", type=_parse_seconds, metavar="S", help="between SIGTERM and SIGKILL (5; 25 with several machines)")


def _add_output(add: Callable[..., None]) -> None:
    add("--log-dir", metavar="DIR", help="also keep each worker's output there")
    add("--log-ranks", type=_parse_ranks, metavar="R,..", help="show the output of these ranks only")
    add("--no-prefix", action="store_true", help="do not begin each line with its [rank 0]")


def _add_machines(add: Callable[..., None]) -> None:
    add("--standalone", action="store_true", help="one machine, whatever the environment says")
    add("--nnodes", type=node_range, metavar="A[:B]", help="machines; with A:B any number between")
    add("--node-rank", type=_parse_number, metavar="R", help="the number of this one, where they have numbers")
    add("--rdzv-endpoint", metavar="H:P", help=("where the agents meet, host:port; the host is one of the machines"))
    add("--master-addr", metavar="H", help="the same as --rdzv-endpoint H:P, with")
    add("--master-port", type=partial(_parse_number, least=1), metavar="P", help=f"the port ({_PORT})")
    add("--rdzv-backend", choices=["c10d", "static"], help="only c10d; static is treated as c10d")
    add("--rdzv-id", metavar="ID", help="the name of the run, the same on all")
    add("--rdzv-secret-file", metavar="F", help="a file with the run's secret: the machines sign what they send")
    add("--rdzv-conf", type=_parse_settings, default={}, metavar="K=V,..", help="settings of torch's rendezvous")
    add(
        "--lost-after",
        type=_parse_seconds,
        default=60.0,
        metavar="S",
        help="continue without a machine that is silent for S seconds (%(default)s), or end where too few are left",
    )
    add("--local-addr", metavar="A", help="this machine's address for the others")


def node_range(text: str) -> tuple[int, int]:
    """Parse a number of machines, or a range of it: "1:2"."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of machines; write 2, or 1:2 for one or two")
    return low, high


def _parse_workers(text: str) -> int | str:
    if text.isalpha():
        return text  # auto, gpu or cpu: checked and resolved later, where torch has been imported
    return _parse_number(text, 1, ", nor auto, gpu or cpu")


def _parse_number(text: str, least: int = 0, more: str = "") -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}{more}")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(_parse_number(rank) for rank in text.split(","))


def _parse_settings(text: str) -> dict[str, str]:
    pairs = [each.partition("=") for each in text.split(",") if each]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like last_call_timeout=5,keep_alive_interval=2")
    return {name.strip(): value.strip() for name, _, value in pairs}
