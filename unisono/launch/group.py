"""One group of workers, from its start to its last exit.

*Threads:* the supervisor's alone. It waits for whichever comes first: a worker's message, an exit, a request of the
caller, the next deadline. There is no polling.

Invariants:

1. One failure stops the group: SIGTERM, then, after the grace period, SIGKILL to the workers that are left. A failure
   that only says that a peer broke the world waits a moment for the peer's own report.
2. A worker's outcome is complete or absent; a worker without one has died, and its exit status says how.
3. When `run` returns, no worker of the group is running, and its directory has been removed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from unisono.comm.outcome import Outcome, first_cause, this_process
from unisono.comm.stacks import TELL_STACKS
from unisono.errors import UnisonoError, describe_exit
from unisono.launch.group_outcome import Worker, conclude, death
from unisono.launch.hang import StackCollection
from unisono.launch.held_memory import clear_steps, read_steps
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.job import Job, write_job
from unisono.launch.messages import FULL_SHM, say_once
from unisono.launch.reports import Kind, Pulse
from unisono.launch.starting import wire
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.starting.process_ends import kill_marked
from unisono.launch.starting.zygote_client import open_group
from unisono.launch.watching.memory import OomWatch
from unisono.launch.watching.output import WorkerOutput
from unisono.report.steps import StepsDone

if TYPE_CHECKING:
    from unisono.launch.hosts.agent_round import MachineReport
    from unisono.launch.hosts.other_machines import OtherMachines

_END_S = 30.0  # seconds that the workers have for their exit handlers after the last outcome
_SETTLE_S = 3.0  # seconds that a report of a broken world waits for the report of the rank that broke it
_LONG_S = 3600.0  # the longest single wait: selectors accept at most a few weeks
_KEPT_LINES = 400  # of stderr: as many as are kept if lines are short


class Ending:
    """How a group is ended: SIGTERM, or SIGINT, then after the grace period SIGKILL."""

    def __init__(self, grace_s: float) -> None:
        # When to send the next signal, by `time.monotonic()`, a clock shared with the workers.
        self.due: float | None = None
        self.sent: list[signal.Signals] = []
        self.began_at = math.inf
        self.was_asked = False  # by the caller, which gives the workers their grace period
        self._grace_s = grace_s
        self._left = [signal.SIGTERM, signal.SIGKILL]

    def begin_within(self, seconds: float) -> None:
        """Begin after that many seconds at the latest; the earliest such limit counts."""
        due = time.monotonic() + seconds
        self.due = due if self.due is None else min(due, self.due)

    def ask(self, signum: signal.Signals) -> None:
        """Begin now at the caller's request, with that signal; when it asks again, kill."""
        self.was_asked = True
        if self.sent:
            self._left = [signal.SIGKILL]
        else:
            self._left[0] = signum
        self.begin_within(0.0)

    def take_signal(self) -> signal.Signals | None:
        """The signal to send now; None if there is none left."""
        self.due = None
        if not self._left:
            return None
        signum = self._left.pop(0)
        self.sent.append(signum)
        self.began_at = min(self.began_at, time.monotonic())
        self.begin_within(self._grace_s)
        return signum


