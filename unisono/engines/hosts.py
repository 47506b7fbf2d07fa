"""Machines that need no scheduler: `Hosts`, reached by SSH, and `Local`, several agents on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.arguments import check_integer
from unisono.engines.piped import PROGRAM, PipedMachine, PipedRun, local_command
from unisono.protocols import Run


def start_piped(
    commands: Sequence[Sequence[str]], names: Sequence[str], bundle: bytes, per_machine: int, host: str
) -> PipedRun:
    """Start a machine by each command; the first one serves the endpoint, at `host`."""
    run = PipedRun()
    endpoint = f"{host}:0"
    for number, (command, name) in enumerate(zip(commands, names, strict=True)):
        machine = PipedMachine(command, name, lambda data, number=number: run.ended.put((number, data)))  # type: ignore[misc]
        run.machines.append(machine)
        try:
            endpoint = machine.begin(bundle, number, len(commands), per_machine, endpoint)
        except BaseException:
            run.kill()
            raise
    return run


@dataclass(frozen=True)
class Local:
    """Several agents on this machine, as if it were several machines: to try out a program, and for tests.

    Attributes:
        machines: their number.
    """

    machines: int = 2
    variables: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_integer(self.machines, "machines", 1, "pass a number of machines")

    def machines_for(self, nprocs: int) -> int:
        return self.machines

    def start(self, bundle: bytes, machines: int, per_machine: int) -> Run:
        commands = [local_command()] * machines
        names = [f"machine {number} of {machines}" for number in range(machines)]
        return start_piped(commands, names, bundle, per_machine, "127.0.0.1")


@dataclass(frozen=True)
class Hosts:
    """Machines that this one reaches by the system's `ssh`, without a password.

    Attributes:
        hosts: their names, as for `ssh`; the others reach the first one by that name, too.
        python: the interpreter there, with Unisono installed; by default that of this process.
        variables: the environment variables that are sent.
        options: for `ssh`, such as ("-p", "2222").

    Raises:
        ValueError: there is no host.
    """

    hosts: Sequence[str]
    python: str = sys.executable
    variables: Sequence[str] = ()
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str) or not self.hosts:
            raise ValueError(f"hosts={self.hosts!r} names no machines; pass their names, as in ['node1', 'node2']")

    def machines_for(self, nprocs: int) -> int:
        return len(self.hosts)

    def start(self, bundle: bytes, machines: int, per_machine: int) -> Run:
        there = shlex.join([self.python, "-P", "-c", PROGRAM.format(parent="os.getppid()")])
        options = ["-T", "-o", "BatchMode=yes", *self.options, "-o", "ConnectTimeout=30"]  # the first value counts
        commands = [["ssh", *options, host, there] for host in self.hosts]
        return start_piped(commands, list(self.hosts), bundle, per_machine, self.hosts[0].rpartition("@")[2])
