"""`unisono run`: a script, or a function, as one worker per device, here or on several machines.

On one machine it is `spawn` with the script as its function. With several it is torch's agent, one on each machine
(`launch/hosts/elastic.py`); what the machines need to know of one another is given by options, or found in the
environment that Kubernetes or a SLURM step leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import traceback
from datetime import timedelta
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    BrokenWorldError,
    CollectiveMismatchError,
    RemoteError,
    RemoteTraceback,
    UnisonoError,
)
from unisono.launch.starting.early import warm_early

if TYPE_CHECKING:
    from unisono.launch.hosts.elastic import ElasticOptions
    from unisono.launch.hosts.environment import AgentPlace

_LEADING = re.compile(rf'  File "({re.escape(os.path.dirname(os.path.dirname(__file__)))}/|<frozen runpy>)')
_EXAMPLES = """
examples:
  unisono run train.py --epochs 3                    one worker per device of this machine
  unisono run -n 4 --backend cpu train.py            four workers on the CPU
  unisono run -n 2 package.training:main             main(rank) in two workers
  unisono run -n 2 --max-restarts 3 --log-dir logs train.py

on two machines, the same on each (node1 is one of them); with 1:2 one may come later, or be lost:
  unisono run --nnodes 2 --rdzv-endpoint node1:29400 train.py
  unisono run --nnodes 1:2 --max-restarts 3 --rdzv-endpoint node1:29400 train.py

with SLURM, one agent per node; nothing else to be said:
  srun --ntasks-per-node=1 unisono run train.py

exit codes: 0 all is well; n when a worker ended by sys.exit(n), modulo 256 and never 0; 1 when it failed otherwise;
128 + n when signal n ended it; 2 the command was given wrongly; 130 after Ctrl-C; 143 when the ranks stopped early, as
they were asked to.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `unisono`."""
    parser = subparsers.add_parser(
        "run",
        help="run a script as one worker per device, on one machine or several",
        description="Run a script, or a function, as one worker per device. Options stand before it; what follows it "
        "is its own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    _add_workers(parser.add_argument_group("workers"))
    _add_failing(parser.add_argument_group("failing and restarting"))
    _add_output(parser.add_argument_group("output"))
    _add_machines(parser.add_argument_group("more than one machine"))
    parser.add_argument("target", help="script.py, or package.module:function, which is called with the rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def _add_workers(group: Any) -> None:
    group.add_argument("-n", "--nproc", type=_count, metavar="N", help="workers on this machine; else one per device")
    group.add_argument("--backend", metavar="B", help="the device family; else the first that has devices")
    group.add_argument(
        "--checked",
        action="store_true",
        help="several machines: compare each collective first",
    )
    group.add_argument("--start-method", metavar="M", help="how workers are started on one machine; see `spawn`")


def _add_failing(group: Any) -> None:
    group.add_argument("--max-restarts", type=_number, metavar="N", help="start all workers again, N times at most")
    group.add_argument(
        "--timeout", type=_seconds, default=1800.0, metavar="S", help="what a collective waits at most (%(default)s)"
    )
    group.add_argument(
        "--hang-timeout", type=_seconds, metavar="S", help="stop when no rank makes progress for S seconds"
    )
    group.add_argument(
        "--grace", type=_seconds, metavar="S", help="between SIGTERM and SIGKILL (5; 25 with several machines)"
    )


def _add_output(group: Any) -> None:
    group.add_argument("--log-dir", metavar="DIR", help="keep each worker's output there, too")
    group.add_argument("--log-ranks", type=_ranks, metavar="R,..", help="show the output of these ranks only")
    group.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="json: each line as an object with time, rank, stream and text",
    )
    group.add_argument("--no-prefix", action="store_true", help="do not begin each line with its [rank 0]")


def _add_machines(group: Any) -> None:
    group.add_argument("--nnodes", type=_range, metavar="A[:B]", help="machines; with A:B any number between")
    group.add_argument("--node-rank", type=_number, metavar="R", help="the number of this one, where they have numbers")
    group.add_argument("--rdzv-endpoint", metavar="H:P", help="where they meet, host:port; the host is one of them")
    group.add_argument("--rdzv-id", metavar="ID", help="the name of the run, the same on all")
    group.add_argument(
        "--rdzv-conf", type=_settings, default={}, metavar="K=V,..", help="settings of torch's rendezvous"
    )
    group.add_argument("--local-addr", metavar="A", help="this machine's address for the others")


def run(parsed: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code."""
    if parsed.nnodes in (None, (1, 1)) and parsed.rdzv_endpoint is None and parsed.start_method in (None, "zygote"):
        warm_early()  # it imports torch while this process does, and has time for nothing where an agent is to be run
    from unisono.launch.hosts.environment import announced_agent
    from unisono.launch.hosts.target import check_target

    try:
        check_target(parsed.target)
        options = _elastic_options(parsed, announced_agent())
        nproc = parsed.nproc or (options.nproc if options is not None else None)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        return _refuse(parsed, error)
    if options is None:
        return _run_here(parsed, nproc)
    from unisono.launch.hosts.elastic import run_elastic

    return run_elastic(options, parsed.target, parsed.arguments)


