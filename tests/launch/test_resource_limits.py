"""What a machine has no more of is named: the limit, and how to get more."""

from __future__ import annotations

import errno
import os
import resource
import signal

import pytest
from faults import Script

from unisono.errors import WorkerDiedError
from unisono.launch import resource_limits
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
        "24 a process may have 12 files open (ulimit -n), and one that starts workers takes four for"
    )
    assert result == "[0, 1]"


def failing(code):
    return OSError(code, os.strerror(code))


def groups(root, limit, used):
    """The files of a system whose control group limits processes."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/threads-max").write_text("1000\n")
    for directory, text in [("job", limit), ("", "max")]:
        (root / "sys/fs/cgroup" / directory).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / directory / "pids.max").write_text(text)
        (root / "sys/fs/cgroup" / directory / "pids.current").write_text(used)


def test_the_nearest_limit_on_processes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY,) * 2)
    groups(tmp_path, "20", "19")
    text = (
        "the control group allows 20 processes and threads, of which 19 are in use; a larger limit (docker run --pids-"
    )
    assert describe_limit(failing(errno.EAGAIN), tmp_path).startswith(text)
    assert describe_limit(RuntimeError("can't start new thread"), tmp_path).startswith(text)
    (tmp_path / "sys/fs/cgroup/job/pids.max").write_text("max")
    assert describe_limit(failing(errno.EAGAIN), tmp_path).startswith("the machine allows 1000 processes and threads;")
    monkeypatch.setattr(resource, "getrlimit", lambda number: (50, 50))
    assert describe_limit(failing(errno.EAGAIN), tmp_path).startswith("this user may have 50 processes and threads")


class Facts:
    def __init__(self, free, is_read_only=False):
        self.f_bavail, self.f_blocks, self.f_frsize = free >> 12, 16, 4096
        self.f_files, self.f_favail = 10, 5
        self.f_flag = os.ST_RDONLY if is_read_only else 0


def test_the_place_that_is_full_is_named_and_no_other(monkeypatch):
    places = {"/dev/shm": Facts(0), "/tmp/own": Facts(1 << 30)}
    monkeypatch.setattr("tempfile.tempdir", "/tmp/own")
    monkeypatch.setattr(os, "statvfs", lambda path: places[os.fspath(path)])
    assert describe_limit(failing(errno.ENOSPC)).startswith(
        "/dev/shm is full, with 0 of 64 KiB free; loader workers need it (docker run --shm-size"
    )
    places["/dev/shm"], places["/tmp/own"] = Facts(1 << 30), Facts(0, is_read_only=True)
    assert describe_limit(failing(errno.EROFS)) == "/tmp/own is read-only; TMPDIR can name a directory with room"
    places["/data"] = Facts(4096)
    assert describe_limit(OSError(errno.ENOSPC, "No space", "/data/file")).startswith("/data is full, with 4 of 64")


def test_other_errors_are_left_as_they_are():
    for error in (
        ValueError("Too many open files"),
        failing(errno.ENOENT),
        RuntimeError("shapes differ"),
        KeyError(24),
    ):
        assert describe_limit(error) == ""


def test_the_cause_counts(monkeypatch):
    error = RuntimeError("the loader failed")
    error.__cause__ = failing(errno.EMFILE)
    assert "files open (ulimit -n)" in describe_limit(error)


def test_an_interface_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError) as caught:
        spawn(lambda index: index, nprocs=2, process_group="gloo")
    assert any(
        "meet over its interface 'nowhere0', which does not exist or is down" in note for note in caught.value.__notes__
    )


def test_who_is_killed_by_sigbus_is_told_about_memory(monkeypatch):
    monkeypatch.setattr(resource_limits, "_fullness", lambda place: f"{place} is full")
    with pytest.raises(
        WorkerDiedError, match=r"killed by SIGBUS .*mapped memory could not be allocated: /dev/shm is full"
    ):
        spawn(lambda index: os.kill(os.getpid(), signal.SIGBUS), nprocs=2)
