"""How a worker's C library keeps memory that was freed, so that the next step need not fault it in again."""

from __future__ import annotations

import ctypes
import os

# From <malloc.h>. If glibc tunes them itself, it gives the top of the heap back whenever twice the largest freed block
# lies there. A step frees all its activations, so each step began with hundreds of page faults, and each of those
# zeroes a page: measured, an eighth to a quarter of a small CNN's step.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30  # bytes at the top of the heap that are not given back
_LARGEST_IN_HEAP = 32 << 20  # bytes of a block: the greatest that glibc takes, and may choose by itself


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB of freed memory. Does nothing without glibc, or if the environment tunes it."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
