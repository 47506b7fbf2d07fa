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
from torch.distributed.distributed_c10d import Store

from unisono.comm.processes import ProcessCommunicator
from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.outcome import Outcome
from unisono.torch_private import default_store

_WATCH_S = 0.25  # between two checks of the watch
_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two checks of a rank that is back: the first and the longest interval

_FIRST, _ALL, _TROUBLE = "first", "all", "trouble"

_num_calls = 0  # calls of `spawn` in this process; the count is the same on every rank


@contextlib.contextmanager
def return_together(comm: ProcessCommunicator, timeout: timedelta) -> Iterator[None]:
    """Run `fn` in the block; afterwards every rank has reached the block's end, or the world is about to break.

    Args:
        timeout: how long a rank that is back waits for the others; a last resort.

    Raises:
        BrokenWorldError, CollectiveMismatchError: not every rank has returned, or not after the same collectives.
    """
    global _num_calls
    _num_calls += 1
    store = dist.PrefixStore(f"unisono/spawn/{_num_calls}", default_store())  # type: ignore[attr-defined]
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(comm, store, is_over), name="unisono-returns", daemon=True)
    watch.start()
    try:
        try:
            yield
        finally:
            is_over.set()
            watch.join()
        _wait_all(comm, store, timeout)
    except BaseException as error:
        _report(comm, store, error)
        raise


def _wait_all(comm: ProcessCommunicator, store: Store, timeout: timedelta) -> None:
    """Wait, in a rank that is back, for all others, or for trouble."""
    own = comm.num_calls
    # Atomic: the first rank back writes, and each later one reads that rank's entry.
    rank, entered = _parse_return(store.compare_set(_FIRST, "", f"{comm.rank} {own}"))
    if entered != own:
        raise CollectiveMismatchError(
            f"rank {comm.rank} has returned from fn after {own} collectives, rank {rank} after {entered}; every rank "
            "must call the same collectives"
        )
    if store.add("count", 1) == comm.size:
        store.set(_ALL, "1")
    deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_S
    while not store.check([_ALL]) and not store.check([_TROUBLE]):
        if time.monotonic() > deadline:
            raise BrokenWorldError(
                f"rank {comm.rank} has returned from fn, and after {timeout} some peers have not, nor reported why; "
                "one is gone or stuck, or needs longer: spawn(..., timeout=...)"
            )
        time.sleep(pause)  # not Store.wait, which cannot be interrupted and prints warnings on a timeout
        pause = min(pause * 1.5, _LONGEST_S)
    if store.check([_TROUBLE]):
        trouble = Outcome.from_bytes(store.get(_TROUBLE))
        if isinstance(trouble.error, CollectiveMismatchError):
            raise CollectiveMismatchError(str(trouble.error))
        what = f"{trouble.where} failed with {type(trouble.error).__name__}: {trouble.error}"
        raise BrokenWorldError(f"rank {comm.rank} has returned from fn, but {what}") from trouble.error


def _watch(comm: ProcessCommunicator, store: Store, is_over: threading.Event) -> None:
    """Body of the watch's thread: report it if this rank is in a collective that a rank which is back never enters."""
    with contextlib.suppress(RuntimeError):  # the store may be gone with its host; then no rank is left to read it
        while not is_over.wait(_WATCH_S):
            if store.check([_FIRST]) and comm.num_calls > (first := _parse_return(store.get(_FIRST)))[1]:
                where = f"waits in {comm.current}" if comm.current else "has entered a further collective"
                text = f"rank {first[0]} has returned from fn, but rank {comm.rank} {where}, which needs every rank"
                _report(comm, store, CollectiveMismatchError(text))
                return


def _report(comm: ProcessCommunicator, store: Store, error: BaseException) -> None:
    """Report trouble to the others; trouble reported earlier is not replaced."""
    with contextlib.suppress(RuntimeError):  # the store may be gone with its host
        data: Any = Outcome.failure(error, f"rank {comm.rank}").to_bytes()  # annotated as str, but accepts bytes
        store.compare_set(_TROUBLE, "", data)


def _parse_return(first: bytes) -> tuple[int, int]:
    rank, entered = first.split()
    return int(rank), int(entered)
