"""The exceptions of this package. A user's own exception is never wrapped: it keeps its type and gains notes.

The type says who is to blame::

    UnisonoError (RuntimeError)
    ├── NoWorldError              it is not known which world this process belongs to
    ├── BrokenWorldError          a peer failed or left; __cause__ is the first cause if it is known
    ├── CollectiveMismatchError   two ranks called different collectives
    ├── ReplicasDifferError       the ranks no longer hold the same model
    ├── CorruptedComputeError     two ranks have computed different gradients of one virtual rank
    ├── MixedPlacementError       an operation under `strict` mixes devices or precisions
    ├── ClosedError               you closed it
    ├── BusyError                 it is in use by another thread
    ├── WorkerDiedError           a worker ended without a Python exception: a signal, an exit
    ├── WorkerHungError           no rank makes progress; `ranks` are the late ones, `stacks` all
    ├── UnpicklableError          a function or a result cannot travel between processes
    ├── RemoteError               a worker raised an exception that cannot be rebuilt in this process
    ├── NoSuchBatchError (ValueError)  rows match no batch, so that it is unknown which of them count
    ├── StateError (ValueError)   a loader cannot continue from this state; `reason` says what differs
    └── CheckpointError           a checkpoint cannot be saved or loaded
        ├── NoCheckpointError       there is no checkpoint
        ├── DamagedCheckpointError  it is not what was written
        ├── CheckpointVersionError  it was written by a newer unisono
        └── CheckpointMismatchError (ValueError)  it holds other objects than those it is loaded into

    RemoteTraceback (Exception)   never raised: the `__cause__` of an exception that crossed a process
    StoppedError (SystemExit)     the ranks agreed to stop early, by `should_stop`; ends a script with code 143
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence


class UnisonoError(RuntimeError):
    """Base class of this package's errors. Pickle rebuilds them from `args`: the message, then their attributes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NoWorldError(UnisonoError):
    """The environment announces several processes, but no rank for this one."""


class BrokenWorldError(UnisonoError):
    """A peer failed or left, so no collective of this world can complete.

    This is a secondary error: the caller of `spawn` or `DataParallel` gets the peer's own exception instead.
    """


class CollectiveMismatchError(UnisonoError):
    """Two ranks called different collectives, or the same one with different shapes, types or arguments.

    Attributes:
        odd_ranks: the fewest ranks that did the same; the traceback that is shown comes from one of them.
    """

    def __init__(self, message: str, odd_ranks: Sequence[int] = ()) -> None:
        super().__init__(message, odd_ranks)
        self.odd_ranks = odd_ranks


class ReplicasDifferError(UnisonoError):
    """The ranks no longer hold the same parameters, though all of them took part in each collective.

    Attributes:
        name: a description of the first parameter that differs.
        ranks: those that differ from rank zero.
    """

    def __init__(self, message: str, name: str, ranks: list[int]) -> None:
        super().__init__(message, name, ranks)
        self.name = name
        self.ranks = ranks


class CorruptedComputeError(UnisonoError):
    """Two ranks have computed the gradient of one virtual rank, with different bits. No optimizer has stepped on it.

    Attributes:
        step: the number of the step, in this run.
        virtual_rank: the first one whose gradients differ.
        rank, witness: the rank that carries it, and the one that computed it, too.
        name: the first of its parameters whose gradient differs.
    """

    def __init__(self, message: str, step: int, virtual_rank: int, rank: int, witness: int, name: str) -> None:
        super().__init__(message, step, virtual_rank, rank, witness, name)
        self.step, self.virtual_rank, self.name = step, virtual_rank, name
        self.rank, self.witness = rank, witness


class MixedPlacementError(UnisonoError):
    """An operation inside `strict` has tensors on several devices, or in several precisions."""


class ClosedError(UnisonoError):
    """The object was closed by its owner and can no longer be used."""


class BusyError(UnisonoError):
    """The object is in use by another thread and serves one at a time."""


class WorkerDiedError(UnisonoError):
    """A worker process ended without returning and without a Python exception.

    Attributes:
        rank: the rank of the worker.
        exit_code: its exit status; -N when signal N ended it, as in `subprocess`.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message, rank, exit_code)
        self.rank = rank
        self.exit_code = exit_code


class WorkerHungError(UnisonoError):
    """No rank of a group made progress for too long; the group has been stopped.

    Attributes:
        ranks: the late ranks, those that the others wait for; all ranks if none waits.
        stacks: every rank's Python stacks, as text, by rank; absent for a rank that could not report it.
    """

    def __init__(self, message: str, ranks: list[int], stacks: dict[int, str]) -> None:
        super().__init__(message, ranks, stacks)
        self.ranks = ranks
        self.stacks = stacks


class UnpicklableError(UnisonoError):
    """A function, its arguments or its result cannot be sent to another process."""


class RemoteError(UnisonoError):
    """Stands for a worker's exception whose class cannot be rebuilt here; the message begins with its type.

    Attributes:
        sent: the exception as it came, for a process that knows its class.
    """

    sent: dict[str, object] | None = None


class NoSuchBatchError(UnisonoError, ValueError):
    """Rows that were given to `gather_for_metrics` match no batch of a prepared loader. Raised on all ranks."""


class StateError(UnisonoError, ValueError):
    """A loader cannot continue from this state.

    Attributes:
        reason: "version", "length" (of the dataset), "seed" or "order", if that differs; otherwise "state".
    """

    def __init__(self, message: str, reason: str = "state") -> None:
        super().__init__(message, reason)
        self.reason = reason


class CheckpointError(UnisonoError):
    """A checkpoint, or serialized bytes, cannot be saved or loaded."""

    def __init__(self, message: str = "") -> None:
        # It quotes names of files that others may have written: a terminal must not obey them.
        super().__init__("".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in message))


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at the given place."""


class DamagedCheckpointError(CheckpointError):
    """A file is not as it was written; the message names it."""


class CheckpointVersionError(CheckpointError):
    """The checkpoint was written by a newer version."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint holds other objects, such as another model, than those it is loaded into."""


class RemoteTraceback(Exception):  # noqa: N818 - a carrier of text, not an error of its own
    """The text of a traceback from another process, shown by Python above the exception that it caused.

    Attributes:
        text: all of it.
        shown: what is shown of it.
    """

    def __init__(self, text: str, shown: str = "") -> None:
        super().__init__(text, shown)
        self.text, self.shown = text, shown or text

    def __str__(self) -> str:
        return "\n" + self.shown


STOP_EXIT_CODE = 128 + signals.SIGTERM
"""128 + SIGTERM: the exit status, in a shell, of a process ended by SIGTERM; that of a run that was asked to stop."""


class StoppedError(SystemExit):
    """The workers stopped early and in order, because a stop was requested; uncaught, it ends a script with 143.

    143 is 128 + SIGTERM, the status of a process ended by that signal: schedulers regard it as a stop that they have
    requested, not as success.

    Attributes:
        results: what `fn` returned, by rank.
        steps: how many optimizer steps each rank has taken in this run.
    """

    def __init__(self, results: list[object], steps: int = 0) -> None:
        super().__init__(STOP_EXIT_CODE)
        self.results = results
        self.steps = steps

    def __str__(self) -> str:
        after = f", after {self.steps} steps" if self.steps else ""
        return f"stopped early as asked{after}; run again to resume"


def describe_exit(exit_code: int | None) -> str:
    """Say in words how a process ended: ``describe_exit(-9) == "was killed by SIGKILL"``."""
    if exit_code is None:
        return "ended for an unknown reason"
    if exit_code < 0:
        try:
            return f"was killed by {signals.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    return f"exited with code {exit_code}"
