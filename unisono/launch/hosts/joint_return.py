"""Returning from `fn` together, in ranks that a launcher has started: which ranks are back, and which still wait.

A worker of `spawn` that returns leaves the process group, which wakes the peers that wait for it. Here the script
continues after `fn`, with more collectives, so the group must persist; and a rank that is back must not enter a
collective of its own, or it would meet a peer in a different one. So the ranks meet in the group's store:

1. The first rank that is back writes how many collectives it has entered. A rank that is still in `fn` and has entered
   more waits for one that will never complete: its watch reports that as trouble.
2. A rank that fails in `fn`, or returns after a different number of collectives, reports that as trouble.
3. A rank that is back waits for all to be back, or for trouble, which it raises, and so breaks the world for all.

A rank reports any trouble before it is counted as back. So once all are back, all know the same, and the next
collective of each is the next one of every other.

*Threads:* the rank's own; the watch, during `fn`, is a thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.comm.processes import ProcessCommunicator
from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.outcome import Outcome
from unisono.torch_private import default_store

_WATCH_S = 0.25  # between two checks of the watch
_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two checks of a rank that is back: the first and the longest interval

_num_calls = 0  # calls of `spawn` in this process; the count is the same on every rank


class JointReturn:
    """One call of `fn` by all ranks.

    Args:
        comm: the rank's own communicator.
        store: the store of the default process group.
        number: the number of the call.
        timeout: how long a rank that is back waits for the others; a last resort.
    """

    def __init__(
        self, comm: ProcessCommunicator, store: dist.distributed_c10d.Store, number: int, timeout: timedelta
    ) -> None:
        self.comm = comm
        self._store = store
        self._timeout = timeout
        self._first, self._count, self._all, self._trouble = (
            f"unisono/spawn/{number}/{name}" for name in ("first", "count", "all", "trouble")
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """During the block, report it if this rank waits for one that is back."""
        is_over = threading.Event()
        thread = threading.Thread(target=_watch, args=(self, is_over), name="unisono-returns", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def wait_all(self) -> None:
        """Wait, in a rank that is back, for all others.

        Raises:
            CollectiveMismatchError: a rank waits for another one that is back, or returned after other collectives.
            BrokenWorldError: a rank has failed, or did not return in time.
        """
        own = self.comm.num_calls
        # Atomic: the first rank back writes, and each later one reads that rank's entry.
        rank, entered = _parse_return(self._store.compare_set(self._first, "", f"{self.comm.rank} {own}"))
        if entered != own:
            self.tell(
                CollectiveMismatchError(
                    f"rank {self.comm.rank} has returned from fn after {own} collectives, rank {rank} after {entered}; "
                    "every rank must call the same collectives"
                )
            )
        if self._store.add(self._count, 1) == self.comm.size:
            self._store.set(self._all, "1")
        self._wait_told()
        if self._store.check([self._trouble]):
            self._raise_trouble()

    def first_back(self) -> tuple[int, int] | None:
        """The rank that was back first, and how many collectives it had entered; None if none is back."""
        return _parse_return(self._store.get(self._first)) if self._store.check([self._first]) else None

    def tell_waiting(self, first: int) -> None:
        """Report that this rank is in a collective that the first rank to return will never enter."""
        current = self.comm.current
        where = f"waits in {current}" if current else "has entered a further collective"
        self.tell(
            CollectiveMismatchError(
                f"rank {first} has returned from fn, but rank {self.comm.rank} {where}, which needs every rank"
            )
        )

    def tell(self, error: BaseException) -> None:
        """Report trouble to the others; trouble reported earlier is not replaced."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            # annotated as str, but accepts bytes
            data: Any = Outcome.failure(error, f"rank {self.comm.rank}").to_bytes()
            self._store.compare_set(self._trouble, "", data)

    def _wait_told(self) -> None:
        """Wait until all are back, or a rank has reported trouble."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _SHORTEST_S
        while not self._store.check([self._all]) and not self._store.check([self._trouble]):
            if time.monotonic() > deadline:
                raise BrokenWorldError(
                    f"rank {self.comm.rank} has returned from fn, and after {self._timeout} some peers have not, nor "
                    "reported why; one is gone or stuck, or needs longer: spawn(..., timeout=...)"
                )
            time.sleep(pause)  # not Store.wait, which cannot be interrupted and prints warnings on a timeout
            pause = min(pause * 1.5, _LONGEST_S)

    def _raise_trouble(self) -> None:
        trouble = Outcome.from_bytes(self._store.get(self._trouble))
        error = trouble.error
        if isinstance(error, CollectiveMismatchError):
            raise CollectiveMismatchError(str(error))
        what = f"{trouble.where} failed with {type(error).__name__}: {error}"
        raise BrokenWorldError(f"rank {self.comm.rank} has returned from fn, but {what}") from error


@contextlib.contextmanager
def return_together(comm: ProcessCommunicator, timeout: timedelta) -> Iterator[None]:
    """Run `fn` in the block; afterwards every rank has reached the block's end, or the world is about to break.

    Raises:
        BrokenWorldError, CollectiveMismatchError: not every rank has returned, or not after the same collectives.
    """
    global _num_calls
    _num_calls += 1
    returning = JointReturn(comm, default_store(), _num_calls, timeout)
    try:
        with returning.watched():
            yield
        returning.wait_all()
    except BaseException as error:
        returning.tell(error)
        raise


def _watch(returning: JointReturn, is_over: threading.Event) -> None:
    """Body of the watch's thread."""
    first: tuple[int, int] | None = None
    with contextlib.suppress(RuntimeError):  # the store may be gone with its host; then no rank is left to read it
        while not is_over.wait(_WATCH_S):
            first = first or returning.first_back()
            if first is not None and returning.comm.num_calls > first[1]:
                returning.tell_waiting(first[0])
                return


def _parse_return(first: bytes) -> tuple[int, int]:
    rank, entered = first.split()
    return int(rank), int(entered)
