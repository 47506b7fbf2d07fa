"""The gate through which threads that have to compile pass one by one. One that reaches a collective in the middle of
its model would wait for peers that wait at the gate, so it steps out for the collective."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets one thread in at a time. *Threads:* any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is inside."""
        return getattr(self._here, "is_inside", False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Wait to enter; leave at the end of the block."""
        with self._lock:
            self._here.is_inside = True
            try:
                yield
            finally:
                self._here.is_inside = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave during the block, and wait to enter again after it."""
        self._here.is_inside = False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._here.is_inside = True


compiling = Gate()
"""One for all models, since torch, too, compiles one graph at a time."""
