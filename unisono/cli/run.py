"""`unisono run`: a script, a module or a function as one worker per device, here or on several machines.

On one machine it is `spawn` with the script as its function. With several it is torch's agent, one on each machine
(`launch/hosts/elastic.py`); what the machines need to know of one another is given by options, or found in the
environment that Kubernetes or a SLURM step leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from datetime import timedelta
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from unisono.cli import run_options
from unisono.cli.run_options import endpoint_of, node_range
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
    from unisono.launch.target import Target

_LEADING = re.compile(rf'  File "({re.escape(os.path.dirname(os.path.dirname(__file__)))}/|<frozen runpy>)')


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `unisono`."""
    parser = run_options.add_parser(subparsers)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code."""
    is_here = parsed.standalone or (parsed.nnodes in (None, (1, 1)) and endpoint_of(parsed) is None)
    if is_here and parsed.nproc != 1 and parsed.start_method in (None, "zygote"):
        warm_early()  # it imports torch while this process does, and has time for nothing where an agent is to be run
    from unisono.backends.per_node import workers_per_node
    from unisono.launch.hosts.environment import announced_agent
    from unisono.launch.target import Target, check_target

    target = Target(parsed.target, tuple(parsed.arguments), parsed.module)
    try:
        check_target(target)
        if isinstance(parsed.nproc, str):
            parsed.nproc, parsed.backend = workers_per_node(parsed.nproc, parsed.backend)
        options = _elastic_options(parsed, announced_agent())
    except (ValueError, ImportError) as error:
        return _refuse(parsed, error)
    if options is None:
        return _run_here(parsed, target)
    from unisono.launch.hosts.elastic import run_elastic

    return run_elastic(options, target)


def _run_here(parsed: argparse.Namespace, target: Target) -> int:
    from unisono.backends import pick_backend
    from unisono.launch.spawn import spawn
    from unisono.launch.target import run_worker_target, variables_of_run
    from unisono.launch.watching.json_lines import log_as_json

    if parsed.log_format == "json":
        log_as_json()
    try:
        nproc = parsed.nproc or pick_backend(parsed.backend).device_count()
        spawn(
            run_worker_target,
            (target, variables_of_run(parsed.rdzv_id, parsed.max_restarts or 0)),
            nproc,
            backend=parsed.backend,
            start_method=parsed.start_method,
            num_threads=parsed.num_threads,
            num_loader_workers=parsed.num_loader_workers,
            pin_cores=parsed.pin_cores,
            timeout=timedelta(seconds=parsed.timeout),
            hang_timeout_s=parsed.hang_timeout,
            max_restarts=parsed.max_restarts or 0,
            grace_s=parsed.grace or 5.0,
            log_dir=parsed.log_dir,
            log_ranks=parsed.log_ranks,
            prefix=nproc > 1 and not parsed.no_prefix,  # of one worker alone, stdout stays a terminal
            log_format=parsed.log_format,
        )
    except Exception as error:
        return _tell(error, parsed.log_format) if _has_run(error) else _refuse(parsed, error)
    return 0


def _elastic_options(parsed: argparse.Namespace, place: AgentPlace | None) -> ElasticOptions | None:
    """The options of a run on several machines, or None for a run on this one.

    What is not given on the command line is taken from the environment.
    """
    given = endpoint_of(parsed)
    if parsed.standalone or (parsed.nnodes == (1, 1) and given is None):
        return None  # said outright
    nodes = parsed.nnodes or (node_range(place.num_nodes) if place is not None else (1, 1))
    endpoint = given or (place.endpoint if place is not None else "")
    if nodes == (1, 1) and given is None:
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
    from unisono.launch.arguments import pick_cores, pick_num_threads
    from unisono.launch.hosts.elastic import ElasticOptions
    from unisono.launch.hosts.endpoint import split_endpoint

    family = pick_backend(parsed.backend)
    split_endpoint(endpoint)
    nproc = parsed.nproc or (place.nproc if place is not None else None) or family.device_count()
    restarts = parsed.max_restarts if parsed.max_restarts is not None else (place.max_restarts if place else None)
    return ElasticOptions(
        nproc=nproc,
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
        num_threads=pick_num_threads(parsed.num_threads, parsed.num_loader_workers, nproc),
        cores=pick_cores(parsed.pin_cores, nproc),
        lost_after_s=parsed.lost_after,
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
