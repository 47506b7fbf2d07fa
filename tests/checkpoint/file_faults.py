"""What may happen to a process at each of its file operations: it is killed there, or the disk fails it.

The operations are those of `os`, through which checkpoints are written, renamed and removed.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")

Act = Callable[[int, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Does the operation of that number and name, or something else."""


@contextmanager
def at_each_operation(act: Act) -> Iterator[None]:
    """In the block, let `act` do what this process does to files."""
    plain = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def wrapped(name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return act(count, name, plain[name], args, kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, operation in plain.items():
            setattr(os, name, operation)


def count_operations(work: Callable[[], Any]) -> int:
    """How many file operations the work takes."""
    found = 0

    def act(number: int, name: str, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal found
        found = number
        return operation(*args, **kwargs)

    with at_each_operation(act):
        work()
    return found


def kill_at(number: int) -> Act:
    """SIGKILL before that operation; a write is half done."""

    def act(count: int, name: str, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if count == number:
            if name == "write":
                operation(args[0], memoryview(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return act


def fail_at(number: int, code: int = errno.EIO) -> Act:
    """An error of the system at that operation, and none of the others."""

    def act(count: int, name: str, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if count == number:
            if name == "close":
                operation(*args)
            raise OSError(code, os.strerror(code))
        return operation(*args, **kwargs)

    return act


def end_save() -> None:
    """Wait for the save in progress, without asking for its error."""
    for each in threading.enumerate():
        if each.name == "unisono-checkpoint":
            each.join()


Tree = dict[str, Any]
"""What a directory holds: bytes of files, trees of directories."""


class PowerCuts:
    """What a disk would hold if the power failed after each file operation, under a directory.

    What counts as on the disk: the data of a file when it was synced, the names in a directory when that was. A disk
    may also have taken names that nobody has synced, before the data: so there are two states after each operation.

    Attributes:
        states: those that differ, in order, each in both forms.
    """

    def __init__(self, root: Path) -> None:
        self.states: list[Tree] = []
        self._root = root
        self._made: dict[int, int] = {}  # by inode, of which numbers are used again: how many were made before
        self._data: dict[tuple[int, int], bytes] = {}
        self._names: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        for path in [root, *root.rglob("*")]:
            self._sync(path)

    def act(self, count: int, name: str, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do the operation, and note what the disk holds then."""
        path = Path(f"/proc/self/fd/{args[0]}").resolve() if name == "fsync" else None
        result = operation(*args, **kwargs)
        if name == "mkdir" or (name == "open" and args[1] & os.O_CREAT):
            inode = os.stat(result if name == "open" else args[0]).st_ino
            self._made[inode] = self._made.get(inode, 0) + 1
        if path is not None:
            self._sync(path)
        for tree in (self._synced(self._key(self._root)), self._named(self._root)):
            if tree not in self.states[-4:]:
                self.states.append(tree)
        return result

    def _key(self, path: Path) -> tuple[int, int]:
        inode = path.lstat().st_ino
        return inode, self._made.get(inode, 0)

    def _sync(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._key(path)] = {each.name: self._key(each) for each in path.iterdir()}
        else:
            self._data[self._key(path)] = path.read_bytes()

    def _synced(self, key: tuple[int, int]) -> Tree:
        """What was synced below a directory."""
        return {name: self._content(child) for name, child in self._names.get(key, {}).items()}

    def _content(self, key: tuple[int, int]) -> Any:
        return self._synced(key) if key in self._names else self._data.get(key, b"")

    def _named(self, path: Path) -> Tree:
        """All names, with the data that was synced."""
        return {
            each.name: self._named(each) if each.is_dir() else self._data.get(self._key(each), b"")
            for each in path.iterdir()
        }


def write_tree(path: Path, tree: Tree) -> None:
    """Make what a disk holds."""
    path.mkdir()
    for name, each in tree.items():
        if isinstance(each, dict):
            write_tree(path / name, each)
        else:
            (path / name).write_bytes(each)
