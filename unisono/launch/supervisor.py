"""The supervisor: runs a job, one group of workers after another, until one succeeds or no restart is left.

*Threads:* one thread, `unisono-supervisor`, runs `_run_attempts`, and owns all state until it ends. The caller's
threads only make requests, through a socket that wakes it, and wait on an event. The thread does not poll; those who
wait for it check for signals.

Invariants:

1. Each attempt has its own rendezvous, so nothing stale from a failed one is found.
2. A request of the caller ends the job: it is never restarted afterwards.
3. When `_run_attempts` ends, no worker of the job is running, and nothing is left of its rendezvous.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import re
import socket
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.comm.outcome import Outcome, text_of
from unisono.comm.stacks import frames_of
from unisono.errors import RemoteTraceback, StoppedError, UnisonoError, UnpicklableError, WorkerDiedError, describe_exit
from unisono.launch.group import Group
from unisono.launch.held_memory import has_snapshots, held_memory, save_snapshot
from unisono.launch.job import Job, rendezvous
from unisono.launch.messages import add_limit_note
from unisono.launch.watching.log_directory import log_file, make_log_directory
from unisono.launch.watching.output import WorkerOutput
from unisono.report.record import write_fault

if TYPE_CHECKING:
    from unisono.launch.hosts.agent_round import MachineReport
    from unisono.launch.hosts.other_machines import OtherMachines

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # a signal that another thread took, or that came just before the wait, does not end the wait
_WORDS = 120  # letters about what has failed
_READING_S = 1.0  # for work of milliseconds: a thread that is between two groups, or ending, does not answer


class Supervisor:
    """Starts the workers of a job and watches them. `log_directory` is that of a run that continues after this job;
    None makes one, if the job's options name a place. `others` are the other machines, if workers have peers there."""

    def __init__(self, job: Job, log_directory: Path | None = None, others: OtherMachines | None = None) -> None:
        self._job = job
        self._options = job.options
        self.grace_s = job.options.grace_s
        self._group: Group | None = None
        self.log_directory = log_directory
        self._others = others
        self.restarts_for = ""  # why its workers are stopped to be started again, although nothing has failed
        log_dir = self._options.output.log_dir
        if log_directory is None and log_dir is not None:  # here, so that an invalid one is an error in the caller
            self.log_directory = make_log_directory(log_dir)
        if self.log_directory is not None:
            self._job = replace(job, records=str(self.log_directory))
        self._wake_r, self._wake_w = socket.socketpair()
        self._requests: list[Callable[[Group], object]] = []
        self._asked_for: set[Callable[[Group], None]] = set()  # by `request`
        self._has_begun = False
        # reentrant: a signal handler may make a request while the code it interrupted does
        self._lock = threading.RLock()
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._verdict: Outcome[list[Any]] = Outcome()
        self._thread = threading.Thread(
            target=_supervise, args=(self,), name="unisono-supervisor", daemon=self._options.daemon
        )

    def start(self) -> None:
        """Start the group, unless it was started, or asked to stop, before."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:
                add_limit_note(error)
                raise

    def pids(self) -> list[int | None]:
        """The workers' process ids by rank, once all are started; None for one that could not be started."""
        self._has_started.wait()
        return [worker.pid for worker in self._group.workers] if self._group is not None else []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the job, `timeout` seconds at most; return whether it has ended."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._has_ended.wait(max(0.0, min(_LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
        if self._thread.is_alive():  # for only a moment; an earlier join could not be interrupted and repeated
            self._thread.join()
        return True

    @property
    def verdict(self) -> Outcome[list[Any]]:
        """After the end: the workers' results by rank, or the first cause. A requested stop counts, even if the
        signal's handler has run only since the end."""
        self._verdict = self._as_asked(self._verdict)
        return self._verdict

    @property
    def done(self) -> int:
        """The optimizer steps that the last group had done; those of the one before it, if it has not begun."""
        steps = [] if self._group is None else self._group.steps()
        return max((each.done for each in steps), default=0) or self._job.done_before

    def has_snapshots(self) -> bool:
        """Whether ranks have left snapshots, which are saved at the end of the job if it fails."""
        return has_snapshots(self._job.held_memory)

    def may_restart(self, error: BaseException | None) -> bool:
        """Whether, after a group has ended with that error, another attempt is wanted and could succeed."""
        if error is None or self._asked_for or self._stopped_after() is not None:
            return False
        return not isinstance(error, UnpicklableError | StoppedError)

    def handles_stop(self) -> bool:
        """Whether a worker of the group said before this call that it treats a stop as a request.

        One that has ended counts: a handler may run long after its signal arrived. Waits until the workers' pipes have
        been read, `_READING_S` at most.
        """
        if self._group is None:
            return False
        has_read = threading.Event()
        if not self._has_ended.is_set() and self._queue_request(lambda _: has_read.set()):
            has_read.wait(_READING_S)  # the thread reads the pipes before it obeys requests
        return any(worker.handles_stop for worker in self._group.workers)

    def request(self, end: Callable[[Group], None]) -> None:
        """Request the end of the workers by `Group.interrupt`, `Group.stop` or `Group.ask_to_stop`. From then on their
        end counts as an early one, even if they are past their last check."""
        with self._lock:
            self._asked_for.add(end)
            if not self._has_begun and self._thread.ident is None:  # the caller was interrupted in `start`
                self._has_ended.set()
        self._queue_request(end)

    def end(self, end: Callable[[Group], None]) -> None:
        """Request the end by `Group.stop` or `Group.interrupt`, and wait; a signal meanwhile repeats the request, which
        kills."""
        while not self.wait(0):
            with contextlib.suppress(BaseException):
                self.request(end)
                self.wait()

    def hear(self, report: MachineReport) -> None:
        """Handle another machine's report on its workers."""
        self._queue_request(lambda group: group.hear(report))

    def give_up(self, reason: BaseException) -> None:
        """End the workers for an external reason, which counts as their failure."""
        self._queue_request(lambda group: group.give_up(Outcome(error=reason)))

    def _queue_request(self, request: Callable[[Group], object]) -> bool:
        """Queue a request; False if the job has ended, which closes the socket: then it is void."""
        with self._lock:
            self._requests.append(request)
        try:
            return self._wake_w.send(b"!") > 0
        except OSError:
            return False

    # Everything below runs on the supervisor's thread.

    def _run_attempts(self) -> Outcome[list[Any]]:
        with self._wake_r, self._wake_w, held_memory() as memory:
            if not self._job.held_memory:  # otherwise the agent holds one
                self._job = replace(self._job, held_memory=memory)
            for restart_count in range(self._options.max_restarts + 1):
                attempted = Outcome.capture(self._run_attempt, restart_count)
                verdict = attempted.value or Outcome(error=attempted.error)
                if attempted.error is not None:  # an error of this process: workers add notes to their own
                    add_limit_note(attempted.error)
                self._record_failures(verdict)
                self._record_fault(verdict)
                if restart_count == self._options.max_restarts or not self.may_restart(verdict.error):
                    break
                tell_restart(verdict, restart_count + 1, self._options.max_restarts)
                self._job = replace(self._job, done_before=self.done)
            verdict = self._as_asked(verdict)
            if verdict.error is not None and memory == self._job.held_memory:
                save_snapshot(memory)
        return verdict

    def _record_failures(self, verdict: Outcome[list[Any]]) -> None:
        """Append what ended the ranks to their logs, which contain only what they wrote themselves."""
        if self.log_directory is None or verdict.error is None or self._group is None:
            return
        for worker in self._group.workers:
            if worker.outcome is not None and worker.outcome.error is not None:
                text = "".join(traceback.format_exception(worker.outcome.error))
                file = log_file(self.log_directory, worker.rank, "stderr")
                with contextlib.suppress(OSError), file.open("a") as log:  # the output has reported a full disk
                    log.write(text)

    def _record_fault(self, verdict: Outcome[list[Any]]) -> None:
        """Add to the record of the first rank here that the group has failed, or was stopped for another one; not that
        the caller asked for its end."""
        if self.log_directory is None or self._group is None or verdict.error is None:
            return
        if self._asked_for and not self.restarts_for:
            return
        place, steps = self._group.place, self._group.steps()
        first_ns = steps[0].first_ns if steps else None
        with contextlib.suppress(OSError):  # the rank has reported a full disk
            write_fault(
                self.log_directory,
                place.rank,
                restart=place.restart_count,
                world_size=place.world_size,
                what=self.restarts_for or describe_fault(verdict),
                at=time.time() - (time.monotonic() - verdict.at if verdict.at else 0.0),
                host=platform.node(),
                is_secondary=verdict.is_secondary,
                done=max((each.done for each in steps), default=0),
                loaded=max((each.loaded for each in steps if each.loaded is not None), default=None),
                first_step=first_ns and time.time() - (time.perf_counter_ns() - first_ns) / 1e9,
            )

    def _stopped_after(self) -> int | None:
        """The steps after which the ranks have agreed to stop; None if they have not."""
        workers = self._group.workers if self._group is not None else []
        return next((each.stopped_after for each in workers if each.stopped_after is not None), None)

    def _run_attempt(self, restart_count: int) -> Outcome[list[Any]]:
        job = self._job
        if not job.place.address:  # otherwise the agent has set the count for all machines
            job = replace(job, place=replace(job.place, restart_count=restart_count), groups_before=restart_count)
        shown = self._options.output
        with rendezvous() as directory, contextlib.closing(WorkerOutput(shown, self.log_directory)) as output:
            self._group = Group(job, directory, output, self._has_started.set, self._others)
            return self._group.run(self._wake_r, self._obey_requests)

    def _obey_requests(self) -> None:
        assert self._group is not None
        # Read before the list is taken: a request made meanwhile sends another byte. One made between two
        # groups is obeyed by the next.
        self._wake_r.recv(4096)
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            request(self._group)

    def _as_asked(self, verdict: Outcome[list[Any]]) -> Outcome[list[Any]]:
        """The verdict of a job; a StoppedError, if it was successful and a stop was agreed on, or asked for."""
        if verdict.error is not None or not (self._stopped_after() is not None or Group.ask_to_stop in self._asked_for):
            return verdict
        stopped = StoppedError(verdict.value or [], self._stopped_after() or 0)
        if self._job.place.rank == 0:  # once, of several machines
            logger.warning("%s", stopped)
        return Outcome(error=stopped)


