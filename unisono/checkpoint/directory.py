"""Directories of checkpoints: how a new one is added, which ones are removed, and which one is loaded.

A checkpoint's files are written into a new folder of a unique name, and its manifest last, by one atomic operation:
without it there is no checkpoint. In a place that is overwritten, the new manifest names the new files, and then the
old ones are removed. Then `latest`, a file that contains a name, is updated, and finally old checkpoints are removed.
So a kill at any moment leaves what was there before, or the new one. The same holds on disks and in object stores,
which have neither renames nor links.

    runs/checkpoints/
        latest                            "checkpoint_200"
        checkpoint_100/manifest.json      names the files, with their checksums; has one of its own
        checkpoint_100/save-3f2a91c05b7e/ state.pt, and for large sharded states shards/
        checkpoint_200/

*Threads:* one at a time for each directory; one process of a run writes.

Invariants:

1. A folder with a manifest is a complete checkpoint, unless the disk has damaged it.
2. `latest` names a complete one. Nothing is removed before it does.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.folders import MANIFEST, Checksum, Folder, checksum_of
from unisono.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

FORMAT = "unisono checkpoint"
VERSION = 2
STATE = "state.pt"
SHARD = "shards/{}.pt"  # what a rank writes of large sharded states
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # those of an Accelerator, in its `project_dir`
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_OF_A_SAVE = re.compile(rf"save-[0-9a-f]{{12}}|\.{MANIFEST}\.new")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: its training step, as the caller counts it, the score and the number of ranks that
    it was saved with; the kind and class of each object; seconds since 1970; versions; of each file, by its path in the
    checkpoint, size and CRC-32."""

    step: int
    score: float | None
    world_size: int
    objects: Mapping[str, list[str]]
    created: float = field(default_factory=time.time)
    versions: Mapping[str, str] = field(
        default_factory=lambda: {"torch": str(torch.__version__), "unisono": version("unisono")}
    )
    files: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The directory of the files, in the checkpoint."""
        return next(iter(self.files), "").partition("/")[0]

    def to_bytes(self) -> bytes:
        """The contents of its file."""
        known = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**known, "crc": self._crc(known)}, indent=1).encode()

    @staticmethod
    def _crc(known: Mapping[str, Any]) -> int:
        return zlib.crc32(json.dumps(known, sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest's file. DamagedCheckpointError if it is not what was written, CheckpointVersionError if a
        newer unisono has written it."""
        try:
            known = json.loads(data)
            is_ours = isinstance(known, dict) and known.get("format") == FORMAT
        except (ValueError, RecursionError):
            is_ours = False
        if not is_ours or known.pop("crc", None) != cls._crc(known):
            raise DamagedCheckpointError(f"{path}: its {MANIFEST} is not what was written ({len(data)} bytes)")
        try:
            if known["version"] > VERSION:
                raise CheckpointVersionError(
                    f"{path} has version {known['version']} of the format, and this unisono reads up to version "
                    f"{VERSION}: load it with unisono {known['versions'].get('unisono')}, which wrote it"
                )
            return cls._checked({each.name: known[each.name] for each in fields(cls)}, path)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # forged
            raise DamagedCheckpointError(
                f"{path}: its {MANIFEST} is not what was written ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _checked(cls, known: dict[str, Any], path: str) -> Manifest:
        """The manifest; an error if a value has another form, DamagedCheckpointError if a file is elsewhere."""
        for name, (size, crc) in known["files"].items():
            if name.startswith("/") or ".." in name.split("/"):
                raise DamagedCheckpointError(f"{path}: its {MANIFEST} names {name!r}, which is not in the checkpoint")
            int(size), int(crc)
        for name, (kind, of) in known["objects"].items():
            if not f"{name}{kind}{of}".isprintable():
                raise ValueError(f"the object {name!r}, a {kind!r} of {of!r}")
        int(known["step"]), int(known["world_size"]), float(known["score"] or 0)
        time.localtime(known["created"])
        return cls(**known)


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of a checkpoint, without its other files. Raises as `Manifest.from_bytes`; OSError if it cannot
    be read: a store that does not answer has not damaged its checkpoints."""
    try:
        data = folder.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder} has no {MANIFEST}") from error
    return Manifest.from_bytes(data, str(folder))


def verify(folder: Folder, copies: ExitStack) -> tuple[Path, Manifest]:
    """Read the whole checkpoint, and compare it with its manifest. Returns where its files are, which `copies` removes
    if they came from a store, and the manifest. DamagedCheckpointError names the file that is not what was written."""
    manifest = read_manifest(folder)
    local = folder.fetch(manifest.files, copies)
    for name, (size, crc) in manifest.files.items():
        try:
            found = checksum_of(local / name, size)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error
        if found != (size, crc):
            what = f"{found[0]} bytes of {size}" if found[0] != size else "another CRC-32"
            raise DamagedCheckpointError(f"{folder}: {name} has other contents than those written: {what}")
    return local / manifest.directory, manifest


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is saved: its folder; and if that is one of several in a `root` with a `latest`, how many are
    kept, including this one; None keeps all."""

    folder: Folder
    root: Folder | None = None
    keep: int | None = None

    @classmethod
    def numbered(cls, root: Folder, number: int, keep: int | None) -> Place:
        """The place of the checkpoint of that number."""
        return cls(root / f"checkpoint_{number}", root, keep)


def next_place(root: Folder, keep: int | None, left: int = 0) -> Place:
    """The place of the next numbered checkpoint, or of a later one, if some are left to others that save now."""
    return Place.numbered(root, max((number for number, _ in numbered_in(root)), default=-1) + 1 + left, keep)


def choose_place(place: Place | Callable[[], Place], score: float | None) -> Place | None:
    """Where the checkpoint goes; None if the existing one has at least that score, or `score` is NaN. FileExistsError
    if the folder, whose contents would be replaced, holds anything but a checkpoint."""
    chosen = place() if callable(place) else place
    folder = chosen.folder
    if not _is_ours(folder):
        raise FileExistsError(
            f"{folder} is no checkpoint, and one would replace it; pass an unused path, such as {folder / 'best'}"
        )
    known = None
    with suppress(CheckpointError):
        known = None if score is None else read_manifest(folder).score
    is_worse = score is not None and (math.isnan(score) or (known is not None and score <= known))
    return None if is_worse else chosen


def _is_ours(folder: Folder) -> bool:
    """Whether a folder is a checkpoint, an interrupted save, or empty: nothing else is replaced or removed."""
    if all(map(_OF_A_SAVE.fullmatch, folder.entries())):
        return True
    with suppress(FileNotFoundError):
        return FORMAT.encode() in folder.read(MANIFEST)
    return False


def commit(place: Place, write: Callable[[], dict[str, Checksum]], manifest: Manifest, mark: str) -> None:
    """Write the checkpoint, completely or not at all; an OSError leaves what was there before intact. `write` writes
    its files into the draft `mark`; the manifest is complete except for them."""
    folder = place.folder
    try:
        files = {f"{mark}/{name}": list(checksum) for name, checksum in write().items()}
        folder.publish(mark)
        if mark not in folder.entries():
            raise FileNotFoundError(
                f"another save to {folder} has removed this one's files; give each run its own place"
            )
        replaced = _files_of(folder)
        folder.write(MANIFEST, replace(manifest, files=files).to_bytes())
    except BaseException:
        with suppress(OSError):
            if mark not in _files_of(folder):
                folder.discard(mark)
        raise
    if place.root is not None:
        place.root.write(LATEST, folder.name.encode())
    try:
        for name in folder.entries():
            if name != mark and (_OF_A_SAVE.fullmatch(name) or name in replaced):
                folder.remove(name)
        if place.root is not None and place.keep is not None:
            older = [each for each in newest_first(place.root) if _is_ours(each)][place.keep :]
            # Never the new one, even if the clock was set back, or newer versions, which sort first, leave no room.
            for each in [each for each in older if each != folder]:
                place.root.remove(each.name)
    except OSError as error:
        logger.warning("what is no longer needed at %s cannot be removed: %s", folder, error)


def _files_of(folder: Folder) -> set[str]:
    """What the manifest there names: files, and the directories of some."""
    with suppress(CheckpointError):
        return {name.partition("/")[0] for name in read_manifest(folder).files}
    return set()


def numbered_in(root: Folder) -> Iterator[tuple[int, Folder]]:
    """Yield the numbered checkpoints of a folder, complete, damaged and unfinished ones."""
    for name, is_folder in root.entries().items():
        if is_folder and (found := _NUMBERED.fullmatch(name)):
            yield int(found[1]), root / name


def newest_first(root: Folder) -> list[Folder]:
    """The numbered checkpoints, the most recently saved first; damaged and unfinished ones come last. Numbers do not
    give the order: a run may have returned to an earlier checkpoint."""

    def age(pair: tuple[int, Folder]) -> tuple[float, int]:
        number, folder = pair
        try:
            return read_manifest(folder).created, number
        except CheckpointError as error:  # one of a newer version must not be removed for that
            return 0.0 if isinstance(error, DamagedCheckpointError) else math.inf, number

    return [folder for _, folder in sorted(numbered_in(root), key=age, reverse=True)]


def home_of(folder: Folder) -> Folder:
    """Where the checkpoints of a folder are: in it, or, if it is a `project_dir`, in its `checkpoints`."""
    entries = folder.entries()
    has_own = any(name == MANIFEST or _OF_A_SAVE.fullmatch(name) or _NUMBERED.fullmatch(name) for name in entries)
    return folder / CHECKPOINTS if entries.get(CHECKPOINTS) and not has_own else folder


def find(folder: Folder, check: Callable[[Folder], Any]) -> tuple[Folder, Any]:
    """Find the checkpoint at a place, or in a `project_dir`; among numbered ones, the one that `latest` names, or else
    the newest. Returns it with what `check` has read of it. Each damaged one is skipped with a warning, if there is
    another.

    Raises:
        NoCheckpointError, DamagedCheckpointError: there is no checkpoint; or all are damaged.
        CheckpointVersionError: it was written by a newer unisono.
    """
    damaged: list[str] = []
    folder = home_of(folder)
    for candidate in _candidates(folder):
        try:
            checked = check(candidate)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        for text in damaged:
            logger.warning("skipped a damaged checkpoint: %s; took %s instead", text, candidate)
        return candidate, checked
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {folder} is intact: {'; '.join(damaged)}")
    what = f"which has no {MANIFEST}" if folder.entries() else "which does not exist, or is empty"
    raise NoCheckpointError(f"there is no checkpoint at {folder}, {what}")


def _candidates(folder: Folder) -> list[Folder]:
    """The checkpoints that may be loaded, in order of preference."""
    if MANIFEST in folder.entries():
        return [folder]
    named = None
    with suppress(FileNotFoundError, UnicodeDecodeError):
        named = folder / folder.read(LATEST).decode().strip()
    numbered = [each for each in newest_first(folder) if each == named or MANIFEST in each.entries()]
    return sorted(numbered, key=lambda each: each != named)  # the sort is stable: the others stay newest first


def is_unfinished(folder: Folder) -> bool:
    """Whether there are files of a save that was interrupted, and no checkpoint."""
    entries = folder.entries()
    return MANIFEST not in entries and any(map(_OF_A_SAVE.fullmatch, entries))
