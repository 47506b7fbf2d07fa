"""Directories of checkpoints: how one comes in, which ones go, and which one is taken.

A checkpoint is made under a name of its own, `.saving-...`, and renamed when it is whole; `latest`, a file with a
name, follows, and older ones go last. So a kill at any moment leaves what was there before, or the new one.

    runs/checkpoints/
        latest                  "checkpoint_200"
        checkpoint_100/         manifest.json, state.pt, and for large sharded states shards/
        checkpoint_200/

A place that is written again and again, the best model's, is put aside before the new one takes its name: whoever is
killed between the two leaves both, loading finds them, and they stay until one has that name again.

*Threads:* one at a time for each directory; one process of a run writes.

Invariants:
1. A name without a dot in front is a whole checkpoint, or the disk has damaged it.
2. `latest` names a whole one. Nothing is removed before it does.
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
from unisono.checkpoint.manifest import FORMAT, NAME, Manifest, read_manifest, verify
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

LATEST, STATE, SHARDS = "latest", "state.pt", "shards"
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_WRECK = re.compile(r"\.(?P<what>saving|replaced|removing|latest)-(?:(?P<of>.*)-)?@(?P<host>[^@]*)@(?P<pid>\d+)@\w+")
_FOREIGN_S = 86400.0  # so old is what another machine has left, before it is removed
_under_way: set[str] = set()  # marks of this process's saves

Write = Callable[[Path], dict[str, Checksum]]
"""Writes a checkpoint's files into a new directory; their checksums, by name."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes.

    Attributes:
        path: its own; in a store, a `RemotePath`.
        keep: how many numbered ones stay beside it, itself included; None keeps all.
        is_numbered: it is one of several in its directory, which has a `latest`.
    """

    path: Any
    keep: int | None = None
    is_numbered: bool = False

    @classmethod
    def numbered(cls, root: Any, number: int, keep: int | None) -> Place:
        """The checkpoint of that number."""
        return cls(root / f"checkpoint_{number}", keep, True)


def check_place(place: Place) -> None:
    """Refuse a directory that holds something else: it would be replaced.

    Raises:
        FileExistsError: it is no checkpoint.
    """
    path = place.path
    if path.exists() and not _is_ours(path):
        what = "holds numbered checkpoints" if list(numbered_in(path)) else "is no checkpoint"
        raise FileExistsError(
            f"{path} {what}, and a checkpoint would take its place; pass a path that is free, or that of a checkpoint, "
            f"such as {path / 'best'}"
        )


def _is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint, perhaps a damaged one, or empty: nothing else is replaced or removed."""
    with suppress(OSError):
        names = {each.name for each in path.iterdir()}
        if not names or (STATE in names and names <= {NAME, STATE, SHARDS}):
            return True
        return FORMAT.encode() in (path / NAME).read_bytes()
    return False


def new_mark() -> str:
    """What is in the names of a save until it is done: who made it, and a name of its own."""
    return f"@{platform.node()}@{os.getpid()}@{uuid4().hex[:12]}"


def saving_path(place: Place, mark: str) -> Path:
    """Where the files of a save are written."""
    path: Path = place.path
    return path.with_name(f".saving-{path.name}-{mark}")


