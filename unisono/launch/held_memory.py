"""Memory that outlives the workers: the process that restarts them holds it, and it is gone with that process. It has
the snapshots (`checkpoint/snapshot_memory.py`), and after them the steps that each rank of this machine has done.

*Threads:* each rank writes what is its own; the launcher reads, and clears the steps before it starts a group.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.launch.starting.process_ends import interpreter_command
from unisono.report.steps import NUMBERS, StepsDone

logger = logging.getLogger(__name__)

SIZE = 1 << 62
"""The bytes available for snapshots. The memory is sparse: it takes only what was written."""
MOST_RANKS = 256
"""Of a machine."""

_SAVING_S = 600
_STEPS = 8 * NUMBERS * MOST_RANKS
_STEPS += -_STEPS % mmap.ALLOCATIONGRANULARITY


def create_memory() -> int | None:
    """A descriptor of an empty memory; None where the system has no files without a name, or none of that size (`ulimit
    -f`)."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("unisono-held", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, SIZE + _STEPS)
    except OSError:
        os.close(file)
        return None
    return file


@contextmanager
def held_memory() -> Iterator[str]:
    """The path where workers of this machine open a new memory, which lasts for the block; "" if there is none."""
    file = create_memory()
    try:
        yield "" if file is None else f"/proc/{os.getpid()}/fd/{file}"
    finally:
        if file is not None:
            os.close(file)


def own_steps(path: str, local_rank: int) -> StepsDone:
    """The steps that this rank has done, in the memory at that path. Without one, or for more ranks than it has room
    for, they are in this process alone."""
    if not path or local_rank >= MOST_RANKS:
        return StepsDone()
    with open(path, "r+b", buffering=0) as file:
        numbers = memoryview(mmap.mmap(file.fileno(), _STEPS, offset=SIZE)).cast("q")
    return StepsDone(numbers[NUMBERS * local_rank :][:NUMBERS])


def clear_steps(path: str) -> None:
    """The ranks are about to be started, and have done no steps."""
    if path:
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(_STEPS), SIZE)


def read_steps(path: str, count: int) -> list[StepsDone]:
    """What each rank of this machine has done since then, as far as that memory has it."""
    if not path:
        return []
    with open(path, "rb", buffering=0) as file:
        numbers = memoryview(os.pread(file.fileno(), 8 * NUMBERS * min(count, MOST_RANKS), SIZE)).cast("q")
    return [StepsDone(numbers[start : start + NUMBERS]) for start in range(0, len(numbers), NUMBERS)]


def save_snapshot(path: str, choose: Callable[[], int | None] = lambda: 0) -> None:
    """Save the newest snapshot in that memory as a checkpoint, if the script would load it. In a process of its own:
    this one knows nothing of checkpoints. `choose` returns how many checkpoint numbers to leave to other machines; None
    if one of them saves it."""
    if not has_snapshots(path) or (left := choose()) is None:
        return
    code = f"from unisono.checkpoint.snapshot_contents import rescue; rescue({path!r}, {left})"
    try:
        ended = subprocess.run(
            interpreter_command(code), capture_output=True, text=True, check=False, timeout=_SAVING_S
        )
        failure = ended.stderr.strip().rpartition("\n")[2] if ended.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {_SAVING_S} s"
    if failure:
        logger.warning("the last snapshot could not be saved: %s", failure)
    else:
        sys.stderr.write(ended.stderr)


def has_snapshots(path: str) -> bool:
    """Whether ranks have left snapshots in that memory."""
    try:
        with open(path, "rb") as file:
            return os.lseek(file.fileno(), 0, os.SEEK_DATA) < SIZE
    except OSError:  # nothing was written, or there is no memory
        return False
