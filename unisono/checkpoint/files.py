"""Files that exist completely after a crash, or not at all.

*Threads:* any; nothing is shared.

Invariant: once `write_file` or `CheckedFile.close` has returned, the contents are on disk; the name is after
`sync`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_PIECE = 1 << 22  # bytes per read


class Checksum(NamedTuple):
    """The size in bytes and the CRC-32 of a file's contents."""

    size: int = 0
    crc: int = 0

    def of_more(self, data: bytes | memoryview) -> Checksum:
        """The checksum with these bytes appended."""
        return Checksum(self.size + len(data), zlib.crc32(data, self.crc))


class CheckedFile:
    """A new file that computes its checksum as it is written; a context manager. Has what `torch.save` needs of a file.
    `failure` is the first error of the system."""

    def __init__(self, path: Path) -> None:
        self.checksum = Checksum()
        self.failure: OSError | None = None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of the data."""
        rest = memoryview(data).cast("B")
        self.checksum = self.checksum.of_more(rest)
        size = len(rest)
        try:
            while rest:
                # A write may be short: Linux takes 2 GiB at most.
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        return size

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        """Close the file once its contents are on disk."""
        # Taken first: whatever fails below, the descriptor is closed once.
        file, self._file = self._file, -1
        if file >= 0:
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_file(path: Path, data: bytes) -> Checksum:
    """Create a file with that content, on disk."""
    with CheckedFile(path) as file:
        file.write(data)
    return file.checksum


def write_tensors(path: Path, value: Any) -> Checksum:
    """Create a file as `torch.save` writes it, on disk."""
    with CheckedFile(path) as file:
        try:
            torch.save(value, file)  # type: ignore[arg-type] # it writes, and that is all that is asked
        except RuntimeError as error:
            raise file.failure or error from None  # torch's own error only says what it then failed to clean up
    return file.checksum


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file atomically, on disk. What a kill leaves is overwritten by the next call."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        write_file(new, data)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_directories(path: Path) -> None:
    """Create the directory and its parents, each one synced to disk."""
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        # Another process may have created it in the meantime.
        if not path.is_dir():
            raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a directory, are on disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process, however that ends. Some file systems have none (NFS).
    FileExistsError if another process or thread holds it."""
    import fcntl  # not on Windows

    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another save to {path} is in progress; give each run its own place") from None
        except OSError:
            pass  # without locks
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # explicitly: a forked process may hold a copy of the descriptor
        os.close(directory)


def checksum_of(path: Path) -> Checksum:
    """The checksum of an existing file; reads all of it."""
    checksum = Checksum()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_PIECE))
        while count := file.readinto(buffer):
            checksum = checksum.of_more(buffer[:count])
    return checksum
