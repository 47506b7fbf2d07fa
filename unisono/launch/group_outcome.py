"""The outcome of a group: its results, or the first cause with everything known about it.

The first cause is among the failures that we did not cause by stopping the group, and the reason why it was stopped
from outside, if there was one. Its error keeps its type; `failures` holds every rank's.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from unisono.comm.outcome import Outcome, add_note_once, first_cause
from unisono.comm.stacks import describe_call, frames_of, main_stack, stack_to_user_function
from unisono.errors import ClosedError, CollectiveMismatchError, WorkerDiedError
from unisono.launch.reports import Inbox

_ABORTED = "gloo::EnforceNotMet"  # the transport ends the process if a peer sends unexpected data
_FATAL = "Fatal Python error"  # written by faulthandler
_TAIL = 20  # lines
_OUTSIDE = -1  # in place of a rank


@dataclass
class Worker:
    """What is known of one worker."""

    rank: int
    pipe: int
    pid: int | None = None
    inbox: Inbox = field(default_factory=Inbox)
    outcome: Outcome[Any] | None = None
    has_ended: bool = False
    handles_stop: bool = False
    stopped_after: int | None = None  # steps, if the ranks have agreed to stop
    was_stopped: bool = False  # it ended after we had sent a signal


def death(worker: Worker, status: int | None, how: str, what_else: str = "") -> WorkerDiedError:
    """Make the error of a worker that ended without an outcome."""
    advice = "; its result is missing, so this does not count as success: return from fn instead" if status == 0 else ""
    text = f"rank {worker.rank} (pid {worker.pid}) {how} before fn returned{advice}{what_else}"
    return WorkerDiedError(text, worker.rank, status)


def conclude(workers: Sequence[Worker], tails: dict[int, list[str]], reason: Outcome[Any] | None) -> Outcome[list[Any]]:
    """Return the group's outcome. `workers` have all ended, in rank order; fewer than the group's if it was stopped
    during its start. `reason` is why it was stopped although none of them had failed: it hung, or a machine was lost.
    """
    outcomes = {worker.rank: worker.outcome for worker in workers if worker.outcome is not None}
    failures = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if not failures:
        return Outcome(value=[outcomes[rank].value for rank in sorted(outcomes)])
    stopped = [worker.rank for worker in workers if worker.was_stopped]
    own = {rank: outcome for rank, outcome in failures.items() if rank not in stopped}
    errors = {rank: outcome.error for rank, outcome in failures.items()}
    causes = dict(own if own or reason else failures)
    if reason is not None:
        causes[_OUTSIDE] = reason
    cause = first_cause(causes)
    if cause == _OUTSIDE:
        assert reason is not None
        _with_failures(reason.error, errors)
        return reason
    if (lost := _lost_step(cause, failures[cause].error, tails.get(cause, []))) is not None:
        failures[cause] = replace(failures[cause], error=lost)
        errors[cause], tails = lost, {}
    error = failures[cause].error
    assert error is not None
    add_note_once(error, failures[cause].where)
    if failures[cause].is_secondary and (returned := sorted(outcomes.keys() - failures.keys())):
        add_note_once(error, f"ranks {returned} had returned without an error")
    if not own and isinstance(error, WorkerDiedError):  # by the caller's own request
        closed = ClosedError(f"ranks {stopped} were stopped, as the calling process asked, before fn returned")
        closed.__cause__ = error
        _with_failures(closed, errors)
        return Outcome(error=closed)
    if stopped:
        why = "because of it" if own else "at the request of the calling process"
        add_note_once(error, f"ranks {stopped} were stopped {why}")
    if tail := _last_words(tails.get(cause, [])):
        add_note_once(error, f"the last lines of rank {cause} on stderr:\n" + "\n".join(f"  {line}" for line in tail))
    _with_failures(error, errors)
    return failures[cause]


def _last_words(lines: list[str]) -> list[str]:
    """The last lines of a worker's stderr. Of what faulthandler writes at a fatal signal: which one it was, and the
    stack of the thread that got it, down to the user's function."""
    fatal = next((place for place, line in enumerate(lines) if line.startswith(_FATAL)), None)
    if fatal is None:
        return lines[-_TAIL:]
    stacks = lines[fatal + 1 :]
    begin = next((place for place, line in enumerate(stacks) if line.startswith("Current thread ")), 0)
    stack = takewhile(str.strip, stacks[begin:])
    return [*lines[: fatal + 1][-_TAIL:], *stack_to_user_function("\n".join(stack)).splitlines()]


def _lost_step(rank: int, died: BaseException | None, tail: list[str]) -> CollectiveMismatchError | None:
    """Make the error of a rank that its transport ended because it and a peer called different collectives.

    Our own collectives are compared before they are sent. Torch's are not, including those of sharded tensors and of
    checkpoints; this rank's call is on the stack that the worker has written at its end.
    """
    text = "\n".join(tail)
    if not (isinstance(died, WorkerDiedError) and died.exit_code == -signal.SIGABRT and _ABORTED in text):
        return None
    lost = CollectiveMismatchError(
        f"rank {rank} called {describe_call(frames_of(main_stack(text))) or 'a collective of torch'} while its peers "
        "called another one; every rank must call the same collectives in the same order with the same shapes. Torch's "
        "own collectives, such as this one, do not compare them; full_tensor() of sharded parameters and functions "
        "that save checkpoints are among them: call them on all ranks, not in `if is_rank_zero():`"
    )
    lost.__cause__ = died
    return lost


def _with_failures(error: BaseException | None, errors: dict[int, BaseException | None]) -> None:
    with contextlib.suppress(Exception):  # a user-defined class may refuse attributes
        error.failures = errors  # type: ignore[union-attr]
