"""`unisono run`: a script or a module as one worker per device, here or on several machines.

On one machine it is `spawn` with the script as its function. On several, each has torch's agent
(`launch/hosts/run_agent.py`) and its part of the same workers; what the machines need to know about one another comes
from options, or from the environment that Kubernetes or a SLURM step sets.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unisono import errors
from unisono.cli import run_options
from unisono.cli.run_options import endpoint_of, node_range
from unisono.errors import RemoteError, RemoteTraceback, UnisonoError, WorkerDiedError, WorkerHungError
from unisono.launch.starting.warm_at_import import warm_early

if TYPE_CHECKING:
    from unisono.launch.hosts.agent import MachineOptions
    from unisono.launch.hosts.environment import AgentPlace
    from unisono.launch.options import SpawnOptions
    from unisono.launch.run_target import Target


def add_parser(subparsers: Any) -> None:
    run_options.add_parser(subparsers).set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    is_here = parsed.standalone or (parsed.nnodes in (None, (1, 1)) and endpoint_of(parsed) is None)
    if not (is_here and parsed.nproc == 1) and parsed.start_method in (None, "zygote"):
        warm_early(parsed.inherited)  # it imports torch while this process does
    with _ended_by_interrupts():
        from unisono.devices.cores import workers_per_node
        from unisono.launch.hosts.environment import announced_agent
        from unisono.launch.run_target import Target, check_target

    target = Target(parsed.target, tuple(parsed.arguments), parsed.module)
    if parsed.nproc is None and {"-n", "--nproc-per-node"} & {*parsed.arguments}:
        print(
            f"unisono run: {parsed.target} gets the -n that follows its name; unisono run takes only options that come "
            "before the name",
            file=sys.stderr,
        )
    try:
        check_target(target)
        if parsed.preload:
            _preload(parsed, target)
        place = announced_agent()
        machines = _machine_options(parsed, place)
        if isinstance(parsed.nproc, str):
            parsed.nproc, parsed.backend = workers_per_node(parsed.nproc, parsed.backend)
    except (ValueError, ImportError, argparse.ArgumentTypeError) as error:
        return _print_refusal(error)
    try:
        if machines is None:
            _run_here(parsed, target)
        else:
            _run_on_machines(parsed, target, machines)
    except Exception as error:
        return print_failure(error) if has_run(error) else _print_refusal(error)
    from unisono.launch.watching.log_directory import made

    if parsed.log_dir is not None and made:  # a launcher's worker makes none
        _print_end(made[-1], time.monotonic() - began)
    return 0


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end this process at once while torch is imported, whose native code loses a KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    is_default = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, handler)


def _preload(parsed: argparse.Namespace, target: Target) -> None:
    from unisono.launch.options import Options
    from unisono.launch.run_target import check_preload
    from unisono.launch.starting.zygote_client import preload

    check_preload(target, parsed.preload)
    if Options(start_method=parsed.start_method).chosen_start_method != "zygote":
        raise ValueError(
            "--preload needs the start method zygote: other workers are fresh interpreters, which share no imports"
        )
    preload(parsed.preload)


def _print_end(directory: Path, seconds: float) -> None:
    """What the run was, in one line; without numbers, where a record is not whole."""
    from unisono.report.run import read_run

    with contextlib.suppress(OSError):  # nothing is recorded: a full disk, which was reported
        run = read_run(directory)
        what = "its record is incomplete"
        if not run.missing and all(each.end is not None for each in run.ranks):
            steps, rate = max(each.steps for each in run.report.ranks), run.report.samples_per_second
            restarts = run.restarts.summary and f" in the last attempt; {run.restarts.summary}"
            what = f"{steps:,} steps, {rate:,.0f} samples/s in loops{restarts}"
        saved = next((f"checkpoint {each.checkpoint}; " for each in run.ranks if each.checkpoint), "")
        print(
            f"unisono run: finished in {seconds:,.1f} s, {what}; {saved}unisono report {shlex.quote(str(directory))}",
            file=sys.stderr,
        )


def _run_here(parsed: argparse.Namespace, target: Target) -> None:
    from unisono.devices import pick_backend
    from unisono.launch.hosts.environment import within
    from unisono.launch.run_target import run_worker_target, variables_of_machine, variables_of_run
    from unisono.launch.spawn import spawn
    from unisono.launch.starting.process_ends import close_files

    nproc = parsed.nproc or pick_backend(parsed.backend).device_count()
    if nproc == 1:  # in this process, after the exit functions of the script; runpy keeps its globals, and their files
        atexit.register(close_files, [])
    args = target, {**variables_of_run(parsed.rdzv_id, parsed.max_restarts or 0), **variables_of_machine()}
    # A single worker's stdout stays a terminal.
    prefix: Literal["several", False] = "several" if nproc > 1 and not parsed.no_prefix else False
    # "One machine", if given by hand, holds whatever a launcher's variables say.
    with within() if parsed.standalone or parsed.nnodes is not None else contextlib.nullcontext():
        spawn(run_worker_target, args, nproc, **_options_of(parsed, parsed.grace or 5.0, prefix))


def _run_on_machines(parsed: argparse.Namespace, target: Target, machines: MachineOptions) -> None:
    from unisono.comm.pickling import pickle_call
    from unisono.comm.selection import group_backend
    from unisono.devices import pick_backend
    from unisono.launch.hosts.run_agent import run_agent
    from unisono.launch.options import Options
    from unisono.launch.run_target import run_worker_target, variables_of_run
    from unisono.launch.settings import Settings
    from unisono.launch.spawn import check_nprocs, make_job

    family = pick_backend(parsed.backend)
    group_backend(family, parsed.process_group)
    count = check_nprocs(parsed.nproc, family, parsed.process_group)
    given = _options_of(parsed, parsed.grace or 25.0, not parsed.no_prefix)
    args = target, variables_of_run(machines.run_id, given["max_restarts"])
    call = pickle_call(run_worker_target, args, Settings.read())
    run_agent(make_job(call, count, family, Options(**given)), machines).unwrap()


def _options_of(parsed: argparse.Namespace, grace_s: float, prefix: bool | Literal["several"]) -> SpawnOptions:
    """The options of the command line as those of `spawn`."""
    from unisono.launch.options import Cores, Output

    cores = Cores(parsed.num_threads, parsed.num_loader_workers, parsed.numa_binding)
    return {
        "backend": parsed.backend,
        "start_method": parsed.start_method,
        "cores": None if cores == Cores() else cores,
        "timeout": parsed.timeout,
        "hang_timeout_s": parsed.hang_timeout,
        "max_restarts": parsed.max_restarts or 0,
        "grace_s": grace_s,
        "output": Output(parsed.log_dir, parsed.log_ranks, prefix, parsed.profile),
        "process_group": parsed.process_group,
        "snapshot_every": parsed.snapshot_every,
    }


def _machine_options(parsed: argparse.Namespace, place: AgentPlace | None) -> MachineOptions | None:
    """The options of a run on several machines; None for a run on this one. What the command line does not say, also of
    the numbers in `parsed`, is taken from the environment."""
    for name in ("nproc", "node_rank", "max_restarts"):
        if getattr(parsed, name) is None:
            setattr(parsed, name, getattr(place, name, None))
    given = endpoint_of(parsed)
    is_one = parsed.nnodes == (1, 1) or (parsed.nnodes is None and place is None)
    if given is not None and given.endswith(":0") and is_one:
        given = None  # torchrun's way to let one machine choose a port
        parsed.nnodes = (1, 1)
    if parsed.standalone or (parsed.nnodes == (1, 1) and given is None):
        return None  # explicitly requested
    nodes = parsed.nnodes or (node_range(place.num_nodes) if place is not None else (1, 1))
    endpoint = given or (place.endpoint if place is not None else "")
    if nodes == (1, 1) and given is None:
        return None
    if not endpoint:
        raise ValueError(f"--nnodes {nodes[1]} needs --rdzv-endpoint host:port, where the machines meet")
    if (parsed.node_rank or 0) >= nodes[1]:
        raise ValueError(f"--node-rank {parsed.node_rank} does not exist; of {nodes[1]} machines the first is 0")
    from unisono.launch.hosts.agent import MachineOptions
    from unisono.launch.hosts.endpoint import split_endpoint
    from unisono.launch.hosts.secret import secret_of_run

    split_endpoint(endpoint)
    if parsed.max_restarts is None and nodes[0] < nodes[1]:
        parsed.max_restarts = 3  # a run that shrinks restarts
    run_id = parsed.rdzv_id or (place.run_id if place is not None else None) or "unisono"
    return MachineOptions(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        endpoint=endpoint,
        run_id=run_id,
        node_rank=parsed.node_rank,
        rdzv_conf=parsed.rdzv_conf,
        local_addr=parsed.local_addr,
        lost_after_s=parsed.lost_after,
        secret=secret_of_run(parsed.rdzv_secret_file, run_id, endpoint, nodes[1]),
    )


def _print_refusal(error: Exception) -> int:
    print(f"unisono run: {error}\n`unisono run --help` shows how it is used", file=sys.stderr)
    return 2


def has_run(error: Exception) -> bool:
    """Whether the run itself failed, rather than the arguments of our call of `spawn`."""
    return isinstance(error, UnisonoError) or _is_of_script(error)


def _is_of_script(error: Exception) -> bool:
    """Whether the script raised it, in a worker or in this process."""
    if isinstance(error, WorkerDiedError | WorkerHungError):
        return False
    if isinstance(error.__cause__, RemoteTraceback):
        return True
    return any(frame.name == "run_target" for frame in traceback.extract_tb(error.__traceback__))


def _page_of(kind: type[UnisonoError]) -> str:
    from importlib.metadata import metadata

    links = dict(each.split(", ", 1) for each in metadata("unisono").get_all("Project-URL") or ())
    return f"causes, and what to do: {links.get('Documentation', 'docs/')}errors/#{kind.__name__.lower()}"


def print_failure(error: Exception) -> int:
    """Print what ended the run, once, without the launcher's own frames; return the exit code."""
    from unisono.comm.outcome import traceback_of
    from unisono.comm.stacks import fold_frames
    from unisono.launch.messages import shows_all_frames
    from unisono.launch.run_target import exit_code_of

    is_of_script = _is_of_script(error)
    if is_of_script and isinstance(error.__cause__, RemoteTraceback):
        text = error.__cause__.text
    elif is_of_script or not isinstance(error, UnisonoError) or isinstance(error, RemoteError):
        text = traceback_of(error)
    else:
        text = f"unisono: {error}\n"  # complete without a traceback
    text = text if shows_all_frames() else fold_frames(text)
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    kind = type(error)
    # The page has what users catch by name.
    if isinstance(error, UnisonoError) and kind is not UnisonoError and getattr(errors, kind.__name__, None) is kind:
        notes.append(_page_of(type(error)))
    print("\n".join([text.rstrip(), *notes]), file=sys.stderr, flush=True)
    return exit_code_of(error)