def _run_here(parsed: argparse.Namespace, nproc: int | None) -> int:
    from unisono.launch.hosts.target import run_worker_target
    from unisono.launch.spawn import spawn
    from unisono.launch.watching.json_lines import log_as_json

    if parsed.log_format == "json":
        log_as_json()
    try:
        spawn(
            run_worker_target,
            (parsed.target, parsed.arguments),
            nproc,
            backend=parsed.backend,
            start_method=parsed.start_method,
            timeout=timedelta(seconds=parsed.timeout),
            hang_timeout_s=parsed.hang_timeout,
            max_restarts=parsed.max_restarts or 0,
            grace_s=parsed.grace or 5.0,
            log_dir=parsed.log_dir,
            log_ranks=parsed.log_ranks,
            prefix=not parsed.no_prefix,
            log_format=parsed.log_format,
        )
    except Exception as error:
        return _tell(error, parsed.log_format) if _has_run(error) else _refuse(parsed, error)
    return 0


def _elastic_options(parsed: argparse.Namespace, place: AgentPlace | None) -> ElasticOptions | None:
    """The options of a run on several machines, or None for a run on this one.

    What is not given on the command line is taken from the environment.
    """
    if parsed.nnodes == (1, 1) and parsed.rdzv_endpoint is None:
        return None  # said outright
    nodes = parsed.nnodes or (_range(place.num_nodes) if place is not None else (1, 1))
    endpoint = parsed.rdzv_endpoint or (place.endpoint if place is not None else "")
    if nodes == (1, 1) and parsed.rdzv_endpoint is None:
        return None
    if not endpoint:
        raise ValueError(f"--nnodes {nodes[1]} needs --rdzv-endpoint host:port, where the machines meet")
    here_only = {
        "--hang-timeout": parsed.hang_timeout is not None,
        "--start-method": parsed.start_method is not None,
        "--log-format json": parsed.log_format == "json",
    }
    for name, is_given in here_only.items():
        if is_given:
            raise ValueError(f"{name} is for workers of one machine; with several there is --timeout")
    from unisono.backends import pick_backend
    from unisono.launch.hosts.elastic import ElasticOptions
    from unisono.launch.hosts.endpoint import split_endpoint

    family = pick_backend(parsed.backend)
    split_endpoint(endpoint)
    nproc = parsed.nproc or (place.nproc if place is not None else None)
    restarts = parsed.max_restarts if parsed.max_restarts is not None else (place.max_restarts if place else None)
    return ElasticOptions(
        nproc=nproc or family.device_count(),
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        endpoint=endpoint,
        run_id=parsed.rdzv_id or (place.run_id if place is not None else None) or "unisono",
        node_rank=parsed.node_rank if parsed.node_rank is not None else (place.node_rank if place else None),
        rdzv_conf=parsed.rdzv_conf,
        local_addr=parsed.local_addr,
        max_restarts=restarts if restarts is not None else (3 if nodes[0] < nodes[1] else 0),
        log_dir=parsed.log_dir,
        log_ranks=parsed.log_ranks,
        prefix=not parsed.no_prefix,
        backend=parsed.backend,
        timeout_s=parsed.timeout,
        grace_s=parsed.grace or 25.0,
        is_checked=parsed.checked,
    )


def _refuse(parsed: argparse.Namespace, error: Exception) -> int:
    print(f"unisono run: {error}\n`unisono run --help` shows how it is used", file=sys.stderr)
    return 2


def _has_run(error: Exception) -> bool:
    """Whether it is the run that failed, and not our call of `spawn` that was refused."""
    if isinstance(error, UnisonoError) or isinstance(error.__cause__, RemoteTraceback):
        return True
    return any(frame.name == "run_target" for frame in traceback.extract_tb(error.__traceback__))


def _tell(error: Exception, log_format: str) -> int:
    """Print what ended the run, once, without the launcher's own frames; the exit code."""
    from unisono.launch.exit_codes import exit_code_of
    from unisono.launch.watching import clock

    lost_step = isinstance(error, CollectiveMismatchError | BrokenWorldError)  # where, the script's lines say
    if isinstance(error, UnisonoError) and not isinstance(error, RemoteError) and not lost_step:
        text = f"unisono: {error}\n"  # it says all there is to say
    elif isinstance(error.__cause__, RemoteTraceback):
        text = without_launcher(error.__cause__.text)
    else:
        text = without_launcher("".join(traceback.format_exception(error)))
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    shown = "\n".join([text.rstrip(), *notes])
    if log_format == "json":
        facts = {"event": "failed", "error": f"{type(error).__name__}: {error}", "text": shown}
        shown = json.dumps({"time": clock.now(), **facts, "exit_code": exit_code_of(error)})
    print(shown, file=sys.stderr, flush=True)
    return exit_code_of(error)


def without_launcher(text: str) -> str:
    """A traceback's text without the frames that led from this package to the target."""
    parts = re.split(r"(?m)^(?=Traceback \(most recent call last\):$)", text)
    return "".join(_without_leading(part) for part in parts)


def _without_leading(part: str) -> str:
    head, *frames = re.split(r'(?m)^(?=  File ")', part)
    kept = list(dropwhile(_LEADING.match, frames))
    return head + "".join(kept or frames)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or greater")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or greater")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(_number(rank) for rank in text.split(","))


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of machines; write 2, or 1:2 for one or two")
    return low, high


def _settings(text: str) -> dict[str, str]:
    pairs = [each.partition("=") for each in text.split(",") if each]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list like last_call_timeout=5,keep_alive_interval=2")
    return {name.strip(): value.strip() for name, _, value in pairs}
