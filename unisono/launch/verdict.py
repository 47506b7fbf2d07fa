"""What became of a group: its results, or the first cause with all that is known about it.

The first cause is the earliest failure that is neither secondary (it only tells that a peer broke the world) nor of our
own making (the group was being stopped). Its error keeps its type; the notes say where it happened, what the worker
had last written to stderr, and which ranks were stopped because of it; `failures` holds every rank's error.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import WorkerDiedError
from unisono.launch.reports import Inbox
from unisono.outcome import Outcome, add_note_once, first_cause

_ADVICE: dict[int | None, str] = {
    -signal.SIGABRT: "; torch.distributed's own collectives do that where ranks call them with different shapes",
    0: "; its result is missing, so this is no success: return from fn instead",
}


# Not SIGABRT, with which a transport may end the peers of a rank that has failed.
_DEADLY = [-each for each in signal.Signals if each.name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")]
_NEWS_S = 1.0  # how long the news of a death takes at most


@dataclass
class Worker:
    """What is known of one worker."""

    rank: int
    pipe: int
    pid: int | None = None
    inbox: Inbox = field(default_factory=Inbox)
    outcome: Outcome[Any] | None = None
    has_begun: bool = False  # to call fn
    has_ended: bool = False
    heeds_stop: bool = False
    has_agreed_to_stop: bool = False
    was_stopped: bool = False  # it ended after we had sent a signal


def death(worker: Worker, status: int | None, how: str, what_else: str = "") -> WorkerDiedError:
    """The error of a worker that ended without an outcome."""
    text = f"rank {worker.rank} (pid {worker.pid}) {how} before fn returned{_ADVICE.get(status, '')}{what_else}"
    return WorkerDiedError(text, worker.rank, status)


def conclude(workers: Sequence[Worker], tails: dict[int, list[str]], hung: BaseException | None) -> Outcome[list[Any]]:
    """The group's outcome.

    Args:
        workers: in rank order, all ended; fewer than the group's when it was stopped in its start.
        tails: the last lines that each rank wrote to stderr.
        hung: the error of a group that was stopped because it hung.
    """
    outcomes = {worker.rank: worker.outcome for worker in workers if worker.outcome is not None}
    failures = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if not failures:
        return Outcome(value=[outcomes[rank].value for rank in sorted(outcomes)])
    own = {rank: outcome for rank, outcome in failures.items() if not workers[rank].was_stopped}
    errors = {rank: outcome.error for rank, outcome in failures.items()}
    stopped = [worker.rank for worker in workers if worker.was_stopped]
    if hung is not None and all(outcome.is_secondary for outcome in own.values()):  # what followed was our making
        return Outcome(error=_with_failures(hung, errors))
    cause = _first_cause(own or failures)
    error = failures[cause].error
    assert error is not None
    add_note_once(error, failures[cause].where)
    if failures[cause].is_secondary and (returned := sorted(outcomes.keys() - failures.keys())):
        add_note_once(error, f"ranks {returned} had returned without an error")
    if stopped:
        reason = "because of it" if own else "at the request of the calling process"
        add_note_once(error, f"ranks {stopped} were stopped {reason}")
    if tail := tails.get(cause):
        add_note_once(error, f"the last lines of rank {cause} on stderr:\n" + "\n".join(f"  {line}" for line in tail))
    _with_failures(error, errors)
    return failures[cause]


def _first_cause(own: dict[int, Outcome[Any]]) -> int:
    """As `outcome.first_cause`, but that a rank which somebody else's signal has ended comes first.

    Its peers learn of it sooner than we do, and may have raised errors that do not say so.
    """
    first = first_cause(own)
    killed = {
        rank: outcome
        for rank, outcome in own.items()
        if isinstance(outcome.error, WorkerDiedError)
        and outcome.error.exit_code in _DEADLY
        and outcome.at <= own[first].at + _NEWS_S
    }
    return first_cause(killed) if killed else first


def _with_failures(error: BaseException, errors: dict[int, BaseException | None]) -> BaseException:
    with contextlib.suppress(Exception):  # a class of the user's may refuse attributes
        error.failures = errors  # type: ignore[attr-defined]
    return error
