"""Meeting: where the threads of one process exchange a value each.

*Threads:* every replica thread calls `exchange`; any thread may call `abort`. One condition variable guards everything.
(`threading.Barrier` is not sufficient: it does not notice a rank that has returned, and its `abort` breaks ranks that
are still leaving the previous generation.)

Invariants:

1. Each round is one `_Exchange` object. A fast rank that enters the next one gets a new object, so it can never modify
   what a slow rank is still reading.
2. The last rank to arrive combines the values, in rank order, outside the lock. The result is shared and must not be
   modified.
3. Once broken, a meeting stays broken, with the first cause.
4. A round that a departed rank can never join breaks immediately, not after a timeout.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from unisono.comm.operations import END, Call, action_of, broken, departure, is_of_loop, left, mismatch_error
from unisono.comm.outcome import Outcome, copy_error
from unisono.comm.stacks import describe_call, own_frames

R = TypeVar("R")


class _Exchange:
    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.threads: dict[int, int] = {}
        self.values: dict[int, Any] = {}
        self.outcome: Outcome[Any] | None = None


class Meeting:
    """A place where `size` threads meet repeatedly. A rank that waits longer than the time-out, a last resort, breaks
    the world."""

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._round = _Exchange()
        self._departed: dict[int, str] = {}  # with what they had announced last
        self._broken: tuple[str, BaseException | None] | None = None

    def exchange(self, rank: int, call: Call, value: Any, combine: Callable[[list[Any]], R]) -> R:
        """Contribute `value`, wait for every rank's, and return `combine(values in rank order)`, the same object to
        all. BrokenWorldError if a rank failed or departed, CollectiveMismatchError if another rank made another call.
        """
        with self._changed:
            if rank in self._departed:
                raise left(rank, call)
            self._check_unbroken(rank, call)
            here = self._round
            here.calls[rank], here.values[rank] = call, value
            here.threads[rank] = threading.get_ident()
            is_last = len(here.calls) == self.size
            if is_last:
                # The round is complete: from here on neither `leave` nor a break can affect it.
                self._round = _Exchange()
            elif self._departed:
                self._break_world(departure(sorted(self._departed)), None)
                self._check_unbroken(rank, call)
            else:
                self._wait(here, rank, call)
        if is_last:
            # Outside the lock, which `abort` and `leave` need in the meantime.
            outcome = self._combine_values(here, combine)
            with self._changed:
                here.outcome = outcome
                self._changed.notify_all()
        assert here.outcome is not None
        if here.outcome.error is not None:
            raise copy_error(here.outcome.error)
        result: R = here.outcome.value  # type: ignore[assignment]
        return result

    def abort(self, cause: BaseException, rank: int) -> None:
        """Break the world because of `cause`; only the first cause is kept."""
        with self._changed:
            self._break_world(f"rank {rank} failed with {type(cause).__name__}: {cause}", cause)

    def leave(self, rank: int, announced: str = "") -> None:
        """Record that the rank no longer takes part; a round that waits for it breaks. CollectiveMismatchError in the
        last one, if a loop other than the others' was `announced` since the last exchange. Idempotent."""
        with self._changed:
            if rank in self._departed:
                return
            self._departed[rank] = announced
            if self._round.calls:
                self._break_world(departure(sorted(self._departed)), None)
            last = {each: f"came to {words or END}" for each, words in sorted(self._departed.items())}
            if len(last) == self.size and len({*last.values()}) > 1 and any(map(is_of_loop, last.values())):
                raise mismatch_error(last)

    def _wait(self, here: _Exchange, rank: int, call: Call) -> None:
        def is_over() -> bool:
            # Once all have arrived, nothing can stop the round: the last rank combines without waiting for others.
            return here.outcome is not None or (self._broken is not None and len(here.calls) < self.size)

        if not self._changed.wait_for(is_over, self._timeout.total_seconds()) and len(here.calls) < self.size:
            missing = sorted(set(range(self.size)) - set(here.calls))
            self._break_world(f"rank {rank} waited {self._timeout} in {call} for ranks {missing}", None)
        # If the last rank arrived just after the time-out, only the combining remains, which has no limit.
        self._changed.wait_for(is_over)
        if here.outcome is None:
            self._check_unbroken(rank, call)

    def _check_unbroken(self, rank: int, call: Call) -> None:
        if self._broken is not None:
            message, cause = self._broken
            raise broken(rank, call, message) from cause

    def _break_world(self, message: str, cause: BaseException | None) -> None:
        if self._broken is None:
            self._broken = (message, cause)
            self._changed.notify_all()

    def _combine_values(self, here: _Exchange, combine: Callable[[list[Any]], R]) -> Outcome[R]:
        calls = [here.calls[rank] for rank in range(self.size)]
        if all(call == calls[0] for call in calls):
            outcome = Outcome.capture(combine, [here.values[rank] for rank in range(self.size)])
            here.values.clear()
        else:
            frames = sys._current_frames()  # all of these threads are in this function, or wait in `exchange`
            places = {rank: describe_call(own_frames(frames[thread])) for rank, thread in here.threads.items()}
            actions = {rank: action_of(call) for rank, call in here.calls.items()}
            outcome = Outcome.failure(mismatch_error(actions, places))
        if outcome.error is not None:
            with self._changed:
                self._break_world(f"{type(outcome.error).__name__}: {outcome.error}", outcome.error)
        return outcome
