"""The memory that the ranks of one machine share: created by the first, mapped by all, freed with the last.

It is a file without a name (`memfd_create`), so nothing can be left over, and the size of /dev/shm does not limit it.
The others open it under /proc, as the store of the group says. Either all ranks map it or none does.

Each rank holds a lock on a byte of the file, which the kernel releases when its process ends: so its peers know whether
it is alive, without a message. (A record lock of `fcntl`: forked loader workers do not inherit it.)
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from unisono.comm.shared_memory import futex

logger = logging.getLogger(__name__)

PAGE = 4096
"""The size of a rank's header, which only that rank writes."""

_JOINED = 8  # offset in the header where a rank reports that it has joined
_TOKEN = 16  # bytes at the beginning of the file that identify it
_PLACE, _REFUSED = "place", "refused"
_NAME = "unisono-blocks"
_NETWORK = "/proc/self/ns/net"
_POLL_S = 0.002
_LOCK = struct.Struct("hhqqi4x")  # struct flock


class Mapping:
    """A header page of the file, one header page per rank, and the blocks, which begin at `blocks_at`."""

    def __init__(self, file: int, rank: int, size: int, num_bytes: int) -> None:
        self._file = file
        self.rank, self.size = rank, size
        self.blocks_at = PAGE * (size + 1)
        self.memory = mmap.mmap(file, self.blocks_at + num_bytes)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        weakref.finalize(self, os.close, file).atexit = False  # the lock has to last as long as the process
        self.memory[self.header_of(rank) + _JOINED] = 1

    def header_of(self, rank: int) -> int:
        """The offset of that rank's header."""
        return PAGE * (rank + 1)

    def is_alive(self, rank: int) -> bool:
        """Whether the process of that rank is still running; this process itself does not count as running."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def missing(self) -> Sequence[int]:
        """The ranks that have not joined yet."""
        return [rank for rank in range(self.size) if not self.memory[self.header_of(rank) + _JOINED]]


def map_together(store: Store, rank: int, size: int, num_bytes: int, timeout: timedelta) -> Mapping | None:
    """Map `num_bytes` for blocks, with all ranks of the group, whose store it is; None, on all ranks, if one of them
    cannot. DistStoreError, if some ranks did not join within `timeout`."""
    if not futex.SUPPORTED:
        return None
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        mapping = _create(store, size, num_bytes) if rank == 0 else _open(store, rank, size, num_bytes, deadline)
    except OSError as error:
        store.set(_REFUSED, str(rank))
        # What a rank on another machine does not find, or may not open, was never shared with it.
        if rank == 0 or not isinstance(error, FileNotFoundError | PermissionError):
            _warn_once(str(error))
        return None
    if mapping is None:
        return None
    while missing := mapping.missing():
        if store.check([_REFUSED]):
            return None
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank {rank} waited {timeout} for ranks {missing} to join it in shared memory")
        time.sleep(_POLL_S)
    return mapping


def _create(store: Store, size: int, num_bytes: int) -> Mapping:
    token = secrets.token_bytes(_TOKEN)
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(file, PAGE * (size + 1) + num_bytes)
    os.pwrite(file, token, 0)
    mapping = Mapping(file, 0, size, num_bytes)
    # Announced last: the others open the file as soon as they read this.
    store.set(_PLACE, f"{os.getpid()} {file} {token.hex()} {os.readlink(_NETWORK)}")
    return mapping


def _open(store: Store, rank: int, size: int, num_bytes: int, deadline: float) -> Mapping | None:
    """Open what the first rank has created; None if it could not."""
    while not store.check([_PLACE]):  # `get` would wait indefinitely if the first rank could not create it
        if store.check([_REFUSED]):
            return None
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank {rank} has waited in vain for rank 0 to share its memory")
        time.sleep(_POLL_S)
    pid, number, token, network = store.get(_PLACE).decode().split()
    path = f"/proc/{pid}/fd/{number}"
    # Anyone who reaches the store may have written this: it must lead to no file but one of ours.
    if not (pid.isdecimal() and number.isdecimal() and _is_ours(path)):
        raise FileNotFoundError(f"{path} is no memory of a rank")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    found = os.fstat(file)
    is_whole = found.st_uid == os.geteuid() and found.st_size == PAGE * (size + 1) + num_bytes
    # On another machine, or in another container, the same path is a different file; and messages between two ranks go
    # over the loopback, which differs in another network.
    is_that_one = is_whole and _is_ours(f"/proc/self/fd/{file}") and os.pread(file, _TOKEN, 0).hex() == token
    if not is_that_one or os.readlink(_NETWORK) != network:
        os.close(file)
        raise FileNotFoundError("it is another file, or in another network")
    return Mapping(file, rank, size, num_bytes)


def _is_ours(path: str) -> bool:
    return os.readlink(path).startswith(f"/memfd:{_NAME} ")


@cache
def _warn_once(reason: str) -> None:
    logger.warning("the ranks have no memory in common, and send messages, which is slower (%s)", reason)
