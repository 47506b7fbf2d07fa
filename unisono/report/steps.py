"""How far a rank has got, in memory that it shares with its launcher: known even if the rank was killed.

*Threads:* the rank's loop writes; the thread that writes its record, and its launcher, read: each number is whole.
"""

from __future__ import annotations

import time
from array import array

NUMBERS = 3  # of 8 bytes each


class StepsDone:
    """The steps of one rank in one attempt, which begins at zero: `NUMBERS` integers, by default in this process's own
    memory."""

    def __init__(self, memory: memoryview[int] | None = None) -> None:
        self._numbers = memory if memory is not None else array("q", [0] * NUMBERS)

    def note(self, done: int) -> None:
        """A step was taken, and that many are done; of several optimizers, the one that has taken the most counts."""
        numbers = self._numbers
        if done > numbers[0]:
            numbers[0] = done
        if not numbers[2]:
            numbers[2] = time.perf_counter_ns()

    def load(self, done: int) -> None:
        """The rank continues from a state that it has loaded: that many steps are done."""
        self._numbers[0], self._numbers[1] = done, done + 1

    @property
    def done(self) -> int:
        """The number of optimizer steps, with those before the state that was loaded."""
        return self._numbers[0]

    @property
    def loaded(self) -> int | None:
        """The number of those before the state that was loaded last; None if none was."""
        return self._numbers[1] - 1 if self._numbers[1] else None

    @property
    def first_ns(self) -> int | None:
        """When the first step of this attempt ended, by `time.perf_counter_ns`, a clock of the machine; None if none
        has."""
        return self._numbers[2] or None