def _supervise(supervisor: Supervisor) -> None:
    """Body of the supervisor's thread: every end of the job becomes its verdict."""
    with supervisor._lock:
        # Under the lock, as in `request`: a start that was interrupted either runs in full or not at all.
        supervisor._has_begun = not supervisor._has_ended.is_set()
    if supervisor._has_begun:
        watched = Outcome.capture(supervisor._run_attempts)
        supervisor._verdict = watched.value or Outcome(error=watched.error)
    # Also if no group was started: `pids` must not wait forever.
    supervisor._has_started.set()
    supervisor._has_ended.set()


def describe_fault(verdict: Outcome[Any]) -> str:
    """What has failed, in a few words: "rank 1 was killed by SIGKILL"."""
    error, rank = verdict.error, re.match(r"rank \d+", verdict.where)
    if isinstance(error, WorkerDiedError):
        return f"rank {error.rank} {describe_exit(error.exit_code)}"
    assert error is not None
    text = text_of(error).partition("\n")[0]
    kind = "" if isinstance(error, UnisonoError) else type(error).__name__
    place = rank[0] if rank and not text.startswith("rank ") else ""
    return textwrap.shorten(": ".join(filter(None, [place, kind, text])), _WORDS)


def tell_restart(verdict: Outcome[list[Any]], restart_count: int, max_restarts: int) -> None:
    """Report in one line that a group has failed, and where, and that another is started."""
    error = verdict.error
    assert error is not None
    kind = ":" if type(error) is UnisonoError else f", because of {type(error).__name__}:"
    frames = frames_of(error.__cause__.text) if isinstance(error.__cause__, RemoteTraceback) else []
    place = next((f", in {frame}" for frame in reversed(frames) if frame.is_users), "")
    where = f" ({verdict.where})" if verdict.where else ""
    text = text_of(error).partition("\n")[0]
    logger.warning("restart %d of %d%s %s%s%s", restart_count, max_restarts, kind, text, place, where)
