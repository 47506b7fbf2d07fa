"""Futexes: let a process sleep until another changes a word of memory that both map (man 2 futex)."""

from __future__ import annotations

import ctypes
import platform
import sys

_FUTEX = 202  # the number of the system call on x86-64
_WAIT, _WAKE = 0, 1  # for memory shared by processes: not FUTEX_PRIVATE_FLAG
_EVERYBODY = 2**31 - 1

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
"""Linux on x86-64. Elsewhere stores may become visible in another order, and Python has no fence to prevent that."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if SUPPORTED:
    _futex = ctypes.CDLL(None).syscall
    _futex.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    _futex.restype = ctypes.c_long


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep while the word at `address` equals `seen`, until `wake`, a signal or the timeout: the caller looks again.
    Releases the GIL."""
    seconds, rest = divmod(timeout_s, 1)
    _futex(_FUTEX, address, _WAIT, seen, ctypes.byref(_TimeSpec(int(seconds), int(rest * 1e9))))


def wake(address: int) -> None:
    """Wake all sleepers at `address`; also a full fence: they see what was written before."""
    _futex(_FUTEX, address, _WAKE, _EVERYBODY, None)
