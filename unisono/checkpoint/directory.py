"""Directories of checkpoints: how a new one is added, which ones are removed, and which one is loaded.

A checkpoint is written under a temporary name, `.saving-...`, and renamed when it is complete; then `latest`, a file
that contains a name, is updated, and finally old ones are removed. So a kill at any moment leaves what was there
before, or the new one.

    runs/checkpoints/
        latest                  "checkpoint_200"
        checkpoint_100/         manifest.json, state.pt, and for large sharded states shards/
        checkpoint_200/

For a place that is overwritten repeatedly, such as the best model's, the old checkpoint is renamed before the new one
takes its name: a kill between the two leaves both, loading finds them, and they stay until a checkpoint has that name
again.

*Threads:* one at a time for each directory; one process of a run writes.

Invariants:

1. A name without a leading dot is a complete checkpoint, unless the disk has damaged it.
2. `latest` names a complete one. Nothing is removed before it does.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from unisono.checkpoint.files import (
    Checksum,
    make_directories,
    remove_directory,
    replace_file,
    sync_directory,
    write_file,
)
from unisono.checkpoint.manifest import FORMAT, NAME, Manifest, read_manifest
from unisono.checkpoint.remote import Location, RemotePath
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

LATEST, STATE, SHARDS = "latest", "state.pt", "shards"
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_INTERRUPTED = re.compile(
    r"\.(?P<what>saving|replaced|removing|latest)-(?:(?P<of>.*)-)?@(?P<host>[^@]*)@(?P<pid>\d+)@\w+"
)
UPLOAD = re.compile(r"[0-9a-f]{12}")  # the name under which a save puts its files in a store
_FOREIGN_S = 86400.0  # the age from which leftovers of another machine are removed
under_way: set[str] = set()  # marks of this process's saves, whose files no other save clears away

Write = Callable[[Path], dict[str, Checksum]]
"""Writes a checkpoint's files into a new directory; returns their checksums, by name."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is saved.

    Attributes:
        path: its path; in a store, a `RemotePath`.
        keep: the number of numbered checkpoints to keep, including this one; None keeps all.
        is_numbered: whether it is one of several in its directory, which has a `latest`.
    """

    path: Any
    keep: int | None = None
    is_numbered: bool = False

    @classmethod
    def numbered(cls, root: Any, number: int, keep: int | None) -> Place:
        """The place of the checkpoint of that number."""
        return cls(root / f"checkpoint_{number}", keep, True)


def check_place(place: Place) -> None:
    """Check that the directory, which would be replaced, holds nothing but a checkpoint.

    Raises:
        FileExistsError: it is not a checkpoint.
    """
    path: Location = place.path
    if path.exists() and not _is_ours(path):
        what = "holds numbered checkpoints" if list(numbered_in(path)) else "is no checkpoint"
        raise FileExistsError(
            f"{path} {what}, and a checkpoint would replace it; pass an unused path, or that of a checkpoint, such as "
            f"{path / 'best'}"
        )


def _is_ours(path: Location) -> bool:
    """Whether a directory is a checkpoint, perhaps a damaged one, or empty: nothing else is replaced or removed."""
    with suppress(OSError):
        names = {each.name for each in path.iterdir()}
        if isinstance(path, RemotePath):
            names = {name for name in names if not UPLOAD.fullmatch(name)}
        if not names or (STATE in names and names <= {NAME, STATE, SHARDS}):
            return True
        return FORMAT.encode() in (path / NAME).read_bytes()
    return False


def new_mark() -> str:
    """Make a save's mark, part of its temporary names until it is done: the process that makes it, and a unique id."""
    return f"@{platform.node()}@{os.getpid()}@{uuid4().hex[:12]}"


def saving_path(place: Place, mark: str) -> Path:
    """The path to which the files of a save are written."""
    path: Path = place.path
    return path.with_name(f".saving-{path.name}-{mark}")


