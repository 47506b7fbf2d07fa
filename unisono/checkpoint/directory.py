"""Directories of checkpoints: how a new one is added, which ones are removed, and which one is loaded.

A checkpoint's files are written into a new folder of a unique name, and its manifest last, by one atomic operation:
without it there is no checkpoint. In a place that is overwritten, the new manifest names the new files, and then the
old ones are removed. Then `latest`, a file that contains a name, is updated, and finally old checkpoints are removed.
So a kill at any moment leaves what was there before, or the new one. It is the same on disks and in object stores,
which have neither renames nor links.

    runs/checkpoints/
        latest                            "checkpoint_200"
        checkpoint_100/manifest.json      names the files, with their checksums
        checkpoint_100/save-3f2a91c05b7e/ state.pt, for large sharded states shards/, and at last complete
        checkpoint_200/

*Threads:* one at a time for each directory; one process of a run writes.

Invariants:

1. A folder with a manifest is a complete checkpoint, unless the disk has damaged it.
2. `latest` names a complete one. Nothing is removed before it does.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from unisono.checkpoint.files import Checksum
from unisono.checkpoint.folders import MANIFEST, Folder
from unisono.checkpoint.manifest import FORMAT, Manifest, read_manifest
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest"
COMPLETE = "complete"  # beside the files of a save, once its manifest is there: so a manifest that was lost is noticed
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_OF_A_SAVE = re.compile(rf"save-[0-9a-f]{{12}}|\.{MANIFEST}\.new")

Write = Callable[[Path], dict[str, Checksum]]
"""Writes a checkpoint's files into a new directory; returns their checksums, by name."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is saved.

    Attributes:
        folder: its own.
        keep: the number of numbered checkpoints to keep, including this one; None keeps all.
        is_numbered: whether it is one of several in its directory, which has a `latest`.
    """

    folder: Folder
    keep: int | None = None
    is_numbered: bool = False

    @classmethod
    def numbered(cls, root: Folder, number: int, keep: int | None) -> Place:
        """The place of the checkpoint of that number."""
        return cls(root / f"checkpoint_{number}", keep, True)


def check_place(place: Place) -> None:
    """Check that the folder, whose contents would be replaced, holds nothing but a checkpoint; FileExistsError if it is
    not a checkpoint."""
    folder = place.folder
    if not _is_ours(folder):
        what = "holds numbered checkpoints" if list(numbered_in(folder)) else "is no checkpoint"
        raise FileExistsError(
            f"{folder} {what}, and a checkpoint would replace it; pass an unused path, or that of a checkpoint, such "
            f"as {folder / 'best'}"
        )


def _is_ours(folder: Folder) -> bool:
    """Whether a folder is a checkpoint, an interrupted save, or empty: nothing else is replaced or removed."""
    if all(map(_OF_A_SAVE.fullmatch, folder.entries())):
        return True
    with suppress(FileNotFoundError):
        return FORMAT.encode() in folder.read(MANIFEST)
    return False


def new_mark() -> str:
    """Make the unique name under which a save puts its files."""
    return f"save-{uuid4().hex[:12]}"


def commit(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """Write the checkpoint, completely or not at all; an OSError leaves what was there before intact. The manifest is
    complete except for its files; `mark` is from `new_mark`."""
    folder = place.folder
    try:
        with folder.new_files(mark) as directory:
            files = {f"{mark}/{name}": list(checksum) for name, checksum in write(directory).items()}
        created = _created_after_latest(manifest.created, folder.parent) if place.is_numbered else manifest.created
        if mark not in folder.entries():
            raise FileNotFoundError(
                f"another save to {folder} has removed this one's files; give each run its own place"
            )
        replaced = _files_of(folder)
        folder.write(MANIFEST, replace(manifest, files=files, created=created).to_bytes())
    except BaseException:
        with suppress(OSError):
            _give_back(folder, mark)
        raise
    with suppress(OSError):  # the checkpoint is there
        folder.write(f"{mark}/{COMPLETE}", b"")
    if place.is_numbered:
        folder.parent.write(LATEST, folder.name.encode())
    try:
        _remove_old_files(folder, mark, replaced)
        for each in outdated(place):
            each.parent.remove(each.name)
    except OSError as error:
        logger.warning("what is no longer needed at %s cannot be removed: %s", folder.parent, error)


def _give_back(folder: Folder, mark: str) -> None:
    """Remove the files of a failed save, unless its manifest has been written; and the folder, if it was new."""
    with suppress(CheckpointError):
        if any(name.startswith(mark) for name in read_manifest(folder).files):
            return
    folder.remove(mark)
    if not folder.entries():
        folder.parent.remove(folder.name)


def _files_of(folder: Folder) -> set[str]:
    """What the manifest there names: files, and the directories of some."""
    with suppress(CheckpointError):
        return {name.partition("/")[0] for name in read_manifest(folder).files}
    return set()


def _remove_old_files(folder: Folder, mark: str, replaced: set[str]) -> None:
    """Remove the files of the checkpoint that was replaced, and of interrupted saves."""
    for name in folder.entries():
        if name != mark and (_OF_A_SAVE.fullmatch(name) or name in replaced):
            folder.remove(name)


def _created_after_latest(created: float, root: Folder) -> float:
    """The time of a new checkpoint: later than the latest's even if clocks are set back, since it defines the order of
    saves."""
    with suppress(OSError, UnicodeDecodeError, CheckpointError):
        return max(created, math.nextafter(read_manifest(_latest_in(root)).created, math.inf))
    return created


def _latest_in(root: Folder) -> Folder:
    """The checkpoint that `latest` names."""
    return root / root.read(LATEST).decode().strip()


def outdated(place: Place) -> list[Folder]:
    """The checkpoints that are not to be kept once this one has been saved."""
    if not place.is_numbered or place.keep is None:
        return []
    older = [each for each in newest_first(place.folder.parent) if _is_ours(each)][place.keep :]
    # Never the new one, even if checkpoints of a newer version, which sort first, leave no room for it.
    return [each for each in older if each != place.folder]


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
        except DamagedCheckpointError:
            return 0.0, number
        except CheckpointError:  # of a newer version: not a reason to remove it
            return math.inf, number

    return [folder for _, folder in sorted(numbered_in(root), key=age, reverse=True)]


def find(folder: Folder, check: Callable[[Folder], Any]) -> tuple[Folder, Any]:
    """Find the checkpoint at a place; among numbered ones, the one that `latest` names, or else the newest. Returns it
    with what `check` has read of it: all (`verify`), or only its manifest (`read_manifest`).

    Damaged ones are skipped with a warning each, if there is another one.

    Raises:
        NoCheckpointError: there is no checkpoint.
        DamagedCheckpointError: all are damaged.
        CheckpointVersionError: it was written by a newer unisono.
    """
    damaged: list[str] = []
    for candidate in _candidates(folder):
        try:
            checked = check(candidate)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        for text in damaged:
            logger.warning("skipped a damaged checkpoint: %s", text)
        if damaged:
            logger.warning("took %s instead", candidate)
        return candidate, checked
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {folder} is intact: {'; '.join(damaged)}")
    unfinished = [each for each in (folder, *(each for _, each in numbered_in(folder))) if holds_files(each)]
    if lost := [str(each) for each in unfinished if _was_complete(each)]:
        raise DamagedCheckpointError(f"{', '.join(lost)} has lost its {MANIFEST}, without which nothing verifies it")
    for each in unfinished:
        logger.warning("%s has no %s: its save was interrupted", each, MANIFEST)
    left = f"; {', '.join(map(str, unfinished))} has no {MANIFEST}" if unfinished else ""
    raise NoCheckpointError(f"there is no checkpoint at {folder}{left}")


def _candidates(folder: Folder) -> list[Folder]:
    """The checkpoints that may be loaded, in order of preference."""
    if MANIFEST in folder.entries():
        return [folder]
    named = None
    with suppress(FileNotFoundError, UnicodeDecodeError):
        named = _latest_in(folder)
    numbered = [each for each in newest_first(folder) if each == named or MANIFEST in each.entries()]
    return sorted(numbered, key=lambda each: each != named)  # the sort is stable: the others stay newest first


def is_unfinished(folder: Folder) -> bool:
    """Whether there are files of a save that was interrupted, and no checkpoint."""
    return MANIFEST not in folder.entries() and holds_files(folder) and not _was_complete(folder)


def holds_files(folder: Folder) -> bool:
    """Whether there are files of a save, whether it was interrupted or not."""
    return any(map(_OF_A_SAVE.fullmatch, folder.entries()))


def _was_complete(folder: Folder) -> bool:
    names = [name for name, is_folder in folder.entries().items() if is_folder and _OF_A_SAVE.fullmatch(name)]
    return any(COMPLETE in (folder / name).entries() for name in names)
