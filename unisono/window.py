"""Window: which samples the gradients stand for that a rank has gathered since its last optimizer step.

A loader that knows the whole round tells, with each batch, how many of the round's samples came to this rank. The
optimizer step weighs this rank's gradient by that share, which makes the reduced gradient that of the mean loss over
all samples of the global batch, however unevenly they were dealt. The number of batches goes along, to tell ranks that
stand in different rounds.

This is the one thing that passes between `loaders` and `parallel`, which do not know each other.

*Threads:* a window belongs to the thread that runs the loop and to the world that it runs in.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

from unisono.world import World


class Share(NamedTuple):
    """This rank's part of the samples of a step, 0 to 1, and the number of batches in which they came."""

    part: float
    batches: int


class Window:
    """Counts of samples: this rank's and all ranks'."""

    def __init__(self) -> None:
        self._batches = 0
        self._samples = 0
        self._total: int | None = 0
        self._taken: Share | None = None

    def add(self, samples: int, total: int | None) -> None:
        """A batch with `samples` of the round's `total` samples was delivered; None where nobody knows the total."""
        self._batches += 1
        self._samples += samples
        self._total = None if total is None or self._total is None else self._total + total

    def take(self) -> Share | None:
        """This rank's share, and begin anew; None where it is unknown, or no batch came.

        Two optimizers that step on the same batch get the same share.
        """
        if self._batches:
            self._taken = Share(self._samples / self._total, self._batches) if self._total else None
            self._batches, self._samples, self._total = 0, 0, 0
        return self._taken

    def end_pass(self) -> None:
        """The loop over the loader has ended: what steps are taken from now on are not on its last batch."""
        self._taken = None


_of_thread = threading.local()


def window_of(world: World) -> Window:
    """The calling thread's window in that world."""
    windows: WeakKeyDictionary[World, Window] | None = getattr(_of_thread, "windows", None)
    if windows is None:
        windows = _of_thread.windows = WeakKeyDictionary()
    return windows.setdefault(world, Window())
