"""Places in object stores: any URL that fsspec supports, memory://, s3://, gs://.

*Threads:* any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

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

    def exists(self) -> bool:
        """Whether it is an object, or contains some."""
        store, place = self.store()
        return bool(store.exists(place))

    def is_dir(self) -> bool:
        """Whether it contains objects."""
        store, place = self.store()
        return bool(store.isdir(place))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what it contains; nothing if there is no such place, since stores have no empty ones."""
        store, place = self.store()
        with suppress(FileNotFoundError):
            for each in store.ls(place, detail=False):
                yield self / each.rstrip("/").rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """The content of an object."""
        store, place = self.store()
        data: bytes = store.cat_file(place)
        return data

    def write_bytes(self, data: bytes) -> None:
        """Put an object, completely or not at all."""
        store, place = self.store()
        store.pipe_file(place, data)

    def remove(self) -> None:
        """Remove the object, or all that the place contains; nothing if there is none."""
        store, place = self.store()
        with suppress(FileNotFoundError):  # also of a store that has no directories
            store.rm(place, recursive=True)

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
