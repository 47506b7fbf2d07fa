"""The supervisor: watches one group of workers from its start to its last exit, and finds the first cause.

*Threads:* one thread, `unisono-supervisor`, runs `_watch`, which owns all state until it ends. The caller's threads
only ask (`interrupt`, `stop`) through a socket that wakes it, and wait on an event. Nothing polls.

Invariants:
1. One failure stops the group: SIGTERM, then after the grace SIGKILL to what is left. A failure that only says that a
   peer broke the world waits a moment for the peer's own report.
2. A worker's outcome is complete or absent; a worker without one has died, and its exit status says how.
3. The first cause is the earliest failure that is neither secondary nor of our own making.
4. When `_watch` ends, no worker of the group lives, and the rendezvous is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.errors import UnisonoError, WorkerDiedError, describe_exit
from unisono.launch import wire
from unisono.launch.nursery import open_group
from unisono.launch.rendezvous import rendezvous
from unisono.launch.worker import HEADER, Job
from unisono.outcome import Outcome, add_note_once, first_cause

_END_S = 30.0  # how long the workers have, after the last outcome, for what their programs do at the end
_SETTLE_S = 1.0  # how long a report of a broken world waits for the report of who broke it


@dataclass
class _Worker:
    """What is known of one worker."""

    rank: int
    pipe: int
    pid: int | None = None
    received: bytearray = field(default_factory=bytearray)
    outcome: Outcome[Any] | None = None
    has_ended: bool = False
    was_stopped: bool = False  # it ended after we had sent a signal


class Supervisor:
    """Starts a group of workers and watches it.

    Args:
        job: what the workers run.
        grace_s: seconds between asking a worker to stop and killing it.
        daemon: whether the interpreter may end while the group runs, which ends the group.
    """

    def __init__(self, job: Job, grace_s: float, daemon: bool) -> None:
        self._job = job
        self._grace_s = grace_s
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._group: socket.socket | None = None
        self._signals = [signal.SIGTERM, signal.SIGKILL]  # what to send next
        self._deadline: float | None = None  # when to send it
        self._requests: list[str] = []
        self._has_begun = False
        self._lock = threading.Lock()
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._verdict: Outcome[list[Any]] = Outcome()
        self._thread = threading.Thread(target=_supervise, args=(self,), name="unisono-supervisor", daemon=daemon)

    def start(self) -> None:
        """Start the group, unless it has been started, or asked to stop before."""
        if self._thread.ident is None:
            self._thread.start()

    def pids(self) -> list[int | None]:
        """The workers' process ids by rank, once all are started; None for one that could not be."""
        self._has_started.wait()
        return [worker.pid for worker in self._workers]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the group, `timeout` seconds at most; whether it has come."""
        if not self._has_ended.wait(timeout):
            return False
        if self._thread.is_alive():  # for one more moment; a join before the end could not be interrupted and repeated
            self._thread.join()
        return True

    def result(self) -> list[Any]:
        """After the end: the workers' results by rank, or the first cause, raised."""
        return self._verdict.unwrap()

    def interrupt(self) -> None:
        """Ask the workers to stop as Ctrl-C does; the second time, kill them."""
        self._ask("interrupt")

    def stop(self) -> None:
        """Ask the workers to stop with SIGTERM."""
        self._ask("stop")

    def _ask(self, request: str) -> None:
        with self._lock:
            self._requests.append(request)
            if not self._has_begun:  # the caller was interrupted in `start`
                self._has_ended.set()
        with contextlib.suppress(OSError):
            self._wake_w.send(b"!")

    # Everything below runs on the supervisor's thread.

    def _watch(self) -> Outcome[list[Any]]:
        with self._selector, self._wake_r, self._wake_w, rendezvous() as place:
            place.write_job(replace(self._job, store=str(place.store)))
            self._group = open_group(place.directory)
            try:
                self._start(str(place.job))
                while not all(worker.has_ended for worker in self._workers):
                    self._step()
            finally:
                for worker in self._workers:
                    self._close_pipe(worker)
                self._close_group()
        return self._conclude()

    def _start(self, job_file: str) -> None:
        assert self._group is not None
        self._selector.register(self._group, selectors.EVENT_READ, "group")
        self._selector.register(self._wake_r, selectors.EVENT_READ, "wake")
        for rank in range(self._job.nprocs):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._workers.append(worker := _Worker(rank, reading))
            self._selector.register(reading, selectors.EVENT_READ, worker)
            try:
                wire.send(self._group, {"op": "fork", "rank": rank, "job": job_file}, (writing, 1, 2))
            except ConnectionError:  # the zygote is gone; its end of file follows
                break
            finally:
                os.close(writing)
        while any(worker.pid is None and not worker.has_ended for worker in self._workers):
            self._step()
        self._has_started.set()

    def _step(self) -> None:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        events = self._selector.select(timeout)
        for key, _ in events:
            if isinstance(key.data, _Worker):
                self._read(key.data)
        for key, _ in events:  # after the pipes: an outcome explains an exit better than its status does
            if key.data == "group":
                self._hear()
            elif key.data == "wake":
                self._obey()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._send_next_signal()

    def _read(self, worker: _Worker) -> None:
        with contextlib.suppress(BlockingIOError):
            while worker.pipe >= 0:
                data = os.read(worker.pipe, 1 << 20)
                worker.received += data
                if not data or self._is_complete(worker):
                    self._close_pipe(worker)
        if worker.outcome is None and self._is_complete(worker):
            worker.outcome = Outcome.from_bytes(bytes(worker.received[HEADER.size :]))
            worker.received.clear()
            if worker.outcome.error is not None:
                self._note_failure(worker.outcome.is_secondary)
            elif all(each.outcome is not None for each in self._workers):
                self._set_deadline(_END_S)  # done; whoever does not end by itself then is helped

    @staticmethod
    def _is_complete(worker: _Worker) -> bool:
        head = worker.received[: HEADER.size]
        return len(head) == HEADER.size and len(worker.received) - HEADER.size >= HEADER.unpack(head)[0]

    def _hear(self) -> None:
        assert self._group is not None
        try:
            message, _ = wire.receive(self._group)
        except EOFError:
            self._lose_zygote()
            return
        worker = self._workers[message["rank"]]
        if message["op"] == "forked":
            worker.pid = message["pid"]
        elif message["op"] == "exit":
            self._end(worker, message["status"], describe_exit(message["status"]))
        else:
            self._end(worker, None, f"could not be forked ({message['text']})")

    def _lose_zygote(self) -> None:
        """The zygote is gone; the parent-death signal has taken the workers along, but not what they had started."""
        assert self._group is not None
        self._selector.unregister(self._group)
        if all(worker.pid is None for worker in self._workers):
            raise UnisonoError(
                "the process that workers are forked from ended before it forked one; what it printed stands above"
            )
        for worker in self._workers:
            if not worker.has_ended:
                if worker.pid is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(worker.pid, signal.SIGKILL)
                self._end(worker, None, "ended because the process that it was forked from has died")

    def _end(self, worker: _Worker, status: int | None, how: str) -> None:
        self._read(worker)  # what it wrote before it ended is still in the pipe
        worker.has_ended = True
        if worker.outcome is None:
            worker.was_stopped = len(self._signals) < 2
            text = f"rank {worker.rank} (pid {worker.pid}) {how} before fn returned"
            if status == -signal.SIGABRT:
                text += "; collectives of different shapes do that, and spawn(..., checked=True) names the two calls"
            error = WorkerDiedError(text, worker.rank, status)
            device = f"{self._job.backend}:{worker.rank}"
            where = f"rank {worker.rank} of {self._job.nprocs}, {device}, pid {worker.pid}"
            worker.outcome = Outcome.failure(error, where)
            if not worker.was_stopped:
                self._note_failure(is_secondary=False)

    def _note_failure(self, is_secondary: bool) -> None:
        if len(self._signals) == 2:
            self._set_deadline(_SETTLE_S if is_secondary else 0.0)

    def _set_deadline(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _send_next_signal(self) -> None:
        self._deadline = None
        if self._signals:
            self._signal(self._signals.pop(0))
            self._set_deadline(self._grace_s)

    def _signal(self, signum: int) -> None:
        assert self._group is not None
        with contextlib.suppress(OSError):
            wire.send(self._group, {"op": "signal", "signal": int(signum)})

    def _obey(self) -> None:
        self._wake_r.recv(4096)
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            if len(self._signals) < 2:  # asked before: no more patience
                self._signals = [signal.SIGKILL]
            elif request == "interrupt":
                self._signals[0] = signal.SIGINT
            self._set_deadline(0.0)

    def _close_group(self) -> None:
        """Close our end, and wait for the zygote's, which tells that no worker is left."""
        assert self._group is not None
        with self._group, contextlib.suppress(OSError, EOFError):
            self._group.shutdown(socket.SHUT_WR)
            while True:
                wire.receive(self._group)

    def _close_pipe(self, worker: _Worker) -> None:
        if worker.pipe >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.pipe)
            os.close(worker.pipe)
            worker.pipe = -1

    def _conclude(self) -> Outcome[list[Any]]:
        outcomes = {worker.rank: worker.outcome for worker in self._workers if worker.outcome is not None}
        failures = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        if not failures:
            return Outcome(value=[outcomes[rank].value for rank in sorted(outcomes)])
        own = {rank: outcome for rank, outcome in failures.items() if not self._workers[rank].was_stopped}
        cause = first_cause(own or failures)
        stopped = [worker.rank for worker in self._workers if worker.was_stopped]
        error = failures[cause].error
        assert error is not None
        add_note_once(error, failures[cause].where)
        if failures[cause].is_secondary and (returned := sorted(outcomes.keys() - failures.keys())):
            add_note_once(error, f"ranks {returned} had returned without an error")
        if stopped:
            reason = "because of it" if own else "at the request of the calling process"
            add_note_once(error, f"ranks {stopped} were stopped {reason}")
        return failures[cause]


def _supervise(supervisor: Supervisor) -> None:
    """Body of the supervisor's thread: whatever becomes of the group is its verdict."""
    with supervisor._lock:
        supervisor._has_begun = not supervisor._has_ended.is_set()
    if supervisor._has_begun:
        watched = Outcome.capture(supervisor._watch)
        supervisor._verdict = watched.value or Outcome(error=watched.error)
    supervisor._has_started.set()
    supervisor._has_ended.set()