def commit(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """Make the checkpoint, whole or not at all.

    Args:
        manifest: but for its files.
        mark: of `new_mark`.

    Raises:
        OSError: a file cannot be written; what was there before still is.
    """
    _under_way.add(mark)
    try:
        _make(place, write, manifest, mark)
    finally:
        _under_way.discard(mark)
    _clear(place, mark)


def _make(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    path, root, new = place.path, place.path.parent, saving_path(place, mark)
    make_directories(root)
    os.mkdir(new)
    try:
        files = {name: list(checksum) for name, checksum in write(new).items()}
        created = _created_after_latest(manifest.created, root) if place.is_numbered else manifest.created
        write_file(new / NAME, replace(manifest, files=files, created=created).to_bytes())
        sync_directory(new)
        _take_name(path, new, root / f".replaced-{path.name}-{mark}")
    except BaseException:
        with suppress(OSError):
            remove_directory(new, mark)
        raise
    sync_directory(root)
    if place.is_numbered:
        replace_file(root / LATEST, path.name.encode(), mark)


def _take_name(path: Path, new: Path, aside: Path) -> None:
    """Give the new checkpoint its name, and put aside what has it; or leave that where it is."""
    is_replaced = path.exists()
    if is_replaced:
        os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        if is_replaced:
            with suppress(OSError):
                os.rename(aside, path)
        raise


def _created_after_latest(created: float, root: Path) -> float:
    """The time of a new checkpoint: it gives the order of saves, though clocks are set back."""
    with suppress(OSError, UnicodeDecodeError, CheckpointError):
        latest = read_manifest(root / (root / LATEST).read_text().strip()).created
        return max(created, math.nextafter(latest, math.inf))
    return created


def _clear(place: Place, mark: str) -> None:
    """Remove what is not to be kept, and what crashes have left; a failure is logged, and harms nothing."""
    root = place.path.parent
    kept = place.keep if place.is_numbered else None
    older = [path for path in newest_first(root) if _is_ours(path)][kept:] if kept else []
    gone = [path for path in older if path != place.path]
    with suppress(OSError):  # another process may remove them, too
        gone += [path for path in root.glob(".*") if _is_left(path, place)]
    for path in gone:
        try:
            if path.is_dir():
                remove_directory(path, mark)
            else:
                path.unlink()
        except OSError as error:
            logger.warning("%s is needed no more, and cannot be removed: %s", path, error)


def _is_left(path: Path, place: Place) -> bool:
    """Whether a save that has ended, or was killed, has left it, and nobody needs it."""
    found = _WRECK.fullmatch(path.name)
    if found is None or any(path.name.endswith(mark) for mark in _under_way):
        return False
    if _is_only_copy(path, found) and not (place.is_numbered and _NUMBERED.fullmatch(found["of"])):
        return False  # of the best model, say, when another checkpoint beside it was saved
    if found["host"] != platform.node():
        return time.time() - path.stat().st_mtime > _FOREIGN_S
    return int(found["pid"]) == os.getpid() or not _is_alive(int(found["pid"]))


def _is_only_copy(path: Path, found: re.Match[str]) -> bool:
    """Whether it is whole, and nothing has the name that it had or was to get."""
    is_there = found["of"] is not None and (path.parent / found["of"] / NAME).exists()
    return found["what"] in ("saving", "replaced") and not is_there and (path / NAME).exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def numbered_in(root: Path) -> Iterator[tuple[int, Path]]:
    """The numbered checkpoints of a directory, whole ones and damaged ones."""
    with suppress(OSError):
        for path in root.iterdir():
            if (found := _NUMBERED.fullmatch(path.name)) and path.is_dir():
                yield int(found[1]), path


def newest_first(root: Path) -> list[Path]:
    """The numbered checkpoints in the order in which they were saved: after a return to an earlier one, numbers are no
    order. Damaged ones come last."""

    def age(pair: tuple[int, Path]) -> tuple[float, int]:
        number, path = pair
        try:
            return read_manifest(path).created, number
        except DamagedCheckpointError:
            return 0.0, number
        except CheckpointError:  # of a newer version, which may not be removed for that
            return math.inf, number

    return [path for _, path in sorted(numbered_in(root), key=age, reverse=True)]


def find(path: Path, check: Callable[[Path], Manifest] = verify) -> tuple[Path, Manifest]:
    """The checkpoint at a path; of a directory of numbered ones, that which `latest` names, or else the newest.

    Damaged ones are passed over with a warning each, where another one can be taken.

    Args:
        check: `verify` reads all of it, `read_manifest` its manifest only.

    Raises:
        NoCheckpointError: there is none.
        DamagedCheckpointError: all are damaged.
        CheckpointVersionError: a newer unisono has written it.
    """
    damaged: list[str] = []
    for candidate in _candidates(path):
        try:
            manifest = check(candidate)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        for each in damaged:
            logger.warning("passed over a damaged checkpoint: %s", each)
        if damaged or candidate.name.startswith("."):
            logger.warning("took %s, of step %d", candidate, manifest.step)
        return candidate, manifest
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {path} is whole: {'; '.join(damaged)}")
    left = [each.name for each in _wrecks(path)]
    told = f"; saves that were interrupted have left {', '.join(left)}" if left else ""
    raise NoCheckpointError(f"there is no checkpoint at {path}{told}")


def _candidates(path: Path) -> list[Path]:
    """What may be taken, the first choice first."""
    if (path / NAME).exists() or not list(numbered_in(path)):
        own = [path] if path.is_dir() and (any(path.iterdir())) and not _holds_wrecks_only(path) else []
        return [*own, *_whole(_wrecks(path))]
    numbered = newest_first(path)
    with suppress(OSError, UnicodeDecodeError):
        named = path / (path / LATEST).read_text().strip()
        numbered = [*(each for each in numbered if each == named), *(each for each in numbered if each != named)]
    return [*numbered, *_whole(_wrecks(path))]


def _holds_wrecks_only(path: Path) -> bool:
    return all(_WRECK.fullmatch(each.name) for each in path.iterdir())


def _wrecks(path: Path) -> list[Path]:
    """What interrupted saves of this checkpoint, or into this directory, have left, beside it or in it."""
    kinds = ("saving", "replaced")  # of the same save, the new one first
    beside = [each for kind in kinds for each in path.parent.glob(f".{kind}-{escape(path.name)}-@*")]
    inside = [each for kind in kinds for each in path.glob(f".{kind}-checkpoint_*-@*")]
    return beside + inside


def _whole(paths: list[Path]) -> list[Path]:
    """Those that have a manifest, the newest first: one that was killed before has none, and is no checkpoint yet."""
    found = []
    for path in paths:
        with suppress(CheckpointError):
            found.append((read_manifest(path).created, path))
    return [path for _, path in sorted(found, reverse=True)]
