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
from unisono.errors import UnisonoError, describe_exit
from unisono.launch.hosts.environment import node_of_step
from unisono.outcome import Outcome
from unisono.protocols import Run

_PROGRAM = ("-c", "from unisono.engines.slurm import run_node; run_node()")
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
        directory.mkdir(parents=True)
        (directory / "bundle").write_bytes(bundle)
        command = shlex.join([sys.executable, *_PROGRAM, str(directory), str(per_machine)])
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
        self._is_over_since: float | None = None

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        time.sleep(max(timeout_s, _LOOK_S))
        state = self._state()
        self._show()
        for number in sorted(self._missing):
            with suppress(FileNotFoundError):
                data = (self._directory / f"outcome-{number}").read_bytes()
                self._missing.discard(number)
                yield number, data
        if state.startswith(_ENDED) or not state:
            self._is_over_since = self._is_over_since or time.monotonic()
            if time.monotonic() - self._is_over_since > _WRITTEN_S:
                for number in sorted(self._missing):
                    lost = UnisonoError(
                        f"node {number} of SLURM's job {self._job} has sent no result, and the job is "
                        f"{state or 'unknown'}; its output is in {self._directory}/output"
                    )
                    yield number, Outcome[None].failure(lost).to_bytes()
                self._missing.clear()

    def ask_to_stop(self) -> None:
        self._cancel("--signal=TERM")

    def kill(self) -> None:
        self._show()
        if self._state().startswith(_ENDED) or not self._state():
            return
        self._cancel()
        deadline = time.monotonic() + 60.0  # KillWait, by default 30 s
        while self._state() and not self._state().startswith(_ENDED) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _cancel(self, *options: str) -> None:
        subprocess.run(["scancel", *options, self._job], capture_output=True, check=False)

    def _state(self) -> str:
        """The job's state; "" where the controller does not know it any more."""
        asked = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self._job}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def _show(self) -> None:
        with suppress(FileNotFoundError), (self._directory / "output").open() as file:
            file.seek(self._shown)
            sys.stdout.write(file.read())
            sys.stdout.flush()
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
