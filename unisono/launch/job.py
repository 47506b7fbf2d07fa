"""What the workers of a group get, in a private directory of the group, and what they take over from their caller.

    <TMPDIR>/unisono-1-89fe0a31-ab12cd34/     0700; how deep the group is in groups, and which machine it is on
        store                                 the file in which the process group meets
        multiprocessing/                      sockets of loader workers
        stacks-0, ...                         of the workers

Their task, with the caller's environment, is in a file without a name.

No port is opened and no name is looked up, so any number of groups can start concurrently, and a broken resolver delays
none of them. The directory of a group that a worker starts is inside that of the worker's own group and is removed with
it: killing the outer workers also kills the inner zygote, before it can clean up.

The caller removes the directory, or else the zygote; if both are killed at the same moment, the next caller on this
machine does. A caller holds a lock on its directory as long as it lives.
"""

from __future__ import annotations

import mmap
import os
import pickle
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import IO, Any
from zlib import crc32

from unisono.errors import UnisonoError
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.imported_modules import describe_modules
from unisono.launch.options import Options
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.starting.process_ends import search_path
from unisono.report import terminal

_NAME = re.compile(r"unisono-(\d+)-")  # of a directory, with the depth of its group
SOCKETS = "multiprocessing"
_MAX_DEPTH = 3  # nested groups; each level multiplies the workers
_PULSE_S = 1.0  # seconds between two checks of a worker's progress


@dataclass(frozen=True)
class Caller:
    """What a worker takes over from the process that called `spawn`."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=search_path)
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    modules: bytes = field(default_factory=lambda: pickle.dumps(describe_modules()))
    columns: int = field(default_factory=lambda: terminal.columns_of(2))  # of what shows the workers' stderr
    # The file of `__main__`, and its name if it was run by `python -m`; empty where it has none.
    main: tuple[str, str] = field(default_factory=lambda: _main_module())


def _main_module() -> tuple[str, str]:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return os.path.abspath(file) if file else "", getattr(getattr(main, "__spec__", None), "name", "")


@dataclass(frozen=True)
class Job:
    """What all workers of a group get, the same for each: of a whole group, or of this machine's part of it."""

    call: bytes  # `Settings`, then `(fn, args)`
    backend: str
    options: Options
    num_threads: int  # CPU threads of each worker
    place: RankPlace  # the first worker's here; without an address, the ranks meet in the group's directory
    caller: Caller = field(default_factory=Caller)
    records: str = ""  # the directory of the ranks' records
    held_memory: str = ""  # the path of the memory that its launcher holds
    groups_before: int = 0  # of the same run
    done_before: int = 0  # optimizer steps of the attempt before
    # Signs what ranks without an address send one another by gloo: other users reach the loopback, too.
    secret: str = field(default_factory=lambda: token_hex(32), repr=False)

    @property
    def ranks(self) -> range:
        return range(self.place.rank, self.place.rank + self.place.local_world_size)

    @property
    def pulse_s(self) -> float:
        """Seconds between two checks of a worker's progress."""
        return min(_PULSE_S, (self.options.hang_timeout_s or self.options.timeout_s) / 20)

    def place_of(self, rank: int) -> RankPlace:
        return replace(self.place, rank=rank, local_rank=rank - self.place.rank)


def write_job(job: Job) -> IO[bytes]:
    """Write what the workers read in their first lines, into a file without a name: on Linux it is only in memory."""
    create = getattr(os, "memfd_create", None)
    file: Any = open(create("unisono-job"), "wb") if create else tempfile.TemporaryFile()  # noqa: SIM115 - returned
    pickle.dump(job, file)
    file.flush()
    return file  # type: ignore[no-any-return]


def read_job(descriptor: int) -> Job:
    """Read what `write_job` has written."""
    # Mapped, since all workers share one position in the file.
    with open(descriptor, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        job: Job = pickle.loads(data)
    return job


@contextmanager
def rendezvous() -> Iterator[Path]:
    """Create the directory of one group, and remove it after the block. (The zygote removes it if the caller is
    killed.)"""
    found = _NAME.match(Path(os.environ.get(OUTER_DIRECTORY, "")).name)
    depth = int(found[1]) if found else 0
    if depth >= _MAX_DEPTH:
        raise UnisonoError(
            f"spawn is called in a worker of a worker, {_MAX_DEPTH} deep; if that is not intended, a module that the "
            'workers import calls spawn at its top level: put that call under `if __name__ == "__main__":`'
        )
    with private_directory(str(depth + 1)) as directory:
        (directory / SOCKETS).mkdir(0o700)
        yield directory


@contextmanager
def private_directory(kind: str) -> Iterator[Path]:
    """Create a directory that only its user can open, in that of this worker's own group, or else in TMPDIR; remove it
    after the block. Remove those, of any kind, that dead processes have left there."""
    import fcntl  # Unix only

    outer, creator = os.environ.get(OUTER_DIRECTORY, ""), os.getpid()
    parent = outer if os.path.isdir(outer) else tempfile.gettempdir()
    machine = f"{crc32(platform.node().encode()):08x}"  # those that share a directory may not share its locks
    for each in Path(parent).glob(f"unisono-*-{machine}-*"):
        with suppress(OSError), _opened_directory(each) as descriptor:
            if os.fstat(descriptor).st_uid == os.geteuid():  # another user's may hold anything
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
    directory, descriptor = _create_locked(f"unisono-{kind}-{machine}-", parent)
    try:
        yield directory
    finally:
        os.close(descriptor)
        if os.getpid() == creator:  # a forked process may leave the block, too
            shutil.rmtree(directory, ignore_errors=True)  # the zygote may be removing it at the same time


def _create_locked(prefix: str, parent: str) -> tuple[Path, int]:
    """Create a directory of mode 0700; its descriptor holds the lock, where the file system has locks."""
    import fcntl  # Unix only

    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError), _opened_directory(directory) as descriptor:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            directory.stat()  # others may have removed it before it was locked
            return directory, os.dup(descriptor)


@contextmanager
def _opened_directory(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
