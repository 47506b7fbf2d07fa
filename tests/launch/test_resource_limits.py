"""What a machine has no more of is named: the limit, and how to get more."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from faults import Script

from unisono.errors import WorkerDiedError
from unisono.launch.messages import describe_limit
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


def test_no_more_open_files_are_told_with_a_way_out_and_the_next_run_is_well(tmp_path):
    with Script(FILES, tmp_path) as script:
        code, output, errors = script.end()
    assert code == 0, errors
    said, result = output.splitlines()
    assert said.startswith("24 a process that starts workers has four files open for each; `ulimit")
    assert result == "[0, 1]"


def failing(code, *where):
    return OSError(code, os.strerror(code), *where)


def test_a_limit_behind_an_error_or_its_cause_is_described():
    error = RuntimeError("the loader failed")
    error.__cause__ = RuntimeError("can't start new thread")
    for each in (failing(errno.EAGAIN), error):
        assert describe_limit(each).startswith("the system does not start any more processes or threads (")
    assert "docker run --shm-size" in describe_limit(failing(errno.ENOSPC))
    for each in (ValueError("Too many open files"), failing(errno.ENOENT), RuntimeError("shapes"), KeyError(24)):
        assert describe_limit(each) == ""


def test_who_is_killed_by_sigbus_is_told_about_memory():
    with pytest.raises(WorkerDiedError, match=r"killed by SIGBUS .*mapped memory could not be allocated"):
        spawn(lambda index: os.kill(os.getpid(), signal.SIGBUS), nprocs=2)
