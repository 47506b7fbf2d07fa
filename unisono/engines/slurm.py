"""SLURM as an engine: a batch job with our agent on each node; bundle and outcomes are files that all nodes see."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from unisono.arguments import check_integer
from unisono.engines.machine import run_machine
from unisono.engines.piped import show
from unisono.errors import UnisonoError, describe_exit
from unisono.launch.hosts.environment import node_of_step
from unisono.launch.starting.process_ends import interpreter_command
from unisono.outcome import Outcome
from unisono.protocols import Run

_PROGRAM = "from unisono.engines.slurm import run_node; run_node()"
_LOOK_S = 1.0  # between two questions to the controller
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_WRITTEN_S = 10.0  # from a job's end until what it has written is seen here


@dataclass(frozen=True)
class Slurm:
    """A batch job of its own for each call.

    Attributes:
        nodes: the number of nodes.
        directory: where the files of the job are; on a file system that all nodes share.
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
        directory.parent.mkdir(0o700, parents=True, exist_ok=True)  # who can write to it can replace what is in it
        directory.mkdir(0o700)  # the bundle has the run's secret
        (directory / "bundle").write_bytes(bundle)
        command = shlex.join([*interpreter_command(_PROGRAM), str(directory), str(per_machine)])
        script = directory / "job.sh"
        script.write_text(f"#!/bin/bash\nexec srun --ntasks-per-node=1 --kill-on-bad-exit=0 {command}\n")
        asked = ["sbatch", "--parsable", f"--nodes={machines}", "--ntasks-per-node=1", f"--output={directory}/output"]
        done = subprocess.run([*asked, *self.options, str(script)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnisonoError(f"sbatch: {done.stderr.strip() or describe_exit(done.returncode)}")
        return _SlurmRun(done.stdout.strip().partition(";")[0], directory, machines)


class _SlurmRun:
    """A job; a `Run`. What the workers print is shown as it comes."""

    def __init__(self, job: str, directory: Path, machines: int) -> None:
        self._job, self._directory = job, directory
        self._missing = set(range(machines))
        self._shown = 0
        self._state = "PENDING"  # "" where the controller does not know the job any more
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
        # scancel would wait for a job that has not begun, which has nobody to ask.
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
        subprocess.run(["scancel", *options, self._job], capture_output=True, check=False)

    def _has_ended(self) -> bool:
        """Ask the controller, which may be away for a while: what it said last is true until it answers."""
        asked = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self._job}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
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
