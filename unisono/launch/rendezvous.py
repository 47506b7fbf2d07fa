"""The private directory of a group: where its workers meet, and where the files they make for one another are.

    <TMPDIR>/unisono-1-ab12cd34/     0700; the number is how deep the group is in groups
        store                        the file in which the process group meets
        job                          what the workers are to do, with the caller's environment: 0600
        multiprocessing/             sockets of loader workers
        stacks-0, samples, ...       of the workers and their monitor

No port is opened and no name is looked up, so any number of groups can start concurrently, and a broken resolver delays
none of them. The directory of a group that a worker starts is inside that of the worker's own group and is removed with
it: killing the outer workers also kills the inner zygote, before it can clean up.

The caller removes it, or else the zygote; if both are killed at the same moment, it stays.
"""

from __future__ import annotations

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
    directory = tempfile.mkdtemp(prefix=f"unisono-{depth + 1}-", dir=parent)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the zygote may be removing it at the same time
