"""Checkpoints in object stores: any URL that fsspec supports, memory://, s3://, gs://.

A store writes an object completely or not at all, and has neither renames nor links. So a checkpoint's files are
uploaded under unique names, and its manifest last, in one put: without it there is no checkpoint. In a place that is
overwritten, the new manifest names the new files, and then the old ones are removed. This relies on the store: it has
what it has acknowledged, and shows it to later readers (S3 and GCS do).

    s3://bucket/run/checkpoints/latest
    s3://bucket/run/checkpoints/checkpoint_200/manifest.json
    s3://bucket/run/checkpoints/checkpoint_200/<a unique name>/state.pt

*Threads:* as for directories. Only rank zero accesses the store.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from unisono.checkpoint.directory import LATEST, Place, Write, commit
from unisono.checkpoint.manifest import FORMAT, NAME, Manifest, verify
from unisono.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_OWN = re.compile(r"[0-9a-f]{12}")  # the name under which a save puts its files
_WAS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True)
class RemotePath:
    """A place in a store, with those methods of `Path` that are needed."""

    url: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The place that contains it."""
        return RemotePath(self.url.rpartition("/")[0])

    def store(self) -> tuple[Any, str]:
        """The file system, and the place in it.

        Raises:
            ImportError: fsspec, or what it needs for this store, is not installed.
        """
        try:
            core = import_module("fsspec.core")
        except ImportError as error:
            raise ImportError(f"{self.url} needs fsspec; pip install 'unisono[remote]'") from error
        file_system, place = core.url_to_fs(self.url)
        file_system.invalidate_cache()  # of names, which others may have changed
        return file_system, place


Location = Path | RemotePath


