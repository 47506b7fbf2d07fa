"""Files of torch.distributed.checkpoint: all ranks write concurrently, each its own shards.

*Threads:* a `ShardGroup` is used by each rank's writing thread; these threads communicate in their own process group.
"""

from __future__ import annotations

import enum
import pickle
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import CheckpointError, DamagedCheckpointError
from unisono.outcome import chain_of

_SAFE: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties"),
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
}
"""The names allowed in the metadata, by module. Whole modules are not allowed, since they contain their imports."""


@cache
def _safe_private() -> dict[str, str]:
    """More of them, by module; looked up on first use, since it imports those modules."""
    from unisono.torch_private import GET_LAYOUT, MEMORY_FORMATS, STORAGE_INFO

    return {
        "torch.distributed.checkpoint.metadata": MEMORY_FORMATS,
        "torch.distributed.checkpoint.filesystem": STORAGE_INFO,
        "torch.serialization": GET_LAYOUT,
    }


class ShardGroup:
    """A separate process group for the ranks' writing threads. All ranks create it together."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def write(self, parts: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write this rank's shards by name, whole tensors from one rank only, into a directory that all ranks share;
        return when all ranks have, or raise on all of them. A collective of the writing threads."""
        # A rank that has failed before calls `abandon` instead, and `save` would wait for it.
        if not self._all_are_ready(True):
            raise CheckpointError(f"rank zero could not begin to write {directory}; its own error says why")
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        class Writer(FileSystemWriter):
            def write_data(self, *args: Any, **kwargs: Any) -> Any:
                try:
                    return super().write_data(*args, **kwargs)
                except RuntimeError as error:  # for an incomplete file, when the disk is full
                    raise next((each for each in chain_of(error) if isinstance(each, OSError)), error) from None

        try:
            save(dict(parts), storage_writer=Writer(directory, sync_files=True), process_group=self._group)
        except CheckpointException as failed:  # not an Exception, and its text contains all tracebacks
            rank, (error, _) = min(failed.failures.items())
            error.add_note(f"rank {rank} wrote its part of {directory}")
            raise error from None

    def abandon(self) -> None:
        """Release the other ranks from `write`, if this rank has failed before it."""
        self._all_are_ready(False)

    def _all_are_ready(self, is_ready: bool) -> bool:
        flag = torch.tensor(int(is_ready))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)


def read_shards(directory: Path) -> dict[str, torch.Tensor]:
    """Read the whole tensors into host memory. Called on one rank."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (directory / ".metadata").open("rb") as file:
                found = _Metadata(file).load()
            found.storage_meta = found.storage_meta or StorageMeta()
            return found

    reader = Reader(directory)
    found = reader.read_metadata().state_dict_metadata
    if not all(isinstance(each, TensorStorageMetadata) for each in found.values()):
        raise DamagedCheckpointError(f"{directory} holds objects other than tensors")
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading on one rank alone is intended
        load(state, storage_reader=reader, no_dist=True)
    return state


class _Metadata(pickle.Unpickler):
    """Reads torch's metadata, which is a pickle, without executing any name that is not allowed."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 has its classes, and no other
        if name in _SAFE.get(module, set()) or name == _safe_private().get(module):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle the member of an enum
            return _member
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format) or found is torch.Size:
            return found
        raise DamagedCheckpointError(f"the metadata of a checkpoint names {module}.{name}, which is not executed")


def _member(kind: Any, name: str) -> Any:
    if not isinstance(kind, enum.EnumType):
        raise DamagedCheckpointError(
            f"the metadata of a checkpoint asks for {name!r} of {kind!r}, which is not an enum"
        )
    return kind[name]
