"""SLURM as an engine: a batch job with our agent on each node; bundle and outcomes are files that all nodes see."""

from __future__ import annotations

import logging
import os
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from unisono.arguments import check_integer
from unisono.comm.outcome import Outcome
from unisono.engines.machine import run_machine
from unisono.engines.piped import show
from unisono.errors import UnisonoError, describe_exit
from unisono.launch.hosts.environment import node_of_step
from unisono.launch.starting.process_ends import interpreter_command
from unisono.protocols import Run

_PROGRAM = "from unisono.engines.slurm import run_node; run_node()"
_LOOK_S = 1.0  # between two questions to the controller
_ANSWER_S = 30.0  # for an answer; it may hang
_SUBMIT_S = 120.0  # for sbatch, which waits for one that is busy
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_WRITTEN_S = 10.0  # from a job's end until what it has written is seen here

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slurm:
    """A separate batch job for each call.

    Attributes:
        nodes: the number of nodes.
        directory: where the files of the job are; on a file system that all nodes share, and not one that others may
            write to, unless it is sticky, like /tmp.
        options: for `sbatch`, such as ("--gpus-per-node=4", "--time=60", "--partition=a").
        variables: the environment variables that are sent, besides those that sbatch exports.
    """

    nodes: int = 1
    directory: str = "unisono-slurm"
    options: Sequence[str] = ()
    variables: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_integer(self.nodes, "nodes", 1, "pass a number of nodes")

    def machines_for(self, nprocs: int) -> int:
        return self.nodes

    def start(self, bundle: bytes, machines: int, per_machine: int) -> Run:
        directory = Path(self.directory).absolute() / uuid4().hex[:12]
        directory.parent.mkdir(0o700, parents=True, exist_ok=True)
        _check_kept(directory.parent)
        directory.mkdir(0o700)  # the bundle has the run's secret
        (directory / "bundle").write_bytes(bundle)
        command = shlex.join([*interpreter_command(_PROGRAM), str(directory), str(per_machine)])
        script = directory / "job.sh"
        script.write_text(f"#!/bin/bash\nexec srun --ntasks-per-node=1 --kill-on-bad-exit=0 {command}\n")
        asked = ["sbatch", "--parsable", f"--nodes={machines}", "--ntasks-per-node=1", f"--output={directory}/output"]
        try:
            done = _call(*asked, *self.options, str(script), timeout_s=_SUBMIT_S)
        except subprocess.TimeoutExpired:
            (directory / "bundle").unlink()
            raise UnisonoError(
                f"sbatch has not answered within {_SUBMIT_S:.0f} s; `scontrol ping` says whether SLURM's controller is "
                "up. Call spawn again when it is: a job that it has queued all the same ends at once, without its files"
            ) from None
        if done.returncode:
            raise UnisonoError(f"sbatch: {done.stderr.strip() or describe_exit(done.returncode)}")
        return _SlurmRun(done.stdout.strip().partition(";")[0], directory, machines)


def _check_kept(directory: Path) -> None:
    """Refuse a directory where others can replace what this user puts there: code that the nodes run. Those above it
    may belong to a group, like a project's. UnisonoError."""
    place = directory.resolve()
    for each in (place, *place.parents, *directory.parents):
        found = each.stat()
        may_write = found.st_mode & (0o022 if each == place else 0o002) and not found.st_mode & stat.S_ISVTX
        is_foreign = each == place and found.st_uid not in (0, os.geteuid())
        if may_write or is_foreign:
            what = f"belongs to user {found.st_uid}" if is_foreign else f"has mode {stat.S_IMODE(found.st_mode):04o}"
            raise UnisonoError(
                f"Slurm(directory={str(directory)!r}): {each} {what}, so that other users can replace there what the "
                f"nodes run; {'' if is_foreign else f'chmod go-w {each}, or '}pass a directory of your own"
            )


def _call(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


class _SlurmRun:
    """A job; a `Run`. What the workers print is shown as it comes."""

    def __init__(self, job: str, directory: Path, machines: int) -> None:
        self._job, self._directory = job, directory
        self._missing = set(range(machines))
        self._shown = 0
        self._state = "PENDING"  # "" where the controller no longer knows the job
        self._is_over_since: float | None = None

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        time.sleep(max(timeout_s, _LOOK_S))
        has_ended = self._has_ended()
        self._show()
        for number in sorted(self._missing):
            with suppress(FileNotFoundError):
                data = (self._directory / f"outcome-{number}").read_bytes()
                self._missing.discard(number)
                yield number, data
        if has_ended:
            self._is_over_since = self._is_over_since or time.monotonic()
            if time.monotonic() - self._is_over_since > _WRITTEN_S:
                for number in sorted(self._missing):
                    lost = UnisonoError(
                        f"node {number} of SLURM's job {self._job} has sent no result, and the job is "
                        f"{self._state or 'unknown'}; its output is in {self._directory}/output"
                    )
                    yield number, Outcome[None].failure(lost).to_bytes()
                self._missing.clear()

    def ask_to_stop(self) -> None:
        # scancel would wait for a job that has not begun, where nothing can be asked.
        self._cancel(*(["--signal=TERM"] if self._state == "RUNNING" else []))

    def kill(self) -> None:
        self._show()
        if self._missing or not self._wait_ended(_WRITTEN_S):
            self._cancel()
            self._wait_ended(60.0)  # KillWait is 30 s by default

    def _wait_ended(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (has_ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return has_ended

    def _cancel(self, *options: str) -> None:
        try:
            _call("scancel", *options, self._job, timeout_s=_ANSWER_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "SLURM's job %s may run on: scancel has not answered within %g s; cancel it when the controller is up",
                *(self._job, _ANSWER_S),
            )

    def _has_ended(self) -> bool:
        """Ask the controller, which may be away for a while: its last answer holds until the next one."""
        asked = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self._job}"]
        with suppress(subprocess.TimeoutExpired):
            done = _call(*asked, timeout_s=_ANSWER_S)
            if not done.returncode or "Invalid job id" in done.stderr:  # it has forgotten the job
                self._state = done.stdout.strip()
        return not self._state or self._state.startswith(_ENDED)

    def _show(self) -> None:
        with suppress(FileNotFoundError), (self._directory / "output").open("rb") as file:
            file.seek(self._shown)
            show(file.read())
            self._shown = file.tell()


def run_node() -> None:
    """A task of the job's step: one machine of a run; its arguments are the directory and the number of workers."""
    directory, per_machine = Path(sys.argv[1]), int(sys.argv[2])
    number, count, endpoint = node_of_step()
    outcome = run_machine((directory / "bundle").read_bytes(), number, count, per_machine, endpoint)
    # By renaming: the caller must not read half of it.
    written = directory / f".outcome-{number}"
    written.write_bytes(outcome)
    written.rename(directory / f"outcome-{number}")
