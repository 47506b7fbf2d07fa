"""Checkpoints on their way to object stores, and back.

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
import tempfile
from dataclasses import replace
from pathlib import Path

from unisono.checkpoint.directory import LATEST, UPLOAD, Place, Write, commit, created_after_latest, outdated
from unisono.checkpoint.manifest import NAME, Manifest, read_manifest, verify
from unisono.checkpoint.remote import RemotePath
from unisono.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)


def publish(place: Place, write: Write, manifest: Manifest, mark: str) -> None:
    """Like `directory.commit`, into a store."""
    target: RemotePath = place.path
    root, upload = target.parent, target / mark.rpartition("@")[2]
    with tempfile.TemporaryDirectory(prefix="unisono-checkpoint-") as directory:
        local = Path(directory) / "checkpoint"
        commit(Place(local), write, manifest, mark)
        made = verify(local)
        store, base = upload.store()
        store.makedirs(base, exist_ok=True)
        for name in made.files:
            store.put_file(str(local / name), f"{base}/{name}")
    files = {f"{upload.name}/{name}": checksum for name, checksum in made.files.items()}
    created = created_after_latest(made.created, root) if place.is_numbered else made.created
    # The manifest comes last: it makes the uploaded files a checkpoint.
    (target / NAME).write_bytes(replace(made, files=files, created=created).to_bytes())
    if place.is_numbered:
        (root / LATEST).write_bytes(target.name.encode())
    _clear(place, upload)


def _clear(place: Place, upload: RemotePath) -> None:
    """Remove what is not to be kept; a failure is logged, and does no harm."""
    target: RemotePath = place.path
    try:
        for each in target.iterdir():
            # Files of the checkpoint that was replaced, or of an interrupted upload.
            if UPLOAD.fullmatch(each.name) and each != upload:
                each.remove()
        for path in outdated(place):
            (path / NAME).remove()  # first: without it, it is no longer a checkpoint
            path.remove()
    except OSError as error:
        logger.warning("what is no longer needed at %s cannot be removed: %s", target.parent, error)


def fetch(path: RemotePath, into: Path) -> Manifest:
    """Download a checkpoint, and verify it.

    Raises:
        DamagedCheckpointError, CheckpointVersionError: as for `verify`.
    """
    manifest = read_manifest(path)
    store, base = path.store()
    # The local copy has the names of a local checkpoint, without the upload's own directory.
    plain = {name.partition("/")[2]: checksum for name, checksum in manifest.files.items()}
    for name in manifest.files:
        local = into / name.partition("/")[2]
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(f"{base}/{name}", str(local))
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path}: {name} is missing") from error
    (into / NAME).write_bytes(replace(manifest, files=plain).to_bytes())
    return verify(into)
