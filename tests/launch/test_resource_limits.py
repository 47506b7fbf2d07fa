"""What a machine has no more of is named: the limit, and how to get more."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from faults import Script

from unisono.errors import WorkerDiedError
from unisono.launch.resource_limits import describe_limit
from unisono.launch.spawn import spawn

FILES = """
import resource
from unisono.launch.spawn import spawn

spawn(lambda index: index, nprocs=2)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
try:
    spawn(lambda index: index, nprocs=2)
except OSError as error:
    print(error.errno, *error.__notes__)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
print(spawn(lambda index: index, nprocs=2))
"""


def test_no_more_open_files_are_told_with_their_limit_and_the_next_run_is_well(tmp_path):
    with Script(FILES, tmp_path) as script:
        code, output, errors = script.end()
    assert code == 0, errors
    said, result = output.splitlines()
    assert said.startswith(
        "24 a process may have 12 files open, and one that starts workers takes four for each; `ulimit"
    )
    assert result == "[0, 1]"


def failing(code, *where):
    return OSError(code, os.strerror(code), *where)


def test_a_limit_behind_an_error_or_its_cause_is_described():
    error = RuntimeError("the loader failed")
    error.__cause__ = RuntimeError("can't start new thread")
    for each in (failing(errno.EAGAIN), error):
        assert describe_limit(each).startswith("the system does not start any more processes or threads (")
    for each in (ValueError("Too many open files"), failing(errno.ENOENT), RuntimeError("shapes"), KeyError(24)):
        assert describe_limit(each) == ""


class Facts:
    def __init__(self, free):
        self.f_bavail, self.f_blocks, self.f_frsize = free >> 12, 16, 4096


def test_the_place_that_is_full_is_named_and_no_other(monkeypatch):
    places = {"/dev/shm": Facts(0), "/tmp/own": Facts(1 << 30), "/data": Facts(4096)}
    monkeypatch.setattr("tempfile.tempdir", "/tmp/own")
    monkeypatch.setattr(os, "statvfs", lambda path: places[os.fspath(path)])
    assert describe_limit(failing(errno.ENOSPC)).startswith(
        "/dev/shm is full, with 0 of 64 KiB free; loader workers need it (docker run --shm-size"
    )
    assert describe_limit(failing(errno.ENOSPC, "/data/file")).startswith("/data is full, with 4 of 64")
    places["/dev/shm"], places["/tmp/own"] = Facts(1 << 30), Facts(0)
    assert describe_limit(failing(errno.ENOSPC)).endswith("KiB free; TMPDIR can name a directory with room")


def test_who_is_killed_by_sigbus_is_told_about_memory():
    with pytest.raises(WorkerDiedError, match=r"killed by SIGBUS .*mapped memory could not be allocated"):
        spawn(lambda index: os.kill(os.getpid(), signal.SIGBUS), nprocs=2)
