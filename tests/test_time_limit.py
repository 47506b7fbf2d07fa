"""A hung test fails alone, its report shows where everybody stood, and a failed one says how to run it again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 3
CONFTEST = """
pytest_plugins = ["running_again", "time_limit"]

def pytest_configure():
    import time_limit
    time_limit.ENDED_AFTER_S = 8.0
"""
HANGING = """
import ctypes, threading
import pytest
from unisono import spawn

def hold_a_lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def stand_in_a_worker(index):
    print("the last line of", index, flush=True)
    hold_a_lock_twice()

def say(index):
    print("said by", index)

def test_waits_for_ever():
    hold_a_lock_twice()

def test_hangs_in_c():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # continues waiting after a signal

@pytest.mark.timeout(20)
def test_fails_among_processes():
    spawn(say, nprocs=2)
    raise AssertionError

@pytest.mark.timeout(10)
def test_hangs_in_a_worker():
    spawn(stand_in_a_worker, nprocs=2)

@pytest.fixture
def hanging_teardown():
    yield
    hold_a_lock_twice()

def test_fails_and_hangs(hanging_teardown):
    raise AssertionError

def test_is_fine():
    pass
"""


def reports_of(directory: Path) -> dict[str, str]:
    """What a run of these tests says of each that fails; and of the whole, under ""."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_hanging.py").write_text(HANGING)
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-n1", f"--timeout={LIMIT_S}"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ = {**own, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(directory)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=directory, env=environ, capture_output=True, text=True
    )
    found = re.split(r"^_+ ((?:ERROR at teardown of )?test_\w+)(?:\.py)? _+$", run.stdout, flags=re.MULTILINE)
    return {"": run.stdout, **dict(zip(found[1::2], found[2::2], strict=True))}


@pytest.mark.slow
@pytest.mark.waits_long
def test_hung_tests_fail_alone_and_report_where_each_thread_stood(tmp_path: Path) -> None:
    reports = reports_of(tmp_path)
    assert re.search(r"5 failed, 1 passed.*, 1 error", reports[""])
    hung = reports["test_waits_for_ever"]
    assert f"the test ran for more than {LIMIT_S} s" in hung
    assert re.search(r"Current thread .*\n(.*\n)*.* in hold_a_lock_twice\n", hung)
    assert "in test_hangs_in_c\n" in reports[""], "the stacks of a test whose process had to be ended"
    assert "crashed while running 'test_hanging.py::test_hangs_in_c'" in reports[""]
    hung_worker = reports["test_hangs_in_a_worker"]
    for rank in range(2):
        assert f"the last line of {rank}" in hung_worker
        assert re.search(rf"\[rank {rank}\] .* in stand_in_a_worker\n", hung_worker)
    assert f"the test ran for more than {LIMIT_S} s" in reports["ERROR at teardown of test_fails_and_hangs"]
    failed = reports["test_fails_among_processes"]
    assert all(f"said by {rank}" in failed for rank in range(2))
    assert re.search(r"-m pytest -n0 \S*test_hanging.py::test_fails_among_processes\n", failed)
