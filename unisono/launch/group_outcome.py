"""The outcome of a group: its results, or the first cause with everything known about it.

The first cause (`outcome.first_cause`) is looked for among the failures that were not caused by us, by stopping the
group, and the reason why it was stopped from outside, if there was one. Its error keeps its type; the notes say where
it happened, what the worker had last written to stderr, and which ranks were stopped because of it; `failures` holds
every rank's error.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.errors import CollectiveMismatchError, RemoteTraceback, WorkerDiedError
from unisono.launch.reports import Inbox
from unisono.outcome import Outcome, add_note_once, first_cause
from unisono.stacks import describe_call, frames_of, main_stack, tracebacks_in

_ADVICE: dict[int | None, str] = {
    0: "; its result is missing, so this does not count as success: return from fn instead",
}
_ABORTED = "gloo::EnforceNotMet"  # the transport ends the process if a peer sends unexpected data
_SIZES = re.compile(r"op\.nbytes\. (\d+) vs (\d+)")
_WOKEN = re.compile(r"rank \d+ cannot complete ([^:]*?):")
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
    has_begun: bool = False  # fn is about to be called
    has_ended: bool = False
    handles_stop: bool = False
    has_agreed_to_stop: bool = False
    was_stopped: bool = False  # it ended after we had sent a signal


def death(worker: Worker, status: int | None, how: str, what_else: str = "") -> WorkerDiedError:
    """Make the error of a worker that ended without an outcome."""
    text = f"rank {worker.rank} (pid {worker.pid}) {how} before fn returned{_ADVICE.get(status, '')}{what_else}"
    return WorkerDiedError(text, worker.rank, status)


def conclude(workers: Sequence[Worker], tails: dict[int, list[str]], reason: Outcome[Any] | None) -> Outcome[list[Any]]:
    """Return the group's outcome.

    Args:
        workers: in rank order, all ended; fewer than the group's if it was stopped during its start.
        tails: the last lines that each rank wrote to stderr, as many as are kept.
        reason: why the group was stopped although none of its workers had failed: it hung, or a machine was lost.
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
    if (lost := _lost_step(cause, failures, tails)) is not None:
        failures[cause] = replace(failures[cause], error=lost)
        errors[cause], tails = lost, {}
    error = failures[cause].error
    assert error is not None
    add_note_once(error, failures[cause].where)
    if failures[cause].is_secondary and (returned := sorted(outcomes.keys() - failures.keys())):
        add_note_once(error, f"ranks {returned} had returned without an error")
    if stopped:
        why = "because of it" if own else "at the request of the calling process"
        add_note_once(error, f"ranks {stopped} were stopped {why}")
    if tail := tails.get(cause, [])[-_TAIL:]:
        add_note_once(error, f"the last lines of rank {cause} on stderr:\n" + "\n".join(f"  {line}" for line in tail))
    _with_failures(error, errors)
    return failures[cause]


def _lost_step(
    rank: int, failures: dict[int, Outcome[Any]], tails: dict[int, list[str]]
) -> CollectiveMismatchError | None:
    """Make the error of a rank that its transport has ended because it and a peer had called different collectives.

    Our own collectives are compared before they are sent. Torch's are not, including those of sharded tensors and of
    checkpoints; those calls are on the stack that the worker has written at its end.
    """
    died = failures[rank].error
    text = "\n".join(tails.get(rank, []))
    if not (isinstance(died, WorkerDiedError) and died.exit_code == -signal.SIGABRT and _ABORTED in text):
        return None
    actions = {rank: f"called {describe_call(frames_of(main_stack(text))) or 'a collective of torch'}"}
    actions.update(
        (peer, action) for peer, each in failures.items() if peer != rank and (action := _action_in(each.error))
    )
    parts = [f"rank {each} {action}" for each, action in actions.items()]
    if len(parts) == 1:
        parts.append("its peers called another one")
    sizes = _SIZES.search(text)
    lost = CollectiveMismatchError(
        f"{' while '.join(parts)}{f' ({sizes[1]} bytes came for {sizes[2]})' if sizes else ''}; every rank must call "
        "the same collectives in the same order with the same shapes. Torch's own collectives, such as this one, do "
        "not compare them; full_tensor() of sharded parameters and functions that save checkpoints are among them: "
        "call them on all ranks, not in `if is_rank_zero():`"
    )
    lost.__cause__ = died
    return lost


def _action_in(error: BaseException | None) -> str:
    """What a rank that was woken by the end of a peer was doing; "" if that is not known."""
    cause = getattr(error, "__cause__", None)
    if isinstance(cause, RemoteTraceback):
        for part in tracebacks_in(cause.text):
            if call := describe_call(frames_of(part)[::-1]):
                return f"called {call}"
    found = _WOKEN.match(str(error))
    return f"came to {found[1]}" if found else ""


def _with_failures(error: BaseException | None, errors: dict[int, BaseException | None]) -> None:
    with contextlib.suppress(Exception):  # a user-defined class may refuse attributes
        error.failures = errors  # type: ignore[union-attr]
