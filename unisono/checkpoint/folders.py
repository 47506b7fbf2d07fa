"""Folders that hold checkpoints, on a file system, or in an object store (any URL that fsspec supports); and files that
exist completely after a crash, or not at all.

A checkpoint needs four verbs of a folder: entries, read, write (completely or not at all), remove; and large files are
written as a draft that is published. A store must keep what it has acknowledged, and show it to later readers.

*Threads:* any; one at a time for each draft.

Invariant: once `write_file` has returned, the contents are on disk; the name is after `sync`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from unisono.launch.job import private_directory

Location = Path | str
"""A folder as the user sees it: a path, or the URL of a store."""

MANIFEST = "manifest.json"
_PIECE = 1 << 22  # bytes per read
_LARGEST = 1 << 28  # bytes of a file that is read as a whole: those that describe others
_drafts: dict[str, tuple[Path, ExitStack]] = {}  # for stores, by their unique names, and what removes them


@dataclass(frozen=True)
class Folder:
    """A directory, which need not exist; `url` is its absolute path, or a store's URL, without a slash at the end."""

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
    def location(self) -> Location:
        """As the user sees it."""
        return self.url if "://" in self.url else Path(self.url)

    def entries(self) -> dict[str, bool]:
        """What is in the folder, by name, and whether it is a folder itself; nothing if there is no such folder."""
        directory = Path(self.url)
        return {each.name: each.is_dir() for each in directory.iterdir()} if directory.exists() else {}

    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError if there is none."""
        _check_file(path := Path(self.url, name))
        with path.open("rb") as file:
            return _all_of(str(path), file.read(_LARGEST + 1))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file, completely or not at all."""
        replace_file(Path(self.url, name), lambda new: write_file(new, data))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if there is none."""
        path = Path(self.url, name)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        (path / MANIFEST).unlink(missing_ok=True)  # first, so that what a kill leaves is not a checkpoint
        sync(path)
        shutil.rmtree(path)

    def draft(self, name: str) -> Path:
        """The directory for the large files of this name, created now; `publish` puts them into the folder."""
        make_directories(Path(self.url, name))
        return Path(self.url, name)

    def publish(self, name: str) -> None:
        """See `draft`."""
        with suppress(FileNotFoundError):  # another save has removed it, as `commit` notices
            sync(Path(self.url, name))

    def discard(self, name: str) -> None:
        """Remove a draft, and the folder, if that is all that was in it."""
        self.remove(name)
        with suppress(OSError):
            os.rmdir(self.url)

    def fetch(self, names: Iterable[str], copies: ExitStack) -> Path:
        """Return a directory with these files of the folder, those that exist; `copies` removes it if they are
        elsewhere."""
        return Path(self.url)


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
        return _all_of(f"{place}/{name}", bytes(store.cat_file(f"{place}/{name}", end=_LARGEST + 1)))

    def write(self, name: str, data: bytes) -> None:
        store, place = self._store()
        store.makedirs(place, exist_ok=True)
        store.pipe_file(f"{place}/{name}", data)

    def remove(self, name: str) -> None:
        store, place = self._store()
        for each in (f"{place}/{name}/{MANIFEST}", f"{place}/{name}"):
            with suppress(FileNotFoundError, NotADirectoryError):
                store.rm(each, recursive=True)

    def draft(self, name: str) -> Path:
        if name not in _drafts:
            copies = ExitStack()
            _drafts[name] = copies.enter_context(private_directory("checkpoint")), copies
        return _drafts[name][0]

    def publish(self, name: str) -> None:
        store, place = self._store()
        local, copies = _drafts.pop(name)
        with copies:
            store.put(f"{local}/", f"{place}/{name}/", recursive=True)

    def discard(self, name: str) -> None:
        if name in _drafts:
            _drafts.pop(name)[1].close()
        self.remove(name)

    def fetch(self, names: Iterable[str], copies: ExitStack) -> Path:
        store, place = self._store()
        into = copies.enter_context(private_directory("checkpoint"))
        for name in names:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                store.get_file(f"{place}/{name}", str(into / name))
        return into

    def _store(self) -> tuple[Any, str]:
        """The file system, and the place in it; ImportError if what fsspec needs for this store is missing."""
        store, place = import_module("fsspec.core").url_to_fs(self.url)  # torch requires fsspec
        store.invalidate_cache()  # of names, which others may have changed
        return store, place


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder at a path, which becomes absolute and resolved, so that later changes of the working directory or of
    links do not matter; or at a URL. file:// is a path. ValueError if a URL has lost a slash as a `Path`, or is a
    chain: a cache shows outdated contents, and "dir::" writes files where it does not find them."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", text) or ("::" in text and "://" in text):
        raise ValueError(f"{text!r} is no place for checkpoints; pass the URL of a store itself, as a string: a://b/c")
    if "://" in text and not text.startswith("file://"):
        scheme, _, place = text.partition("://")
        return RemoteFolder(f"{scheme}://{place.rstrip('/')}")
    return Folder(str(Path(text.removeprefix("file://")).resolve()))


# Files.


Checksum = tuple[int, int]
"""The size in bytes and the CRC-32 of a file's contents."""


class _CheckedFile:
    """An open file that computes its checksum as it is written; has what `torch.save` needs. The system's first error
    becomes its `failure`: when one is raised, torch reports only what it then failed to clean up."""

    def __init__(self, file: int) -> None:
        self.size = self.crc = 0
        self.failure: OSError | None = None
        self._file = file

    def write(self, data: bytes | bytearray | memoryview) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        self.size, self.crc = self.size + size, zlib.crc32(rest, self.crc)
        try:
            while rest and self.failure is None:
                rest = rest[os.write(self._file, rest) :]  # Linux takes 2 GiB at most
        except OSError as error:
            self.failure = error
        return size

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def write_file(path: Path, content: Any) -> Checksum:
    """Create a file, on disk, in a directory that need not exist: bytes, or anything else as `torch.save` writes it."""
    make_directories(path.parent)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        file: Any = _CheckedFile(opened)
        file.write(content) if isinstance(content, bytes) else torch.save(content, file)
        if (failure := file.failure) is not None:
            file.failure = None  # torch may keep the file for good, and a traceback keeps all that its frames hold
            raise failure
        os.fsync(opened)
    finally:
        os.close(opened)
    return file.size, file.crc


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Create or replace a file atomically, on disk, by `write` of another one. The next call overwrites what a kill
    leaves."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        write(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.absolute().parent)


def make_directories(path: Path) -> None:
    """Create the directory and its parents, each one synced to disk."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a directory, are on disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _check_file(path: Path) -> None:
    """FileNotFoundError unless it is a file: reading a pipe, or a device, may never end."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))


def _all_of(name: str, data: bytes) -> bytes:
    """What has been read of a file; FileNotFoundError if that is more than is ever written as one."""
    if len(data) > _LARGEST:
        raise FileNotFoundError(errno.ENOENT, "no such file of a size that is written", name)
    return data


def checksum_of(path: Path, size: int | None = None) -> Checksum:
    """The checksum of an existing file; reads all of it, or nothing if it does not have that size."""
    _check_file(path)
    if size is not None and (found := path.stat().st_size) != size:
        return found, 0
    crc = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
        return file.tell(), crc
