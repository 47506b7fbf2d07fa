"""The private directory of a group: where its workers meet, and where the files they make for one another are.

    <TMPDIR>/unisono-1-ab12cd34/     0700; the number is how deep the group is in groups
        store                        the file in which the process group meets
        job                          what the workers are to do, with the caller's environment: 0600
        multiprocessing/             sockets of loader workers
        stacks-0, samples, ...       of the workers and their monitor

The calling process holds a lock on the directory. No port is opened and no name is looked up, so any number of groups
can start concurrently, and a broken resolver delays none of them. The directory of a group that a worker starts is
inside that of the worker's own group and is removed with it: killing the outer workers also kills the inner zygote,
before it can clean up.

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
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch.job import Job
from unisono.launch.starting.marks import OUTER_DIRECTORY

_NAME = re.compile(r"unisono-(\d+)-")  # of a directory, with the depth of its group
_MAX_DEPTH = 3  # nested groups; each level multiplies the workers
_swept: set[str] = set()


def write_job(path: Path, job: Job) -> None:
    """Write what the workers read in their first lines; only their user may read it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        pickle.dump(job, file)


@contextmanager
def rendezvous() -> Iterator[Path]:
    """Create the directory of one group, and remove it after the block. (The zygote removes it if the caller is
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
        with contextlib.suppress(OSError):  # without locks, nothing is swept here either
            _lock(Path(directory), stack, waits=True)  # for a sweep that has just looked at it
        yield Path(directory)


def sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left in that directory; never raises."""
    for path in parent.glob("unisono-*-*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if path.lstat().st_uid != os.geteuid():  # root could open, and remove, those of others
                continue
            _lock(path, stack)
            # The kernel releases a lock when its holder dies, however it dies; a job is written by who holds one.
            if _NAME.match(path.name) and (path / "job").exists():
                shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path, stack: contextlib.ExitStack, waits: bool = False) -> None:
    """Lock a directory until the stack ends; OSError if another process has, or the file system has no locks."""
    import fcntl  # Unix only

    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
