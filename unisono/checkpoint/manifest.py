"""The manifest: what a checkpoint consists of, and the means to verify that it is complete.

It is a JSON file, written last: names, sizes and checksums of the other files, and facts for people and tools. It has a
checksum of its own, so that a flipped bit in it is detected, too.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from unisono.checkpoint.folders import MANIFEST, Checksum, Folder, checksum_of
from unisono.errors import CheckpointVersionError, DamagedCheckpointError

FORMAT = "unisono checkpoint"
VERSION = 2
STATE = "state.pt"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: the training step, as counted by the caller that saved it.
        score: the score it was saved with; None without one.
        world_size: the number of ranks that saved it.
        created: seconds since 1970.
        objects: the kind and the class of each object in it, by name.
        versions: of unisono and torch.
        files: size and CRC-32 of each file, by its path in the checkpoint.
    """

    step: int
    score: float | None
    world_size: int
    created: float
    objects: Mapping[str, list[str]]
    versions: Mapping[str, str]
    files: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The directory of the files, in the checkpoint."""
        return str(next((PurePosixPath(name).parent for name in self.files if PurePosixPath(name).name == STATE), ""))

    def to_bytes(self) -> bytes:
        """The contents of its file."""
        known = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**known, "crc": _crc(known)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest's file. DamagedCheckpointError if it is not what was written, CheckpointVersionError if a
        newer unisono has written it."""
        try:
            known = json.loads(data)
            is_ours = isinstance(known, dict) and known.get("format") == FORMAT
        except ValueError:
            is_ours = False
        if not is_ours or known.pop("crc", None) != _crc(known):
            raise DamagedCheckpointError(f"{path}: its {MANIFEST} is not what was written ({len(data)} bytes)")
        if known["version"] > VERSION:
            raise CheckpointVersionError(
                f"{path} has version {known['version']} of the format, and this version of unisono reads up to "
                f"version {VERSION}: load it with unisono {known.get('versions', {}).get('unisono')}, which wrote it"
            )
        for name in known["files"]:  # a forged manifest could otherwise name files outside the checkpoint
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DamagedCheckpointError(f"{path}: its {MANIFEST} names {name!r}, which is not in the checkpoint")
        return cls(**{each.name: known[each.name] for each in fields(cls)})


def shard_name(rank: int) -> str:
    """The file of what that rank writes of large sharded states."""
    return f"shards/{rank}.pt"


def new_manifest(step: int, score: float | None, world_size: int, objects: dict[str, list[str]]) -> Manifest:
    """Make a manifest, complete except for its files."""
    versions = {"torch": str(torch.__version__), "unisono": version("unisono")}
    return Manifest(step, score, world_size, time.time(), objects, versions)


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of a checkpoint, without checking its other files. Raises as `Manifest.from_bytes`; and OSError
    if it cannot be read: a store that does not answer has not damaged its checkpoints."""
    try:
        data = folder.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder} has no {MANIFEST}") from error
    return Manifest.from_bytes(data, str(folder))


def verify(folder: Folder, into: Path) -> tuple[Path, Manifest]:
    """Read the whole checkpoint, if it is in a store into that directory, and compare it with its manifest. Returns the
    directory that has its files, and the manifest. DamagedCheckpointError names the file that is not what was written.
    """
    manifest = read_manifest(folder)
    local = folder.fetch(manifest.files, into)
    for name, (size, crc) in manifest.files.items():
        try:
            found = checksum_of(local / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error
        if found != Checksum(size, crc):
            raise DamagedCheckpointError(
                f"{folder}: {name} has other contents than those written: {found.size} bytes of {size}, or another "
                "CRC-32"
            )
    return local / manifest.directory, manifest


def _crc(known: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(known, sort_keys=True).encode())