class Group:
    """The workers of one attempt: all of them, or those of this machine. `on_started` is called when all have a pid;
    `others` are the other machines, if the workers have peers there."""

    def __init__(
        self,
        job: Job,
        directory: Path,
        output: WorkerOutput,
        on_started: Callable[[], None],
        others: OtherMachines | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self._reason: Outcome[Any] | None = None  # why the group is ended although none of its workers has failed
        self._job = job
        self._directory = directory
        self._output = output
        self._on_started = on_started
        self._oom_watch = OomWatch()
        self._zygote: socket.socket  # from `run` on
        self._ending = Ending(job.options.grace_s)
        self._is_stop_wanted = False  # the caller has asked for an early end
        ask = partial(self._signal_workers, TELL_STACKS, to_sessions=False)
        self._standstill = StackCollection(job, directory, ask, others)

    def run(self, wake: socket.socket, obey: Callable[[], None]) -> Outcome[list[Any]]:
        """Start the workers and return when all have ended; `obey` is called when `wake` is readable."""
        with selectors.DefaultSelector() as self._selector:
            self._zygote = open_group(self._directory, self._job.options.chosen_start_method)
            self._selector.register(self._zygote, selectors.EVENT_READ, self._hear_zygote)
            self._selector.register(wake, selectors.EVENT_READ, obey)
            try:
                self._start_workers()
                while not all(worker.has_ended for worker in self.workers):
                    self._handle_events()
            finally:
                for worker in self.workers:
                    self._close_pipe(worker)
                self._close_group()
                self._output.close()
        tails = {worker.rank: self._output.tail(worker.rank, _KEPT_LINES) for worker in self.workers}
        return conclude(self.workers, tails, self._reason)

    def steps(self) -> list[StepsDone]:
        """What each worker has done, as far as it is known."""
        return read_steps(self._job.held_memory, len(self._job.ranks))

    @property
    def place(self) -> RankPlace:
        """The place of its first worker on this machine."""
        return self._job.place

    def interrupt(self) -> None:
        """Stop as Ctrl-C does; kill on the second call."""
        self._ending.ask(signal.SIGINT)

    def stop(self) -> None:
        """Stop with SIGTERM; kill on the second call."""
        self._ending.ask(signal.SIGTERM)

    def ask_to_stop(self) -> None:
        """Ask the workers that handle a stop to stop at their next step; ask those that begin to handle it later
        then."""
        self._is_stop_wanted = True
        self._signal_workers(
            signal.SIGTERM, [worker for worker in self.workers if worker.handles_stop], to_sessions=False
        )

    def hear(self, report: MachineReport) -> None:
        """Handle a report of another machine: its workers' progress, or that its part of the group has failed."""
        self._standstill.hear(report, time.monotonic())
        if report.verdict:
            verdict: Outcome[Any] = Outcome.from_bytes(report.verdict)
            self.give_up(verdict, _SETTLE_S if verdict.is_secondary else 0.0)

    def give_up(self, reason: Outcome[Any], within_s: float = 0.0) -> None:
        """End the group for an outside reason, which may be the first cause."""
        reason = replace(reason, at=time.monotonic())  # another machine has another clock
        if self._reason is None or first_cause({"before": self._reason, "now": reason}) == "now":
            self._reason = reason
        if not self._ending.sent:
            self._ending.begin_within(within_s)

    def _start_workers(self) -> None:
        with write_job(self._job) as file:
            clear_steps(self._job.held_memory)
            for rank in self._job.ranks:
                reading, writing = os.pipe()
                # A worker that writes half a message must not block the loop that watches all of them.
                os.set_blocking(reading, False)
                self.workers.append(worker := Worker(rank, reading))
                self._selector.register(reading, selectors.EVENT_READ, worker)
                try:
                    streams = self._output.open(rank)
                    message = {"op": "fork", "rank": rank, "family": self._job.backend}
                    wire.send(self._zygote, message, (file.fileno(), writing, *streams))
                except ConnectionError:  # the zygote is gone; its end of file follows
                    break
                finally:
                    # Only the worker may hold the write end: its death is then an end of file here.
                    os.close(writing)
                    self._output.handed_over(rank)
        # A worker that could not be started has ended without a pid.
        while any(worker.pid is None and not worker.has_ended for worker in self.workers):
            self._handle_events()
        self._on_started()

    def _handle_events(self) -> None:
        deadlines = [each for each in (self._ending.due, self._hung_at()) if each is not None]
        left = max(0.0, min(*deadlines, _LONG_S + time.monotonic()) - time.monotonic()) if deadlines else None
        events = self._selector.select(left)
        for key, _ in events:
            if isinstance(key.data, Worker):
                self._read_reports(key.data)
        for key, _ in events:  # after the pipes: an outcome explains an exit better than its status does
            if not isinstance(key.data, Worker):
                key.data()
        now = time.monotonic()
        if self._ending.due is not None and now >= self._ending.due:
            self._send_next_signal()
        if (hung_at := self._hung_at()) is not None and now >= hung_at:
            running = [each for each in self.workers if not each.has_ended and each.outcome is None]
            hung = self._standstill.examine(now, running)
            if hung is not None:
                self.give_up(Outcome(error=hung))

    def _hung_at(self) -> float | None:
        is_ending = self._ending.sent or self._ending.due is not None
        return None if is_ending else self._standstill.due()

    def _read_reports(self, worker: Worker) -> None:
        with contextlib.suppress(BlockingIOError):
            while worker.pipe >= 0:
                is_open = worker.inbox.read(worker.pipe)
                for kind, data in worker.inbox.take():
                    self._handle_message(worker, kind, data)
                # The outcome is the last message. A child of the worker may still hold the write end.
                if not is_open or worker.outcome is not None:
                    self._close_pipe(worker)

    def _handle_message(self, worker: Worker, kind: Kind, data: bytes) -> None:
        if kind is Kind.PULSE:
            pulse: Pulse = pickle.loads(data)
            self._standstill.hear_pulse(worker.rank, pulse, time.monotonic())
        elif kind is Kind.HANDLES_STOP:
            worker.handles_stop = True
            # The request came before this worker could be asked: SIGTERM would have ended it.
            if self._is_stop_wanted:
                self._signal_workers(signal.SIGTERM, [worker], to_sessions=False)
        elif kind is Kind.NOTE:
            say_once(data.decode())
        elif kind is Kind.STOPPED:
            worker.stopped_after = int(data)
        else:
            worker.outcome = Outcome.from_bytes(data)
            is_failure = worker.outcome.error is not None
            # A rank that has returned makes no more progress, but does not hang.
            self._standstill.forget(worker.rank, time.monotonic(), has_returned=not is_failure)
            # An error after our first signal is a consequence of it, never the first cause.
            worker.was_stopped = is_failure and worker.outcome.at > self._ending.began_at
            if is_failure:
                self._note_failure(worker.outcome.is_secondary)
            elif all(each.outcome is not None for each in self.workers):
                self._ending.begin_within(_END_S)  # done; a worker that does not end by itself is then signalled

    def _hear_zygote(self) -> None:
        try:
            message, _ = wire.receive(self._zygote)
        except EOFError:
            self._lose_zygote()
            return
        worker = self.workers[message["rank"] - self._job.place.rank]
        if message["op"] == "forked":
            worker.pid = message["pid"]
        elif message["op"] == "exit":
            self._note_end(worker, message["status"], describe_exit(message["status"]))
        else:
            self._note_end(worker, None, f"could not be started ({message['text']})")

    def _lose_zygote(self) -> None:
        """Handle the zygote's death: the parent-death signal has killed the workers, but not the processes that they
        started."""
        self._selector.unregister(self._zygote)
        # No worker can say why: the zygote has failed in its own start.
        if all(worker.pid is None for worker in self.workers):
            raise UnisonoError(
                "the process that workers are forked from ended before it forked one; its output is above"
            )
        for worker in self.workers:
            if not worker.has_ended:
                if worker.pid is not None:
                    # Each worker leads a process group, with its loader workers in it.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(worker.pid, signal.SIGKILL)
                self._note_end(worker, None, "ended because the process that it was forked from died")
        # Processes that have left these groups still carry the group's directory in their environment.
        kill_marked(psutil.process_iter(), OUTER_DIRECTORY, str(self._directory))

    def _note_end(self, worker: Worker, status: int | None, how: str) -> None:
        self._read_reports(worker)  # what it wrote before it ended is still in the pipe
        worker.has_ended = True
        if worker.outcome is None:
            # With an outcome, it was dropped when that arrived.
            self._standstill.forget(worker.rank, time.monotonic())
            # A signal that we did not send is a cause in itself, even while the group is being stopped.
            is_foreign = status is not None and status < 0 and -status not in self._ending.sent
            worker.was_stopped = bool(self._ending.sent) and not is_foreign
            # Only an unexplained SIGKILL can be the out-of-memory killer's.
            is_killed = status == -signal.SIGKILL and not worker.was_stopped
            memory = self._oom_watch.verdict() if is_killed else ""
            # A write to shared memory raises SIGBUS when /dev/shm is full.
            memory = f"; mapped memory could not be allocated: {FULL_SHM}" if status == -signal.SIGBUS else memory
            worker.outcome = Outcome.failure(death(worker, status, how, memory), self._describe_place(worker))
            if not worker.was_stopped:  # a transport's abort is explained by what its peers report
                self._note_failure(is_secondary=status == -signal.SIGABRT)

    def _describe_place(self, worker: Worker) -> str:
        """Like `str(world)` of that rank, with the device and node that it would have had."""
        its = self._job.place_of(worker.rank)
        place = f"rank {its.rank} of {its.world_size}, {self._job.backend}:{its.local_rank}"
        return f"{place}, {this_process(worker.pid)}, restart {its.restart_count}"

    def _note_failure(self, is_secondary: bool) -> None:
        # A secondary failure only reports a broken world: the peer's own error is still on its way.
        if not self._ending.sent:
            self._ending.begin_within(_SETTLE_S if is_secondary else 0.0)

    def _send_next_signal(self) -> None:
        if (signum := self._ending.take_signal()) is not None:
            # A worker that handles SIGTERM treats it as a request. The caller's stop is one; after a failure, no
            # request is answered.
            is_deaf = signum == signal.SIGTERM and not self._ending.was_asked
            if deaf := [each for each in self.workers if each.handles_stop and each.outcome is None and is_deaf]:
                self._ending.sent.append(signal.SIGKILL)
                self._signal_workers(signal.SIGKILL, deaf)
            self._signal_workers(signum, [worker for worker in self.workers if worker not in deaf])

    def _signal_workers(self, signum: int, workers: list[Worker], to_sessions: bool = True) -> None:
        """Signal workers; with `to_sessions`, also their loader workers and other processes that they have started."""
        ranks = [worker.rank for worker in workers]
        message = {"op": "signal", "signal": int(signum), "ranks": ranks, "to_sessions": to_sessions}
        # If the zygote is gone, its end of file follows, and `_lose_zygote` kills the workers.
        with contextlib.suppress(OSError):
            wire.send(self._zygote, message)

    def _close_group(self) -> None:
        """Close our end, and wait for the zygote to close its own, which means that no worker is left."""
        with self._zygote, contextlib.suppress(OSError, EOFError):
            # Only the write side: the end of file from the zygote is what this waits for.
            self._zygote.shutdown(socket.SHUT_WR)
            while True:
                wire.receive(self._zygote)

    def _close_pipe(self, worker: Worker) -> None:
        if worker.pipe >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.pipe)
            os.close(worker.pipe)
            worker.pipe = -1
