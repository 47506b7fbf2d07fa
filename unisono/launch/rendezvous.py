"""The private directory of a group: where its workers meet, and where all lies that they make for one another.

    <TMPDIR>/unisono-1-ab12cd34/     0700; the number is how deep the group is in groups
        owner                        locked as long as the calling process lives
        store                        the file in which the process group meets
        job                          what the workers are to do, with the caller's environment: 0600
        multiprocessing/             sockets of loader workers
        stacks-0, samples, ...       of the workers and their monitor

No port is opened and no name is looked up, so any number of groups start side by side, and a broken resolver delays
none of them. The directory of a group that a worker starts lies in that of the worker's own group and goes with it: who
kills the outer workers kills the inner zygote too, before it can tidy up.

The caller removes it, else the zygote. What is left when both are killed at one moment, the first group of the next
process removes (`sweep`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.worker import Job

_NAME = re.compile(r"unisono-(\d+)-")  # of a directory, with the depth of its group
_SHARING = "torch-shm-dir-"  # of the process that torch has for tensors in files, which is killed with its worker
_MAX_DEPTH = 3  # groups in groups; each level multiplies the workers
_OLD_S = 60.0
_swept: set[str] = set()


@dataclass(frozen=True)
class Rendezvous:
    """The files of one group."""

    directory: Path

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def job(self) -> Path:
        return self.directory / "job"

    def write_job(self, job: Job) -> None:
        descriptor = os.open(self.job, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            pickle.dump(job, file)


@contextmanager
def rendezvous() -> Iterator[Rendezvous]:
    """A rendezvous for one group, gone when the block ends. (The zygote removes it when the caller is killed.)"""
    outer = os.environ.get(OUTER_DIRECTORY, "")
    found = _NAME.match(Path(outer).name)
    depth = int(found[1]) if found else 0
    if depth >= _MAX_DEPTH:
        raise UnisonoError(
            f"spawn is called in a worker of a worker, {_MAX_DEPTH} deep; where that is not meant, a module that the "
            'workers import calls spawn at its top level: put that call under `if __name__ == "__main__":`'
        )
    parent = outer if os.path.isdir(outer) else tempfile.gettempdir()
    if parent not in _swept:
        _swept.add(parent)
        sweep(Path(parent))
    directory = tempfile.mkdtemp(prefix=f"unisono-{depth + 1}-", dir=parent)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        _own(Path(directory), stack)
        yield Rendezvous(Path(directory))


def sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left in that directory; never raises."""
    with contextlib.suppress(OSError):
        for path in [*parent.glob("unisono-*-*"), *parent.glob(f"{_SHARING}*")]:
            with contextlib.suppress(OSError):
                is_ours = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
                if is_ours and (_is_deserted(path) if _NAME.match(path.name) else _is_deaf(path)):
                    shutil.rmtree(path, ignore_errors=True)


def _own(directory: Path, stack: contextlib.ExitStack) -> None:
    """Let others see that the owner of a directory lives, until the stack ends."""
    import fcntl  # which only a Unix has

    fresh = directory / "owner.new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # no locks in this file system: nobody will sweep here
        return
    os.rename(fresh, directory / "owner")  # locked from its first moment


def _is_deserted(directory: Path) -> bool:
    """Whether the owner of a group's directory is dead; where nobody has said that it is owned, that is not known."""
    import fcntl

    with (directory / "owner").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_deaf(directory: Path) -> bool:
    """Whether nobody listens at the socket in it, and it is not just being made."""
    if time.time() - directory.stat().st_mtime < _OLD_S:
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(directory / "manager.sock"))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False
