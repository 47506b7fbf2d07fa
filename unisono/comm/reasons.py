"""Why a world of processes breaks: each rank leaves its failure, or its departure, in a store for its peers; and who
caused the error of a failed call of torch.distributed.

*Threads:* any.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.outcome import Outcome, text_of
from unisono.comm.sealing import UnsignedError

_FAILURE, _DEPARTED = "unisono/failure", "unisono/departed/{}"
_NOTHING = "nothing"  # what no rank writes
_OF_OWN_DEVICE = ("CUDA error: ", "Cuda failure ")  # in torch's messages, and in NCCL's


class Reasons:
    """What the ranks of a world leave for one another in a store, which may be gone with its host. Without one, as
    where the group was created elsewhere, nothing is left, or found."""

    def __init__(self, store: dist.distributed_c10d.Store | None, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def failure(self) -> tuple[str, BaseException] | None:
        """The first failure of a rank, in words, and its error; None if none is there."""
        with contextlib.suppress(Exception):  # the store's server may be gone with the peer; without a secret, any junk
            if data := self._read(_FAILURE):
                peer = Outcome.from_bytes(data)
                if peer.error is not None:
                    return f"{peer.where} failed with {type(peer.error).__name__}: {text_of(peer.error)}", peer.error
        return None

    def leave_failure(self, cause: BaseException) -> None:
        """Leave this rank's failure, unless it is the consequence of an earlier one."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            reason: Any = Outcome.failure(cause, f"rank {self._rank}").to_bytes()  # annotated as str, takes bytes
            with contextlib.suppress(UnsignedError):
                self._store.compare_set(_FAILURE, "", reason)
            if self.failure() is None:  # something else has written there
                self._store.set(_FAILURE, reason)

    def leave_departure(self) -> None:
        """Leave that this rank has left: peers that wait in vain report this instead of a time-out."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set(_DEPARTED.format(self._rank), "1")

    def departed(self) -> list[int]:
        """The ranks that have left."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self._size) if self._read(_DEPARTED.format(rank))]
        return []

    def _read(self, key: str) -> bytes:
        """What a rank has left; b"" if none has."""
        with contextlib.suppress(UnsignedError):
            if self._store is not None and self._store.check([key]):
                # Not by `get`, which would wait if the key was deleted: this call sets nothing.
                return self._store.compare_set(key, _NOTHING, _NOTHING).removeprefix(_NOTHING.encode())
        return b""


def is_of_transport(error: BaseException) -> bool:
    """Whether torch's process groups raised it: for the user's own torch.distributed calls, or for DDP's."""
    if isinstance(error, dist.DistError):
        return not is_of_own_device(error)
    # A future keeps only the message of the error.
    return isinstance(error, RuntimeError) and any(name in text_of(error) for name in ("/gloo/", "DistNetworkError: "))


def is_of_own_device(error: BaseException) -> bool:
    """Whether this rank's device has failed, for example by a kernel's assertion, which the next call reports."""
    kinds = torch.OutOfMemoryError, torch.AcceleratorError
    return isinstance(error, kinds) or any(words in text_of(error) for words in _OF_OWN_DEVICE)
