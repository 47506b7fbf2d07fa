"""A machine of a run at the end of a pipe: a process here, or one that `ssh` starts there.

*Threads:* one per machine reads its output: the workers' lines, which go to this process's standard output, and the
outcome. Standard error is inherited.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from weakref import WeakSet

from unisono.comm.outcome import Outcome
from unisono.engines.machine import MARK
from unisono.errors import UnisonoError, describe_exit
from unisono.launch.starting.process_ends import interpreter_command

# The parent is known before the imports, which take seconds: afterwards it may be the one that has adopted an orphan.
PROGRAM = "import os; parent = {parent}; from unisono.engines.machine import main; main(parent)"
_ENDPOINT_S = 120.0  # for a machine to begin, which imports torch; and to take the next part of the bundle


def local_command() -> list[str]:
    """The command of a machine that is a child of this process."""
    return interpreter_command(PROGRAM.format(parent=os.getpid()))


class PipedMachine:
    """Runs `machine.py` by a command, with its standard streams at this end; `where` is the machine, for errors.
    `on_end` is called with the outcome as bytes, in another thread."""

    def __init__(self, command: Sequence[str], where: str, on_end: Callable[[bytes], None]) -> None:
        self._where, self._on_end = where, on_end
        self._endpoint: SimpleQueue[str] = SimpleQueue()
        # Its own session: Ctrl-C is for the caller, which asks.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        self._thread = threading.Thread(target=_read, args=(self,), name="unisono-machine", daemon=True)
        _machines.add(self)

    def begin(self, bundle: bytes, number: int, count: int, per_machine: int, endpoint: str) -> str:
        """Send the machine what it runs, as for `run_machine`; port 0 of `endpoint` means a free one of that host,
        which is this one. Returns the endpoint with its port. UnisonoError: it could not be started; `on_end` has been
        called with its outcome."""
        given = {"number": number, "count": count, "per_machine": per_machine, "endpoint": endpoint}
        assert self._process.stdin is not None
        self._thread.start()
        with suppress(BrokenPipeError):  # it has ended already, which the thread reports
            self._send(json.dumps({**given, "size": len(bundle)}).encode() + b"\n" + bundle)
        if not endpoint.endswith(":0"):
            return endpoint
        try:
            found = self._endpoint.get(timeout=_ENDPOINT_S)
        except Empty:
            found = ""
        if not found:
            code = self._process.poll()
            how = f"within {_ENDPOINT_S:.0f} s" if code is None else f"it {describe_exit(code)}"
            raise UnisonoError(f"{self._where} did not begin: {how}; what it has printed says why")
        return found

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        file, rest, ready = self._process.stdin.fileno(), memoryview(data), select.poll()
        os.set_blocking(file, False)  # from now on: nothing may wait for a machine that reads nothing
        ready.register(file, select.POLLOUT)
        while rest:
            if not ready.poll(_ENDPOINT_S * 1000):
                raise UnisonoError(
                    f"{self._where} has taken {len(data) - len(rest)} of {len(data)} bytes of what it runs, and "
                    f"nothing more within {_ENDPOINT_S:.0f} s; what it has printed says why, or a login by hand"
                )
            rest = rest[os.write(file, rest) :]

    def ask_to_stop(self) -> None:
        """Ask the workers to stop early."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(b"stop\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the machine's processes: its agent ends at the end of its input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Return when the machine's processes have ended; after 10 s, end the local one at once."""
        try:
            self._process.wait(10.0)
        except TimeoutExpired:
            self._process.kill()


_machines: WeakSet[PipedMachine] = WeakSet()


def _give_up_inputs() -> None:
    """Let a forked process hold no machine's input: its end says that the caller is gone, and ssh hears only that."""
    with open(os.devnull, "wb") as nothing:
        for machine in _machines:
            if machine._process.stdin is not None and not machine._process.stdin.closed:
                os.dup2(nothing.fileno(), machine._process.stdin.fileno(), inheritable=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_inputs)


def _read(machine: PipedMachine) -> None:
    """Body of the thread: puts the endpoint, or "" at the end, and calls `on_end` once, whatever fails: nothing else
    reads standard output."""
    try:
        outcome = _outcome_of(machine)
    except Exception as error:
        outcome = Outcome[None].failure(error).to_bytes()
    machine._endpoint.put("")
    machine._on_end(outcome)


def _outcome_of(machine: PipedMachine) -> bytes:
    outcome = None
    stream = machine._process.stdout
    assert stream is not None
    held = b""  # an empty line that may precede a mark
    for line in stream:
        if line.startswith(MARK):
            what, size = line.removeprefix(MARK).split()
            data, held = stream.read(int(size)), b""
            if what == b"endpoint":
                machine._endpoint.put(data.decode())
            else:
                outcome = data
            continue
        if output := held if line == b"\n" else held + line:
            show(output)
        held = line if line == b"\n" else b""
    code = machine._process.wait()
    if outcome is None:
        raise UnisonoError(f"{machine._where} {describe_exit(code)}, and has sent no result")
    return outcome


def show(output: bytes) -> None:
    """Write what workers have written to this process's standard output; a notebook's takes text only."""
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
    else:
        print(output.decode(errors="replace"), end="", flush=True)


class PipedRun:
    """The machines of a run; a `Run`."""

    def __init__(self) -> None:
        self.machines: list[PipedMachine] = []
        self.ended: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        with suppress(Empty):
            yield self.ended.get(timeout=timeout_s)
            while True:
                yield self.ended.get_nowait()

    def ask_to_stop(self) -> None:
        for machine in self.machines:
            machine.ask_to_stop()

    def kill(self) -> None:
        for machine in self.machines:
            machine.kill()
        for machine in self.machines:
            machine.wait()
