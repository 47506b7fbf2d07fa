"""Where the processes of one machine meet: a rank continues when all have arrived.

Each rank counts its meetings in its own word, and waits until the words of all others have reached its count.

*Threads:* the one that holds `lock`; any may call `close`.

Invariants:

1. A rank updates its word after its part of the memory is written. A rank that has passed meeting n may read what the
   others wrote before n.
2. No rank passes meeting n + 1 before all have arrived at it, so what a rank read before it arrived at n + 1 may be
   overwritten by any rank after n + 1.
3. A rank that ends, in any way, releases its lock; ranks that wait for it check that periodically.
4. What ranks do is compared once per collective (`notes.py`), before any data is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from unisono.comm.operations import END, is_of_loop, mismatch_error, name_ranks
from unisono.comm.shared_memory import futex
from unisono.comm.shared_memory.mapping import Mapping
from unisono.comm.shared_memory.notes import Notes
from unisono.comm.stacks import describe_call, own_frames
from unisono.errors import CollectiveMismatchError

_COUNT, _STATE, _CONNECTED, _ELSEWHERE = 0, 4, 12, 16  # offsets of a rank's words in its header
_OPEN, _LEFT, _BROKEN = 0, 1, 2
_SPINS = 100
# A process that dies wakes no sleeper, so a peer's lock and the deadline are checked after each nap.
_FIRST_NAP_S, _LONGEST_NAP_S = 0.01, 0.1
_SAY_S = 10.0  # how long a rank waits for one that may wait for it before it warns of a deadlock
_GRACE_S = 2.0  # how long a rank that has found a difference waits for the others, to name their places
_WORD = 2**32
_ENDED = f"came to {END}"
_LOOPS = 64  # more than a page of notes has
_REASONS = {_OPEN: "has ended", _LEFT: "has left the group", _BROKEN: "has broken off"}

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[MeetingPoint] = weakref.WeakSet()  # of this process


class MeetingPoint:
    """This rank's place."""

    def __init__(self, mapping: Mapping, timeout: timedelta) -> None:
        self.rank, self.size = mapping.rank, mapping.size
        self.turn = 0  # of the meetings that this rank has arrived at; the memory holds it modulo the word
        self.timeout = timeout
        self._process = os.getpid()
        self.lock = threading.RLock()  # held during a collective; several threads may call collectives
        self._mapping = mapping
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping.memory))
        self._words = memoryview(mapping.memory).cast("I")
        self._count_at = [mapping.header_of(rank) + _COUNT for rank in range(self.size)]
        self._state_at = [mapping.header_of(rank) + _STATE for rank in range(self.size)]
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.notes = Notes(mapping)
        self._loops: dict[str, str] = {}  # the places of the latest ones
        self._name = ""  # of the next collective, if its caller has given it one
        self.is_closed = False  # whether this rank has left
        _open.add(self)

    def announce(self, action: str) -> dict[int, str]:
        """Note what this rank does before its next collective; sends nothing, and waits for nobody, unless the page is
        full: then all ranks meet. Returns what ranks have noted, by rank, if some have noted something else;
        CollectiveMismatchError, on all ranks, if all others find that soon, too."""
        with self.lock:
            return self._announce(action)

    def _announce(self, action: str) -> dict[int, str]:
        if self.is_closed:
            self._check_open()
        if is_of_loop(action):
            if len(self._loops) == _LOOPS:
                del self._loops[next(iter(self._loops))]
            self._loops[action] = describe_call(own_frames())
        if self.notes.is_full and action != _ENDED:  # an end needs no page after it
            self.enter(action)
            return {}
        self.notes.add(action)
        if difference := self.notes.find_difference():
            actions = difference.values()
            if _ENDED in actions and not any(map(is_of_loop, actions)):
                return {}  # a rank that waits for one that has ended learns so
            with contextlib.suppress(dist.DistNetworkError):
                self.meet(_GRACE_S)
                raise self._mismatch(difference)
        return difference

    def name_next(self, action: str) -> None:
        """Let the next collective be noted as `action`, the call that leads to it."""
        self._name = action

    def enter(self, action: str, timeout_s: float | None = None) -> None:
        """Begin a collective: wait for all ranks, and compare what they do. This rank's data must be written before.
        CollectiveMismatchError, on all ranks, if they do not agree; DistNetworkError as by `meet`."""
        if self.is_closed:  # first: peers may be reading what this rank noted last
            self._check_open()
        self.notes.add(self._name or action)
        self._name = ""
        self.meet(timeout_s)
        if difference := self.notes.find_difference():
            raise self._mismatch(difference)
        self.notes.turn_page()

    def _mismatch(self, difference: dict[int, str]) -> CollectiveMismatchError:
        """The error, with the places of calls, after a meeting in which all ranks have found the difference."""
        self.notes.turn_page()
        self.notes.add(difference[self.rank])
        self.notes.add(self.place_of(difference[self.rank]))
        # All must have written their places before any rank reads them.
        self.meet()
        self.close(is_broken=True)
        actions, places = zip(*map(self.notes.lines, range(self.size)), strict=True)
        return mismatch_error(dict(enumerate(actions)), dict(enumerate(places)))

    def place_of(self, action: str) -> str:
        """The user's call that led this rank to an action: the current one, unless it began a loop before."""
        return self._loops.get(action) or describe_call(own_frames())

    def meet(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have arrived. DistNetworkError, on all that wait, if one is gone or did not arrive in
        time."""
        if self.is_closed:
            self._check_open()
        self.turn += 1
        self._words[self._count_at[self.rank] // 4] = self.turn % _WORD
        futex.wake(self._address + self._count_at[self.rank])
        for rank in self._others:
            self._wait_for(rank, timeout_s)

    def close(self, *, is_broken: bool = False) -> None:
        """Leave, because of a failure or not, and wake the ranks that wait for this one. Idempotent. A fork's copy does
        not leave for its parent."""
        if not self.is_closed and os.getpid() == self._process:
            self.is_closed = True
            # Before the wake-up, after which sleepers look at it.
            self._words[self._state_at[self.rank] // 4] = _BROKEN if is_broken else _LEFT
            for at in self._count_at:  # including those where this process's own threads wait
                futex.wake(self._address + at)

    def check_presence(self, rank: int) -> None:
        """Raise if that rank will never arrive, whatever others wait for; DistNetworkError if it, or this rank, has
        left or ended."""
        if self.is_closed:
            self._check_open()
        if reason := self._absence_of(rank):
            raise dist.DistNetworkError(f"rank {rank} {reason}")

    def _check_open(self) -> None:
        if self.is_closed:
            raise dist.DistNetworkError(f"rank {self.rank} has left the group, or the group is broken")

    def _absence_of(self, rank: int) -> str:
        """Why that rank will no longer arrive; "" if it may."""
        has_ended = not self._mapping.is_alive(rank)
        state = self._words[self._state_at[rank] // 4]  # read after the check: a dead rank writes it no more
        return _REASONS[state] if state or has_ended else ""

    def missing(self) -> list[int]:
        """The ranks that have not arrived at this rank's last meeting."""
        return [rank for rank in self._others if not self._has_come(rank)]

    def _has_come(self, rank: int) -> bool:
        # Modulo the word: counts wrap around, and a peer is at most one meeting ahead.
        return (self._words[self._count_at[rank] // 4] - self.turn) % _WORD < _WORD // 2

    def note_connected(self) -> None:
        """Let the others know that this rank can receive messages."""
        self._words[(self._mapping.header_of(self.rank) + _CONNECTED) // 4] = 1

    def is_connected(self, rank: int) -> bool:
        """Whether that rank can receive messages."""
        return bool(self._words[(self._mapping.header_of(rank) + _CONNECTED) // 4])

    def _say_that_it_waits(self, rank: int, is_told: bool) -> bool:
        """Let this process's other groups know that it waits in this one. Warn if that rank may wait for this one;
        returns whether the user has been warned."""
        for each in list(_open):
            if each is not self and not each.is_closed:
                each._set_elsewhere(True)
        waits_elsewhere = bool(self._words[(self._mapping.header_of(rank) + _ELSEWHERE) // 4])
        if is_told or not (waits_elsewhere or self.is_connected(rank)):
            return is_told
        logger.warning(
            "rank %d has waited %g s for rank %d in a collective%s, and rank %d %s: they may wait for each other, "
            "since in shared memory a collective with async_op=True is complete when it returns; begin them in one "
            "order on all ranks, or let them continue by `unisono run --process-group gloo`",
            *(self.rank, _SAY_S, rank, f", {place}" if (place := describe_call(own_frames())) else "", rank),
            "waits in a collective of another group" if waits_elsewhere else "may wait for a message of this one",
        )
        return True

    def _set_elsewhere(self, is_elsewhere: bool) -> None:
        self._words[(self._mapping.header_of(self.rank) + _ELSEWHERE) // 4] = is_elsewhere

    def _wait_for(self, rank: int, limit_s: float | None) -> None:
        words, word, turn = self._words, self._count_at[rank] // 4, self.turn
        for _ in range(_SPINS):
            if (words[word] - turn) % _WORD < _WORD // 2:  # `_has_come`, without a hundred calls
                return
            os.sched_yield()
        timeout_s = self.timeout.total_seconds() if limit_s is None else limit_s
        deadline, say_at, nap_s = time.monotonic() + timeout_s, time.monotonic() + _SAY_S, _FIRST_NAP_S
        has_said = is_told = False
        while True:
            # Read before the check: if the word changes after that, the futex does not sleep.
            seen = words[word]
            if self._has_come(rank):
                break
            missing = self.missing()
            for each in missing:
                # otherwise it left after this meeting
                if self.is_closed or (self._absence_of(each) and not self._has_come(each)):
                    self.check_presence(each)
            if time.monotonic() > say_at:
                has_said, is_told = True, self._say_that_it_waits(rank, is_told)
            if time.monotonic() > deadline:
                waited = f"waited {timedelta(seconds=timeout_s)} for {name_ranks(missing)}"
                raise dist.DistNetworkError(f"{waited}, which is the timeout of the call")
            futex.wait(self._address + self._count_at[rank], seen, nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        for group in list(_open) if has_said else ():
            group._set_elsewhere(False)