def location(path: str | os.PathLike[str] | RemotePath) -> Location:
    """Convert a path to an absolute, resolved one, which does not depend on later changes of the working directory or
    of links; or a URL to a place in a store. file:// is a path.

    Raises:
        ValueError: a URL was converted to a `Path`, which removed a slash from it; or it is a chain of file systems.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if _WAS_URL.match(text):
        raise ValueError(f"{text!r} was a URL before it was converted to a path; pass it as a string, with two slashes")
    if "://" in text and not text.startswith("file://"):
        if "::" in text:  # a cache shows outdated contents, and "dir::" writes files where it does not find them
            raise ValueError(f"{text!r} is a chain of file systems; pass the URL of the store itself")
        scheme, _, place = text.partition("://")
        return RemotePath(f"{scheme}://{place.rstrip('/')}")
    return Path(text.removeprefix("file://")).resolve()


def check_place_at(place: Place) -> None:
    """Like `directory.check_place`, in a store."""
    others = _others_at(place.path)
    if others:
        raise FileExistsError(
            f"{place.path} holds {', '.join(others[:3])}, and a checkpoint would replace them; pass an unused "
            f"place, or that of a checkpoint, such as {place.path / 'best'}"
        )


def _others_at(path: RemotePath) -> list[str]:
    """The names there that do not belong to a checkpoint."""
    store, base = path.store()
    names = _names_at(store, base)
    if NAME in names and FORMAT.encode() not in store.cat_file(f"{base}/{NAME}"):
        return names
    return [name for name in names if name != NAME and not _OWN.fullmatch(name)]


def _names_at(store: Any, base: str) -> list[str]:
    """The last parts of the names there; empty if there is no such place."""
    try:
        return [each.rstrip("/").rpartition("/")[2] for each in store.ls(base, detail=False)]
    except FileNotFoundError:
        return []


def publish(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """Like `directory.commit`, into a store."""
    target: Any = place.path
    store, base = target.store()
    own = mark.rpartition("@")[2]
    with tempfile.TemporaryDirectory(prefix="unisono-checkpoint-") as directory:
        local = Path(directory) / "checkpoint"
        commit(Place(local), write, manifest, mark)
        made = verify(local)
        store.makedirs(f"{base}/{own}", exist_ok=True)
        for name in made.files:
            store.put_file(str(local / name), f"{base}/{own}/{name}")
    named = {f"{own}/{name}": checksum for name, checksum in made.files.items()}
    created = made.created
    if place.is_numbered:
        with suppress(FileNotFoundError, CheckpointError):
            created = max(created, math.nextafter(_manifest_at(_latest_at(target.parent)).created, math.inf))
    # The manifest comes last: it makes the uploaded files a checkpoint.
    store.pipe_file(f"{base}/{NAME}", replace(made, files=named, created=created).to_bytes())
    if place.is_numbered:
        store.pipe_file(f"{target.parent.store()[1]}/{LATEST}", target.name.encode())
    _clear(place, own)


def _clear(place: Place, own: str) -> None:
    """Remove what is not to be kept; a failure is logged, and does no harm."""
    target: Any = place.path
    store, base = target.store()
    try:
        for name in _names_at(store, base):
            # Files of the checkpoint that was replaced, or of an interrupted upload.
            if name != own and _OWN.fullmatch(name):
                store.rm(f"{base}/{name}", recursive=True)
        kept = place.keep if place.is_numbered else None
        for path in [path for path in newest_first(target.parent) if not _others_at(path)][kept:] if kept else []:
            if path != target:
                _remove(path)
    except OSError as error:
        logger.warning("what is no longer needed at %s cannot be removed: %s", target.parent, error)


def numbered_in(root: RemotePath) -> Iterator[tuple[int, RemotePath]]:
    """Yield the numbered checkpoints of a place."""
    store, base = root.store()
    with suppress(FileNotFoundError):
        for each in store.ls(base, detail=False):
            if found := _NUMBERED.fullmatch(each.rstrip("/").rpartition("/")[2]):
                yield int(found[1]), root / found[0]


def newest_first(root: RemotePath) -> list[RemotePath]:
    """Like `directory.newest_first`: incomplete checkpoints come last."""

    def age(pair: tuple[int, RemotePath]) -> tuple[float, int]:
        number, path = pair
        try:
            return _manifest_at(path).created, number
        except CheckpointVersionError:
            return math.inf, number
        except (CheckpointError, FileNotFoundError):
            return 0.0, number

    return [path for _, path in sorted(numbered_in(root), key=age, reverse=True)]


def _manifest_at(path: RemotePath) -> Manifest:
    store, base = path.store()
    return Manifest.from_bytes(store.cat_file(f"{base}/{NAME}"), Path(path.name))


def _remove(path: RemotePath) -> None:
    store, base = path.store()
    with suppress(FileNotFoundError):  # of an interrupted save, or in a store that has no directories
        store.rm(f"{base}/{NAME}")  # first: without it, it is no longer a checkpoint
    with suppress(FileNotFoundError):
        store.rm(base, recursive=True)


def fetch(path: RemotePath, into: Path) -> tuple[Path, RemotePath]:
    """Download a checkpoint, in a place of numbered ones the latest; return the local path, and where it was.

    Raises:
        NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: as for `directory.find`.
    """
    damaged: list[str] = []
    for candidate in _candidates(path):
        try:
            local = _fetch_one(candidate, into / candidate.name)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            damaged.append(f"{candidate}: {error}")
            continue
        for each in damaged:
            logger.warning("skipped a damaged checkpoint: %s", each)
        if damaged:
            logger.warning("took %s", candidate)
        return local, candidate
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {path} is intact: {'; '.join(damaged)}")
    raise NoCheckpointError(f"there is no checkpoint at {path}")


def score_at(path: RemotePath) -> float | None:
    """The score of the checkpoint there; None if there is no checkpoint."""
    try:
        return _manifest_at(path).score
    except (FileNotFoundError, CheckpointError):
        return None


def _candidates(path: RemotePath) -> list[RemotePath]:
    store, base = path.store()
    if store.exists(f"{base}/{NAME}"):
        return [path]
    found = [each for each in newest_first(path) if store.exists(f"{each.store()[1]}/{NAME}")]
    with suppress(FileNotFoundError):
        named = _latest_at(path)
        # The sort is stable, so the others stay newest first.
        found.sort(key=lambda each: each != named)
    return found


def _latest_at(root: RemotePath) -> RemotePath:
    store, base = root.store()
    name: str = store.cat_file(f"{base}/{LATEST}").decode().strip()
    return root / name


def _fetch_one(path: RemotePath, into: Path) -> Path:
    store, base = path.store()
    manifest = Manifest.from_bytes(store.cat_file(f"{base}/{NAME}"), into)
    # The local copy has the names of a local checkpoint, without the upload's own directory.
    plain = {name.partition("/")[2]: checksum for name, checksum in manifest.files.items()}
    for name in manifest.files:
        local = into / name.partition("/")[2]
        local.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{base}/{name}", str(local))
    (into / NAME).write_bytes(replace(manifest, files=plain).to_bytes())
    verify(into)
    return into
