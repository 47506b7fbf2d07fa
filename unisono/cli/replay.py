"""`unisono replay`: repeats a step of a recorded run with virtual ranks, with its bits, on any number of devices."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from bdb import BdbQuit
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.launch.run_target import Target
    from unisono.report.digests import RunDigests
    from unisono.training.replay import Replay

_NOT_REPLAYED = 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="a step of a recorded run with virtual ranks once more, with its bits, on any number of devices",
        description="Starts the script of a run with Accelerator(virtual_ranks=...) once more, from the last "
        "checkpoint before a step, compares digests with those of its record, and ends after the step. The run's files "
        "stay as they are. Exit code: 0 if all that was compared is equal, 1 if some step differs, 2 if the step "
        "cannot be replayed.",
    )
    parser.add_argument("directory", metavar="RUN", help="the run's directory, or a log directory: its latest run")
    parser.add_argument("--step", metavar="S", type=int, required=True, help="the step of the optimizer, from 1")
    parser.add_argument("-n", "--nproc", metavar="N", type=int, default=1, help="devices, up to virtual_ranks; else 1")
    parser.add_argument("--pdb", action="store_true", help="a debugger in front of the step, on one device")
    parser.add_argument(
        "--optimizer", metavar="K", type=int, default=0, help="count its steps: 0 is the first that was prepared"
    )
    parser.add_argument("--backend", metavar="B", help="the device family; else that of the run, if it is here")
    parser.add_argument("--cwd", metavar="DIR", help="start the script there, not where the run was started")
    parser.add_argument("--args", nargs=argparse.REMAINDER, default=[], help="last: further arguments of the script")
    parser.set_defaults(parser=parser, run=run)


def run(parsed: argparse.Namespace) -> int:
    from unisono.cli.run import has_run, print_failure  # here, like everything that imports torch
    from unisono.launch.job import private_directory
    from unisono.launch.options import Output
    from unisono.launch.run_target import check_target, variables_of_machine, variables_of_run
    from unisono.launch.spawn import spawn
    from unisono.report.digests import read_digests

    with contextlib.ExitStack() as stack:
        try:
            recorded = read_digests(parsed.directory, needs_steps=False)
            _check(parsed, recorded)
            replay, beginning = _plan(parsed, recorded)
            target = _target_of(parsed, replay)
            stack.enter_context(contextlib.chdir(parsed.cwd or replay.kept))
            check_target(target)
            replay = replace(replay, scratch=str(stack.enter_context(private_directory("replay"))))
        except (OSError, ValueError, ImportError) as error:
            print(f"unisono replay: {error}", file=sys.stderr)
            return _NOT_REPLAYED
        print(f"unisono replay: to step {parsed.step} from {beginning}", file=sys.stderr)
        if parsed.step > recorded.last:
            has = f"digests up to step {recorded.last}" if recorded.steps else "no digests"
            print(f"unisono replay: the record has {has}", file=sys.stderr)
        args = replay, target, {**variables_of_run(None, 0), **variables_of_machine()}
        output = Output(prefix="several" if parsed.nproc > 1 else False)
        try:
            found = spawn(replay_rank, args, parsed.nproc, backend=_family_of(parsed, recorded), output=output)
        except Exception as error:
            print_failure(error) if has_run(error) else print(f"unisono replay: {error}", file=sys.stderr)
            return _NOT_REPLAYED
    code, text = found[0]
    print(text)
    return int(code)


def replay_rank(rank: int, replay: Replay, target: Target, variables: dict[str, str]) -> tuple[int, str]:
    """Replay as a worker of `spawn`; returns `replay.verdict()`."""
    from unisono.launch.run_target import run_worker_target
    from unisono.world import current_world

    with replay.running(current_world()), contextlib.suppress(BdbQuit):
        run_worker_target(rank, target, variables)
    return replay.verdict()


def _check(parsed: argparse.Namespace, recorded: RunDigests) -> None:
    """ValueError: what was asked for does not fit the run, or this machine."""
    from unisono.devices import pick_backend

    count, optimizers = recorded.settings.get("virtual_ranks"), {optimizer for _, optimizer in recorded.steps}
    if not recorded.command:
        raise ValueError(
            f"the record in {parsed.directory} does not say how the run was started: only unisono run records that; "
            "start the script by unisono run --log-dir logs script.py, even if it calls spawn()"
        )
    if parsed.step < 1:
        raise ValueError(f"--step {parsed.step}: steps are numbered from 1")
    last = _last_step(parsed.directory)
    if last is not None and parsed.step > last and not parsed.args:
        raise ValueError(
            f"--step {parsed.step}: the run has finished with step {last}; pass one up to that, or let the script "
            "train longer by --args"
        )
    if not 1 <= parsed.nproc <= count:
        raise ValueError(f"-n {parsed.nproc}: the run has virtual_ranks={count}; pass a number from 1 to {count}")
    if parsed.pdb and parsed.nproc > 1:
        raise ValueError(f"--pdb needs the terminal, which one device has; leave out -n {parsed.nproc}")
    if parsed.optimizer < 0 or (optimizers and parsed.optimizer not in optimizers):
        known = ", ".join(map(str, sorted(optimizers))) or "0"
        raise ValueError(
            f"--optimizer {parsed.optimizer}: they are numbered from 0, in the order of prepare(), and the record has "
            f"the steps of {known}; pass one of these"
        )
    if parsed.cwd and not os.path.isdir(parsed.cwd):
        raise ValueError(f"--cwd {parsed.cwd} is no directory; pass the one to start the script in")
    if parsed.backend:
        pick_backend(parsed.backend)


def _last_step(directory: str) -> int | None:
    """The last step of a run that has finished; None of one that has failed, or whose record does not say."""
    from unisono.report.digests import run_in
    from unisono.report.run import read_run

    with contextlib.suppress(OSError):
        first = read_run(run_in(directory)).ranks[0]
        if first.end == "finished" and first.samples:
            return first.samples[-1].get("done")
    return None


def _plan(parsed: argparse.Namespace, recorded: RunDigests) -> tuple[Replay, str]:
    """What to replay, from the last checkpoint that is there; and from where, in words. ValueError: there is no
    checkpoint, and the run did not begin with step 1."""
    from unisono.training.replay import Replay

    before = recorded.command["directory"]
    is_there = os.path.exists(os.path.join(before, "" if recorded.command["is_module"] else recorded.command["target"]))
    directory = os.path.realpath(before if is_there else parsed.cwd or ".")  # in a copy, where we are
    path, begin = "", 0
    for each in sorted(recorded.checkpoints, key=lambda each: -each.step_of(parsed.optimizer)):
        begin = each.step_of(parsed.optimizer)
        if begin < parsed.step and (path := _find(each.path, each.mark, before, directory)):
            break
    if not path and (origin := recorded.origin) is not None:
        begin = origin.step_of(parsed.optimizer)
        way = f"no checkpoint before step {parsed.step} is there any more; put one of them back"
        if parsed.step <= begin:
            way = "replay the run that has saved it"
        raise ValueError(f"the run begins with step {begin + 1}, after {origin.path}; {way}")
    place = f"step {begin + 1}, which follows {path}" if path else "the start: no checkpoint before that step is there"
    return Replay(parsed.step, parsed.optimizer, path, "", directory, recorded, parsed.pdb), place


def _find(path: str, mark: str, before: str, directory: str) -> str:
    """The path of that checkpoint, if it is still what was saved: the same, or in the copy of the run's directory; ""
    if it is gone."""
    from unisono.checkpoint.directory import read_manifest
    from unisono.checkpoint.folders import folder_at
    from unisono.errors import CheckpointError

    places = [path]
    if Path(path).is_relative_to(before):
        places.append(os.path.join(directory, Path(path).relative_to(before)))
    for each in places:
        with contextlib.suppress(CheckpointError, OSError, ImportError):
            if read_manifest(folder_at(each)).directory == mark:
                return each
    return ""


def _target_of(parsed: argparse.Namespace, replay: Replay) -> Target:
    """The script, found from any directory that it changes to, or the module. ValueError: there is no such script."""
    from unisono.launch.run_target import Target

    command = replay.recorded.command
    name, argv = command["target"], (*command["argv"], *parsed.args)
    if command["is_module"]:
        sys.path.insert(0, replay.kept)
        return Target(name, argv, is_module=True)
    path = os.path.join(replay.kept, name)
    if not os.path.isfile(path):
        raise ValueError(
            f"the script {name} is neither in {command['directory']}, where the run was started, nor in {replay.kept}; "
            "go to the directory that it is in, or pass it by --cwd"
        )
    return Target(path, argv)


def _family_of(parsed: argparse.Namespace, recorded: RunDigests) -> str | None:
    from unisono.devices import get_backend

    return parsed.backend or (recorded.backend if get_backend(recorded.backend).is_available() else None)
