"""The memory in which workers leave their snapshots (`checkpoint/snapshot_memory.py`): held by the process that starts
them again, and gone with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SIZE = 1 << 62
"""Its bytes. It is sparse: it takes what was written."""


def create_memory() -> int | None:
    """A descriptor of an empty memory; None where the system has no file without a name."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("unisono-snapshots", os.MFD_CLOEXEC)
    os.ftruncate(file, SIZE)
    return file


@contextmanager
def held_memory() -> Iterator[str]:
    """The path by which workers of this machine open a new memory, which lasts for the block; "" if there is none."""
    file = create_memory()
    try:
        yield "" if file is None else f"/proc/{os.getpid()}/fd/{file}"
    finally:
        if file is not None:
            os.close(file)