def commit(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """Write the checkpoint, completely or not at all.

    Args:
        manifest: complete except for its files.
        mark: from `new_mark`.

    Raises:
        OSError: a file cannot be written; what was there before is intact.
    """
    # Leftovers are recognised by a pid that has ended or is this process's, so saves in progress are listed.
    under_way.add(mark)
    try:
        _make(place, write, manifest, mark)
    finally:
        under_way.discard(mark)
    # Only now, so that `_clear` removes what this save has renamed aside.
    _clear(place, mark)


def _make(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    path, root, new = place.path, place.path.parent, saving_path(place, mark)
    make_directories(root)
    os.mkdir(new)
    try:
        files = {name: list(checksum) for name, checksum in write(new).items()}
        created = created_after_latest(manifest.created, root) if place.is_numbered else manifest.created
        # The manifest is written last: a directory that has one is complete.
        write_file(new / NAME, replace(manifest, files=files, created=created).to_bytes())
        sync_directory(new)
        _take_name(path, new, root / f".replaced-{path.name}-{mark}")
    except BaseException:
        with suppress(OSError):
            remove_directory(new, mark)
        raise
    # The new name must be on disk before `latest` refers to it.
    sync_directory(root)
    if place.is_numbered:
        replace_file(root / LATEST, path.name.encode(), mark)


def _take_name(path: Path, new: Path, aside: Path) -> None:
    """Give the new checkpoint its name, and rename the existing one; on failure, restore the existing one."""
    is_replaced = path.exists()
    if is_replaced:
        # A rename does not replace a directory that is not empty.
        os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        if is_replaced:
            with suppress(OSError):
                os.rename(aside, path)
        raise


def created_after_latest(created: float, root: Location) -> float:
    """The time of a new checkpoint: later than the latest's even if clocks are set back, since it defines the order of
    saves."""
    with suppress(OSError, UnicodeDecodeError, CheckpointError):
        latest = read_manifest(_latest_in(root)).created
        return max(created, math.nextafter(latest, math.inf))
    return created


def _latest_in(root: Location) -> Location:
    """The checkpoint that `latest` names."""
    return root / (root / LATEST).read_bytes().decode().strip()


def outdated(place: Place) -> list[Any]:
    """The checkpoints that are not to be kept once this one has been saved."""
    if not place.is_numbered or place.keep is None:
        return []
    older = [path for path in newest_first(place.path.parent) if _is_ours(path)][place.keep :]
    # Never the new one, even if checkpoints of a newer version, which sort first, leave no room for it.
    return [path for path in older if path != place.path]


def _clear(place: Place, mark: str) -> None:
    """Remove what is not to be kept, and what crashes have left; a failure is logged, and does no harm."""
    root, gone = place.path.parent, outdated(place)
    with suppress(OSError):  # another process may remove them, too
        gone += [path for path in root.glob(".*") if _is_left(path, place)]
    for path in gone:
        try:
            if path.is_dir():
                remove_directory(path, mark)
            else:
                path.unlink()
        except OSError as error:
            logger.warning("%s is no longer needed, and cannot be removed: %s", path, error)


def _is_left(path: Path, place: Place) -> bool:
    """Whether the path was left by a save that has ended, or was killed, and is no longer needed."""
    found = _INTERRUPTED.fullmatch(path.name)
    if found is None or any(path.name.endswith(mark) for mark in under_way):
        return False
    if _is_only_copy(path, found) and not (place.is_numbered and _NUMBERED.fullmatch(found["of"])):
        return False  # for example of the best model, when another checkpoint next to it was saved
    if found["host"] != platform.node():
        # Processes of another machine cannot be looked up, so age decides.
        return time.time() - path.stat().st_mtime > _FOREIGN_S
    # Its own pid: the save has ended, or an earlier process had the same pid.
    return int(found["pid"]) == os.getpid() or not _is_alive(int(found["pid"]))


def _is_only_copy(path: Path, found: re.Match[str]) -> bool:
    """Whether it is complete, and the name that it had, or was to get, is not in use."""
    is_there = found["of"] is not None and (path.parent / found["of"] / NAME).exists()
    return found["what"] in ("saving", "replaced") and not is_there and (path / NAME).exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It exists, and belongs to another user.
        pass
    return True


def numbered_in(root: Location) -> Iterator[tuple[int, Any]]:
    """Yield the numbered checkpoints of a directory, both complete and damaged ones."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in root.iterdir():
            if (found := _NUMBERED.fullmatch(path.name)) and path.is_dir():
                yield int(found[1]), path


def newest_first(root: Location) -> list[Any]:
    """The numbered checkpoints, the most recently saved first; damaged ones come last. Numbers do not give the order: a
    run may have returned to an earlier checkpoint."""

    def age(pair: tuple[int, Location]) -> tuple[float, int]:
        number, path = pair
        try:
            return read_manifest(path).created, number
        except DamagedCheckpointError:
            return 0.0, number
        except CheckpointError:  # of a newer version: not a reason to remove it
            return math.inf, number

    return [path for _, path in sorted(numbered_in(root), key=age, reverse=True)]


def find(path: Location, check: Callable[[Any], Manifest]) -> tuple[Any, Manifest]:
    """Find the checkpoint at a path; in a directory of numbered ones, the one that `latest` names, or else the newest.

    Damaged ones are skipped with a warning each, if there is another one.

    Args:
        check: reads all of it, as `verify` does, or only its manifest, as `read_manifest`.

    Raises:
        NoCheckpointError: there is no checkpoint.
        DamagedCheckpointError: all are damaged.
        CheckpointVersionError: it was written by a newer unisono.
    """
    damaged: list[str] = []
    for candidate in _candidates(path):
        try:
            manifest = check(candidate)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        for each in damaged:
            logger.warning("skipped a damaged checkpoint: %s", each)
        if damaged or candidate.name.startswith("."):
            logger.warning("took %s, of step %d", candidate, manifest.step)
        return candidate, manifest
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {path} is intact: {'; '.join(damaged)}")
    left = [each.name for each in _interrupted_saves(path)] if isinstance(path, Path) else []
    leftover = f"; saves that were interrupted have left {', '.join(left)}" if left else ""
    raise NoCheckpointError(f"there is no checkpoint at {path}{leftover}")


def _candidates(path: Location) -> list[Any]:
    """The checkpoints that may be loaded, in order of preference."""
    whole = _whole(_interrupted_saves(path)) if isinstance(path, Path) else []
    if (path / NAME).exists():
        return [path, *whole]
    numbered = newest_first(path)
    with suppress(OSError, UnicodeDecodeError):
        named = _latest_in(path)
        # The sort is stable, so the others stay newest first.
        numbered.sort(key=lambda each: each != named)
    if isinstance(path, RemotePath):
        return [each for each in numbered if (each / NAME).exists()]  # without it, an upload was interrupted
    if not numbered and path.is_dir() and any(path.iterdir()) and not _holds_interrupted_only(path):
        numbered = [path]
    return [*numbered, *whole]


def _holds_interrupted_only(path: Path) -> bool:
    return all(_INTERRUPTED.fullmatch(each.name) for each in path.iterdir())


def _interrupted_saves(path: Path) -> list[Path]:
    """What interrupted saves of this checkpoint, or into this directory, have left, next to it or in it."""
    kinds = ("saving", "replaced")  # of the same save, the new one first
    beside = [each for kind in kinds for each in path.parent.glob(f".{kind}-{escape(path.name)}-@*")]
    inside = [each for kind in kinds for each in path.glob(f".{kind}-checkpoint_*-@*")]
    return beside + inside


def _whole(paths: list[Path]) -> list[Path]:
    """Those with a manifest, newest first: a save killed before it was written is not a checkpoint yet."""
    found = []
    for path in paths:
        with suppress(CheckpointError):
            found.append((read_manifest(path).created, path))
    return [path for _, path in sorted(found, reverse=True)]
