"""/dev/shm, the shared memory through which loader workers send tensors: containers often have 64 MB of it.

If it is full, a batch cannot be sent, and a process that writes beyond its capacity is killed by SIGBUS.

*Threads:* the reader's, in the parent; `share` runs in the loader workers.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

from unisono.outcome import add_note_once, chain_of
from unisono.tree import tensors

SHM = Path("/dev/shm")

_TOO_MANY = "Too many open files"
_FULL = "unable to allocate shared memory"  # torch's words
_DEFAULT_PREFETCH = 2  # torch's
_WAY_OUT = (
    "enlarge it (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory mounted "
    "there), or pass fewer num_workers, a smaller prefetch_factor or a smaller batch_size"
)

logger = logging.getLogger(__name__)


class Room:
    """The shared memory for the loader workers of one pool, and whether it is sufficient; the first batch decides.

    Args:
        num_workers, prefetch_factor: the number of workers, and of batches that each prefetches.
        waiting: the largest number of received batches that wait for the loop.

    Attributes:
        is_tight: whether waiting batches should be copied out of shared memory: it, or this process's file descriptors,
            of which each shared tensor holds one, would not suffice for them.
    """

    def __init__(self, num_workers: int, prefetch_factor: int | None, waiting: int) -> None:
        self._num_workers = num_workers
        self._in_flight = num_workers * (prefetch_factor or _DEFAULT_PREFETCH)
        self._waiting = waiting
        self._free: int | None = None
        self._has_checked = False
        self.is_tight = False

    def look(self) -> None:
        """Measure the free space, before the workers start."""
        if not self._has_checked:
            found = _free_and_size()
            self._free = found and found[0]

    def check(self, batch: Any) -> None:
        """Warn at the first batch if the largest possible number of batches in transit does not fit."""
        if self._has_checked:
            return
        self._has_checked = True
        found = list(filter(has_storage, {id(each): each for each in tensors(batch)}.values()))
        nbytes = sum(each.nbytes for each in found if each.is_shared())
        needed = self._in_flight * nbytes
        limit = math.inf if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.is_tight = self._waiting * len(found) > limit / 2
        if self._free is None:
            return
        # The batches that wait are copied out if it is tight, so only those in flight can still fill it.
        self.is_tight = self.is_tight or needed + self._waiting * nbytes > self._free
        if needed > self._free:
            logger.warning(
                "%s had %s free when the loader workers started, and %d batches of %s, which num_workers=%d may have "
                "in flight at once, need %s, for each rank on this machine; when it is full, loading fails; %s",
                *(SHM, _megabytes(self._free), self._in_flight, _megabytes(nbytes), self._num_workers),
                *(_megabytes(needed), _WAY_OUT),
            )


def share(batch: Any) -> None:
    """Move the tensors of a batch to shared memory now, in a thread that can report a failure.

    torch's own sending thread would print the error and drop the batch, and the receiver would wait forever.
    """
    for each in tensors(batch):
        if each.is_cpu and has_storage(each) and each.untyped_storage().nbytes():
            each.share_memory_()


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a single storage: it is neither sparse nor composed of other tensors."""
    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def explain(error: BaseException) -> None:
    """Add a note to torch's error about missing shared memory or descriptors: the limit, and what to do."""
    if any(_FULL in str(each) for each in chain_of(error)):
        add_note_once(error, why_full())
    if resource is not None and any(_TOO_MANY in str(each) for each in chain_of(error)):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        add_note_once(
            error,
            f"this process may have {limit} files open (ulimit -n), and each tensor from a loader worker takes some; "
            "raise that limit, send fewer and larger tensors, or pass fewer num_workers or a smaller prefetch_factor",
        )


def why_full() -> str:
    """Describe the size of shared memory, its free part, and what to do."""
    found = _free_and_size()
    sizes = f", of {_megabytes(found[1])} with {_megabytes(found[0])} free now," if found else ""
    return f"{SHM}{sizes} had no room for the batches that loader workers send; {_WAY_OUT}"


def _free_and_size() -> tuple[int, int] | None:
    """Return the free and the total shared memory, in bytes; None if there is no such file system."""
    try:
        status = os.statvfs(SHM)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
