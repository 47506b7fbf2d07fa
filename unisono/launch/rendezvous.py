"""Where the workers of one machine find one another: a file in a private directory.

No port is opened and no name is looked up, so any number of groups start side by side, and a broken resolver delays
none of them. The directory of a group that a worker starts lies in that of the worker's own group and goes with it: who
kills the outer workers kills the inner zygote too, before it can tidy up.
"""

from __future__ import annotations

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
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.worker import Job

_NAME = re.compile(r"unisono-(\d+)-")  # of a directory, with the depth of its group
_MAX_DEPTH = 3  # groups in groups; each level multiplies the workers


@dataclass(frozen=True)
class Rendezvous:
    """The files of one group: the store that its process group meets in, and the job that its workers read."""

    directory: Path

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def job(self) -> Path:
        return self.directory / "job"

    def write_job(self, job: Job) -> None:
        self.job.write_bytes(pickle.dumps(job))


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
    directory = tempfile.mkdtemp(prefix=f"unisono-{depth + 1}-", dir=outer if os.path.isdir(outer) else None)
    try:
        yield Rendezvous(Path(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
