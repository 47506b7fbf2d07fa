"""One machine of a run on an engine: our agent, its part of the workers, and their results as bytes.

`main` serves `piped.PipedMachine`: it reads a line of JSON and the bundle from its standard input, and writes the
outcome to the end of its standard output. The input stays open: a line "stop" is a request to stop early, and its end
means that the caller is gone.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

from unisono.comm.outcome import Outcome
from unisono.errors import UnisonoError
from unisono.launch.engines import Bundle
from unisono.launch.hosts.endpoint import free_port

MARK = b"\0unisono "  # begins a line of standard output that does not come from workers
_GONE = "unisono: the caller is gone"
_MARGIN_S = 10.0  # after the grace period, in which an agent without its caller has to end


def run_machine(bundle: bytes, number: int, count: int, per_machine: int, endpoint: str) -> bytes:
    """Run the agent of machine `number` of `count`, each with `per_machine` workers, until the run is over: `bundle`
    is a pickled `Bundle`, `endpoint` host:port where the agents meet. Returns an `Outcome` as bytes: the results of
    this machine's ranks, each as bytes; or the first cause."""
    ended = Outcome.capture(_run, bundle, number, count, per_machine, endpoint)
    return (ended if ended.value is None else ended.value).to_bytes()


def _run(data: bytes, number: int, count: int, per_machine: int, endpoint: str) -> Outcome[list[Any]]:
    from unisono.devices import pick_backend
    from unisono.launch.hosts.agent import MachineOptions
    from unisono.launch.hosts.run_agent import run_agent
    from unisono.launch.spawn import check_nprocs, make_job

    bundle: Bundle = pickle.loads(data)
    caller = bundle.take_over()
    family = pick_backend(bundle.options.backend)
    check_nprocs(per_machine, family, bundle.options.process_group)
    job = make_job(bundle.call, per_machine, family, bundle.options, caller)
    ended = run_agent(job, MachineOptions(count, count, endpoint, bundle.run_id, number, secret=bundle.secret))
    if type(ended.error) is SystemExit:  # which would end the caller without a word
        name = signal.Signals(int(str(ended.error.code)) - 128).name
        return Outcome.failure(UnisonoError(f"the agent on {platform.node()} was stopped by {name}"))
    return ended


class _Input(io.RawIOBase):
    """Standard input, which also ends when the process `parent` does: a fork of the caller may hold the other end.
    Unbuffered, so that the thread that reads it holds no lock at exit."""

    def __init__(self, parent: int) -> None:
        self._file = os.dup(0)
        self._watched = [self._file]
        with suppress(OSError):
            if hasattr(os, "pidfd_open"):
                self._watched.append(os.pidfd_open(parent))
        if os.getppid() != parent:  # checked later: that number may be another process's
            sys.exit(_GONE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        is_alone = select.select(self._watched, [], [])[0] == [self._file]
        return os.readv(self._file, [buffer]) if is_alone else 0


def main(parent: int) -> None:
    """Run the machine as long as this process's parent, `parent`, lives."""
    source, sink = _Input(parent), sys.stdout.buffer
    with open(os.devnull) as nothing:  # the workers would read it, too
        os.dup2(nothing.fileno(), 0)
    given = json.loads(source.readline() or sys.exit(_GONE))
    bundle = bytearray(given.pop("size"))
    rest = memoryview(bundle)
    while rest:
        rest = rest[source.readinto(rest) or sys.exit(_GONE) :]
    if given["endpoint"].endswith(":0"):  # this is that host
        given["endpoint"] = f"{given['endpoint'][:-1]}{free_port()}"
        _say(sink, b"endpoint", given["endpoint"].encode())
    grace_s = pickle.loads(bundle).options.grace_s
    threading.Thread(target=_obey, args=(source, grace_s), name="unisono-orders", daemon=True).start()
    outcome = run_machine(bytes(bundle), **given)
    try:
        sys.stdout.flush()
        _say(sink, b"outcome", outcome)
    except BrokenPipeError:  # the caller is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at the end


def _say(sink: BinaryIO, what: bytes, data: bytes) -> None:
    # A new line: what the workers have written may end without one.
    sink.write(b"\n" + MARK + b"%b %d\n" % (what, len(data)) + data)
    sink.flush()


def _obey(source: _Input, grace_s: float) -> None:
    """Body of the thread that hears the caller, and ends this process when it is gone."""
    while line := source.readline():
        if line == b"stop\n":
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(grace_s + _MARGIN_S)
    os._exit(1)  # the main thread waits for another machine in native code; the workers end with this process
