"""Wakes a rank whose device was waiting for a peer that has failed.

When its group is aborted, the wait in the driver ends as if it had succeeded, and yields numbers that were never
computed. So the rank's thread must not continue with them: it gets an exception at the next line that it runs.
"""

from __future__ import annotations

import ctypes

from unisono.errors import BrokenWorldError


class WokenError(BrokenWorldError):
    """Created by the interpreter, without arguments: a process has one world, which breaks only once.

    Attributes:
        words: what has happened.
        reason: the first cause.
    """

    words = ""
    reason: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(self.words)
        self.__cause__ = self.reason


def wake(thread: int, error: BrokenWorldError) -> None:
    """Make that thread raise the error's message, with its cause, as soon as it runs Python code."""
    WokenError.words, WokenError.reason = str(error), error.__cause__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(WokenError))
