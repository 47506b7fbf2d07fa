"""Folders that hold checkpoints: on a file system, or in an object store (any URL that fsspec supports).

All that a checkpoint asks of either is four verbs, and a way to write and read large files:

    entries   what is in the folder
    read      a small file
    write     a small file, completely or not at all
    remove    a file, or a folder with all that is in it

This relies on the store: it has what it has acknowledged, and shows it to later readers (S3 and GCS do).

*Threads:* any.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from unisono.checkpoint.files import lock_directory, make_directories, replace_file, sync

Location = Path | str
"""A folder as the user sees it: a path, or the URL of a store."""

MANIFEST = "manifest.json"
_WAS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True)
class Folder(ABC):
    """A folder, which need not exist; `url` is its absolute path, or its URL, without a slash at the end."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder that contains it."""
        return type(self)(self.url.rpartition("/")[0])

    @property
    def location(self) -> Location:
        """As the user sees it."""
        return self.url

    @abstractmethod
    def entries(self) -> dict[str, bool]:
        """What is in the folder, by name, and whether that is a folder; nothing if there is no such folder."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file, completely or not at all."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, its manifest first; nothing if there is none."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other saves out of the folder, where it has locks; a store has none. FileExistsError if another one is
        in progress."""
        yield

    @abstractmethod
    def new_files(self, name: str) -> AbstractContextManager[Path]:
        """An empty directory for large files. Once the block has ended, they are in the folder, under that name."""

    @abstractmethod
    def fetch(self, names: Iterable[str], into: Path) -> Path:
        """Return a directory with these files of the folder, those that exist; `into` serves if they are elsewhere."""


class LocalFolder(Folder):
    """A directory."""

    @property
    def location(self) -> Path:
        return Path(self.url)

    def entries(self) -> dict[str, bool]:
        if not self.location.exists():
            return {}
        return {each.name: each.is_dir() for each in self.location.iterdir()}

    def read(self, name: str) -> bytes:
        return (self.location / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        make_directories(self.location)
        replace_file(self.location / name, data)

    def remove(self, name: str) -> None:
        path = self.location / name
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        # First, so that what a kill leaves of a checkpoint is none.
        (path / MANIFEST).unlink(missing_ok=True)
        sync(path)
        shutil.rmtree(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        try:
            make_directories(self.location)
        except OSError:
            with suppress(OSError):
                self.location.rmdir()  # an empty one, which could not be synced
            raise
        with lock_directory(self.location):
            yield

    @contextmanager
    def new_files(self, name: str) -> Iterator[Path]:
        make_directories(self.location / name)
        yield self.location / name
        sync(self.location / name)

    def fetch(self, names: Iterable[str], into: Path) -> Path:
        return self.location


class RemoteFolder(Folder):
    """A place in a store. Stores have no empty folders."""

    def entries(self) -> dict[str, bool]:
        store, place = self._store()
        with suppress(FileNotFoundError):
            found = store.ls(place, detail=True)
            return {each["name"].rstrip("/").rpartition("/")[2]: each["type"] == "directory" for each in found}
        return {}

    def read(self, name: str) -> bytes:
        store, place = self._store()
        data: bytes = store.cat_file(f"{place}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        store, place = self._store()
        store.makedirs(place, exist_ok=True)
        store.pipe_file(f"{place}/{name}", data)

    def remove(self, name: str) -> None:
        store, place = self._store()
        for each in (f"{place}/{name}/{MANIFEST}", f"{place}/{name}"):
            with suppress(FileNotFoundError, NotADirectoryError):
                store.rm(each, recursive=True)

    @contextmanager
    def new_files(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="unisono-checkpoint-") as directory:
            local = Path(directory)
            yield local
            store, place = self._store()
            for each in [path for path in local.rglob("*") if path.is_file()]:
                target = f"{place}/{name}/{each.relative_to(local).as_posix()}"
                store.makedirs(target.rpartition("/")[0], exist_ok=True)
                store.put_file(str(each), target)

    def fetch(self, names: Iterable[str], into: Path) -> Path:
        store, place = self._store()
        for name in names:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                store.get_file(f"{place}/{name}", str(into / name))
        return into

    def _store(self) -> tuple[Any, str]:
        """The file system, and the place in it; ImportError if fsspec, or what it needs for this store, is not
        installed."""
        try:
            core = import_module("fsspec.core")
        except ImportError as error:
            raise ImportError(f"{self} needs fsspec; pip install 'unisono[remote]'") from error
        file_system, place = core.url_to_fs(self.url)
        file_system.invalidate_cache()  # of names, which others may have changed
        return file_system, place


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder at a path, which becomes absolute and resolved, so that later changes of the working directory or of
    links do not matter; or at a URL. file:// is a path. ValueError if a URL has lost a slash as a `Path`, or is a
    chain."""
    text = os.fspath(path)
    if _WAS_URL.match(text):
        raise ValueError(f"{text!r} was a URL before it was converted to a path; pass it as a string, with two slashes")
    if "://" in text and not text.startswith("file://"):
        if "::" in text:  # a cache shows outdated contents, and "dir::" writes files where it does not find them
            raise ValueError(f"{text!r} is a chain of file systems; pass the URL of the store itself")
        scheme, _, place = text.partition("://")
        return RemoteFolder(f"{scheme}://{place.rstrip('/')}")
    return LocalFolder(str(Path(text.removeprefix("file://")).resolve()))
