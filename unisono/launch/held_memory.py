"""The memory in which workers leave their snapshots (`checkpoint/snapshot_memory.py`): held by the process that starts
them again, and gone with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.launch.starting.process_ends import interpreter_command

logger = logging.getLogger(__name__)

SIZE = 1 << 62
"""Its bytes. It is sparse: it takes what was written."""


def create_memory() -> int | None:
    """A descriptor of an empty memory; None where the system has no file without a name."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("unisono-snapshots", os.MFD_CLOEXEC)
    os.ftruncate(file, SIZE)
    return file


def has_content(path: str) -> bool:
    """Whether something was written to the memory of that path."""
    try:
        with open(path, "rb") as file:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
    except OSError:  # it has none, or there is none
        return False
    return True


def save_snapshot(path: str) -> None:
    """Save the newest snapshot in that memory as a checkpoint, if the script would load it. In a process of its own,
    which ends by itself: this one knows nothing of checkpoints."""
    if has_content(path):
        code = f"from unisono.checkpoint.snapshot_contents import rescue; rescue({path!r})"
        ended = subprocess.run(interpreter_command(code), capture_output=True, text=True, check=False)
        sys.stderr.write(ended.stderr if ended.returncode == 0 else "")
        if ended.returncode:
            logger.warning("the last snapshot could not be saved: %s", ended.stderr.strip().rpartition("\n")[2])


@contextmanager
def held_memory() -> Iterator[str]:
    """The path by which workers of this machine open a new memory, which lasts for the block; "" if there is none."""
    file = create_memory()
    try:
        yield "" if file is None else f"/proc/{os.getpid()}/fd/{file}"
    finally:
        if file is not None:
            os.close(file)
