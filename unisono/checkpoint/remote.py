"""Checkpoints in object stores: any URL that fsspec knows, memory://, s3://, gs://.

A store puts an object whole or not at all, and has neither renames nor links. So a checkpoint's files go up under names
of their own, and its manifest last, in one put: without it there is no checkpoint. In a place that is written again,
the new manifest names the new files, and the old ones go then. What a store promises holds: that it has what it has
acknowledged, and shows it to who reads later (S3 and GCS do).

    s3://bucket/run/checkpoints/latest
    s3://bucket/run/checkpoints/checkpoint_200/manifest.json
    s3://bucket/run/checkpoints/checkpoint_200/<a name of its own>/state.pt

*Threads:* as for directories. Rank zero alone talks to the store.
"""

from __future__ import annotations

import logging
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
from unisono.checkpoint.manifest import NAME, Manifest, verify
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True)
class RemotePath:
    """A place in a store; as far as needed, what a `Path` is."""

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
        """What it is in."""
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
        return file_system, place


Location = Path | RemotePath


def location(path: str | os.PathLike[str] | RemotePath) -> Location:
    """A path, or, of a URL, a place in a store; file:// is a path."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath(text.rstrip("/")) if "://" in text else Path(text)


def publish(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """As `directory.commit`, into a store."""
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
    store.pipe_file(f"{base}/{NAME}", replace(made, files=named).to_bytes())
    if place.is_numbered:
        store.pipe_file(f"{target.parent.store()[1]}/{LATEST}", target.name.encode())
    _clear(place, own)


def _clear(place: Place, own: str) -> None:
    """Remove what is not to be kept; a failure is told, and harms nothing."""
    target: Any = place.path
    store, base = target.store()
    try:
        for each in store.ls(base, detail=False):
            if each.rpartition("/")[2] not in (own, NAME):
                store.rm(each, recursive=True)
        older = (
            sorted(numbered_in(target.parent), reverse=True)[place.keep :] if place.is_numbered and place.keep else []
        )
        for _, path in older:
            if path != target:
                store.rm(f"{path.store()[1]}/{NAME}")  # first: it is no checkpoint any more
                store.rm(path.store()[1], recursive=True)
    except OSError as error:
        logger.warning("what is needed no more at %s cannot be removed: %s", target.parent, error)


def numbered_in(root: RemotePath) -> Iterator[tuple[int, RemotePath]]:
    """The numbered checkpoints of a place."""
    store, base = root.store()
    with suppress(FileNotFoundError):
        for each in store.ls(base, detail=False):
            if found := _NUMBERED.fullmatch(each.rstrip("/").rpartition("/")[2]):
                yield int(found[1]), root / found[0]


def fetch(path: RemotePath, into: Path) -> tuple[Path, RemotePath]:
    """Bring a checkpoint here, of a place of numbered ones the latest; the local path, and where it was.

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
            logger.warning("passed over a damaged checkpoint: %s", each)
        if damaged:
            logger.warning("took %s", candidate)
        return local, candidate
    if damaged:
        raise DamagedCheckpointError(f"no checkpoint at {path} is whole: {'; '.join(damaged)}")
    raise NoCheckpointError(f"there is no checkpoint at {path}")


def score_at(path: RemotePath) -> float | None:
    """That of the checkpoint there; None where there is none."""
    store, base = path.store()
    try:
        return Manifest.from_bytes(store.cat_file(f"{base}/{NAME}"), Path(path.name)).score
    except (FileNotFoundError, CheckpointError):
        return None


def _candidates(path: RemotePath) -> list[RemotePath]:
    store, base = path.store()
    if store.exists(f"{base}/{NAME}"):
        return [path]
    found = [each for _, each in sorted(numbered_in(path), key=lambda pair: pair[0], reverse=True)]
    found = [each for each in found if store.exists(f"{each.store()[1]}/{NAME}")]
    with suppress(FileNotFoundError):
        named = path / store.cat_file(f"{base}/{LATEST}").decode().strip()
        found.sort(key=lambda each: each != named)
    return found


def _fetch_one(path: RemotePath, into: Path) -> Path:
    store, base = path.store()
    manifest = Manifest.from_bytes(store.cat_file(f"{base}/{NAME}"), into)
    plain = {name.partition("/")[2]: checksum for name, checksum in manifest.files.items()}
    for name in manifest.files:
        local = into / name.partition("/")[2]
        local.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{base}/{name}", str(local))
    (into / NAME).write_bytes(replace(manifest, files=plain).to_bytes())
    verify(into)
    return into
