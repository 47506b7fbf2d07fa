"""The private directory of a group: where its workers meet, and where the files they make for one another are.

    <TMPDIR>/unisono-1-ab12cd34/     0700; the number is how deep the group is in groups
        owner                        locked while the calling process is alive
        store                        the file in which the process group meets
        job                          what the workers are to do, with the caller's environment: 0600
        multiprocessing/             sockets of loader workers
        stacks-0, samples, ...       of the workers and their monitor

No port is opened and no name is looked up, so any number of groups can start concurrently, and a broken resolver delays
none of them. The directory of a group that a worker starts is inside that of the worker's own group and is removed with
it: killing the outer workers also kills the inner zygote, before it can clean up.

The caller removes it, or else the zygote. If both are killed at the same moment, the first group of the next process
removes what is left (`sweep`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch.job import Job
from unisono.launch.starting.marks import OUTER_DIRECTORY

_NAME = re.compile(r"unisono-(\d+)-")  # of a directory, with the depth of its group
_MAX_DEPTH = 3  # nested groups; each level multiplies the workers
_swept: set[str] = set()


@dataclass(frozen=True)
class Rendezvous:
    """The files of one group."""

    directory: Path

    @property
    def job(self) -> Path:
        return self.directory / "job"

    def write_job(self, job: Job) -> None:
        descriptor = os.open(self.job, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            pickle.dump(job, file)


@contextmanager
def rendezvous() -> Iterator[Rendezvous]:
    """Create a rendezvous for one group, and remove it after the block. (The zygote removes it if the caller is
    killed.)"""
    outer = os.environ.get(OUTER_DIRECTORY, "")
    found = _NAME.match(Path(outer).name)
    depth = int(found[1]) if found else 0
    if depth >= _MAX_DEPTH:
        raise UnisonoError(
            f"spawn is called in a worker of a worker, {_MAX_DEPTH} deep; if that is not intended, a module that the "
            'workers import calls spawn at its top level: put that call under `if __name__ == "__main__":`'
        )
    parent = outer if os.path.isdir(outer) else tempfile.gettempdir()
    if parent not in _swept:
        _swept.add(parent)
        sweep(Path(parent))
    directory = tempfile.mkdtemp(prefix=f"unisono-{depth + 1}-", dir=parent)
    with contextlib.ExitStack() as stack:
        # Errors are ignored: the zygote, or a sweep, may be removing it at the same time.
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        _own(Path(directory), stack)
        yield Rendezvous(Path(directory))


def sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left in that directory; never raises."""
    with contextlib.suppress(OSError):
        for path in parent.glob("unisono-*-*"):
            with contextlib.suppress(OSError):
                is_ours = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
                if is_ours and _NAME.match(path.name) and _is_deserted(path):
                    shutil.rmtree(path, ignore_errors=True)


def _own(directory: Path, stack: contextlib.ExitStack) -> None:
    """Lock a directory until the stack ends, so that others see that its owner is alive."""
    import fcntl  # Unix only

    fresh = directory / "owner.new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # the file system has no locks; then nothing is swept here either
        return
    os.rename(fresh, directory / "owner")  # locked before it is visible


def _is_deserted(directory: Path) -> bool:
    """Whether the owner of a group's directory is dead; OSError if the directory has no owner file (yet)."""
    import fcntl

    # The kernel releases a lock when its holder dies, however it dies; a recorded pid could be reused.
    with (directory / "owner").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
