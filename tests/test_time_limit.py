"""A hung test fails alone, its report shows where everybody stood, and a failed one says how to run it again."""

from __future__ import annotations

from pathlib import Path

import pytest

HEAD = """
import collections, itertools, threading
from unisono import spawn

def hold_a_lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hang_in_c():
    collections.deque(itertools.repeat(None), maxlen=0)  # never comes back, and looks for no signal

def stand_in_a_worker(index):
    print("the worker's last line", flush=True)
    hold_a_lock_twice()
"""


@pytest.fixture
def limited(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest(
        "import time_limit\n"
        "time_limit.ENDED_AFTER_S = 1.0\n"
        "pytest_plugins = ['leak_police', 'running_again', 'time_limit']\n"
    )
    return pytester


def run(limited: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    limited.makepyfile(HEAD + body)
    return limited.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly", "-n1", "--timeout=5", *options)


def test_a_test_that_waits_for_ever_fails_alone(limited):
    result = run(limited, "def test_hangs():\n    hold_a_lock_twice()\ndef test_next():\n    pass\n")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the test ran for more than 5 s*", "*in hold_a_lock_twice*"])


def test_a_test_that_hangs_in_c_fails_alone(limited):
    result = run(limited, "def test_hangs():\n    hang_in_c()\ndef test_next():\n    pass\n")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running*test_hangs*", "*stacks of all threads*", "*in hang_in_c*"])


def test_the_report_of_a_hung_worker_has_its_last_lines_and_its_stack(limited):
    result = run(limited, "def test_hangs():\n    spawn(stand_in_a_worker, nprocs=1)\ndef test_next():\n    pass\n")
    result.assert_outcomes(passed=1, failed=1)
    assert "the worker's last line" in result.stdout.str()
    assert "in stand_in_a_worker" in result.stdout.str()


def test_a_failed_test_of_processes_shows_their_output_and_how_to_run_it_again(limited):
    result = run(
        limited,
        "def say(index):\n    print('said by', index)\n"
        "def test_fails():\n    spawn(say, nprocs=2)\n    raise AssertionError\n",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(["*said by 0*", "*said by 1*", "*-m pytest -n0 *::test_fails"])
