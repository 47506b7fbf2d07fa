"""/dev/shm, the shared memory through which loader workers send tensors: containers often have 64 MB of it.

If it is full, a batch cannot be sent, and a process that writes beyond its capacity is killed by SIGBUS.

*Threads:* the reader's, in the parent; `share` runs in the loader workers.
"""

from __future__ import annotations

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
_LITTLE, _FEW_FILES = 1 << 30, 1024  # bytes, and files
_WAY_OUT = (
    "enlarge it (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory mounted "
    "there), or pass fewer num_workers, a smaller prefetch_factor or a smaller batch_size"
)


def is_tight() -> bool:
    """Whether batches that wait for the loop should be copied out of shared memory: there is little, as in containers,
    or this process may have few files open, of which each shared tensor takes one."""
    found = _free_and_size()
    few = resource is not None and 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FEW_FILES
    return few or (found is not None and found[1] < _LITTLE)


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
