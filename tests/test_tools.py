"""The tools of the tests: leaks and survivors are found, surroundings are the same, hung tests fail alone."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import leak_police
import pytest
from faults import Line, Script

WORLD = "a world, of this thread or of the process"
LEAKS = {
    "a named thread": (
        "gate = threading.Event(); started = threading.Thread(target=gate.wait, name='unisono-reader', daemon=True)\n"
        "    started.start(); held.append(gate)",
        "thread 'unisono-reader'",
    ),
    "a thread that is no daemon": (
        "gate = threading.Event(); threading.Thread(target=gate.wait, args=(60,), name='mine').start()\n"
        "    held.append(gate)",
        "thread 'mine'",
    ),
    "a child": ("held.append(subprocess.Popen(['sleep', '60']))", "child process"),
    "a variable": ("os.environ['LEAKED'] = 'yes'", "environment variable LEAKED='yes'"),
    "a removed variable": ("del os.environ['HOME']", "environment variable HOME=None"),
    "an open file": ("held.append(open(__file__))", "1 open file(s) among"),
    "a process group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "an initialised default process group",
    ),
    "a process's world": ("set_process_world(solo_world())", WORLD),
    "a thread's world": ("held.append(use_world(solo_world())); held[-1].__enter__()", WORLD),
}

HEAD = """
import os, subprocess, threading
import torch.distributed as dist
from unisono.world import set_process_world, solo_world, use_world
held = []
"""


@pytest.fixture
def policed(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest("pytest_plugins = ['leak_police']")
    return pytester


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_the_test_that_leaks(policed: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(leak_police, "PATIENCE_S", 0.2)
    line, told = LEAKS[name]
    release = "def teardown_module():\n    for each in held:\n        getattr(each, 'set', lambda: None)()\n"
    release += "        getattr(each, 'close', lambda: None)()\n        getattr(each, 'wait', lambda: None)()\n"
    policed.makepyfile(HEAD + f"def test_leaks():\n    {line}\ndef test_next_is_clean():\n    pass\n" + release)
    result = policed.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test leaked *{told.replace('[', '[[]')}*"])


def test_what_is_tidied_up_or_just_ending_passes(policed: pytest.Pytester) -> None:
    policed.makepyfile(
        HEAD
        + """
def test_tidy(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKED", "no")
    with use_world(solo_world()), open(tmp_path / "file", "w"):
        pass
    subprocess.run(["true"])
def test_just_ending():
    threading.Timer(0.05, lambda: None).start()
"""
    )
    policed.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly").assert_outcomes(passed=2)


# What makes faults.


LEAVING = """
import subprocess, tempfile
from pathlib import Path
from faults import Line, stand_still
tempfile.mkdtemp(prefix="unisono-1-")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Line(Path("line")).say(child.pid)
stand_still()
"""


@pytest.mark.parametrize("way", ["warm", "file"])
def test_a_script_s_processes_and_directories_are_found_wherever_they_are(tmp_path: Path, way: str) -> None:
    with Line.at(tmp_path / "line").hearing() as ear, Script(LEAVING, tmp_path, way) as script:
        [child] = ear.hear()
        assert {process.pid for process in script.living()} == {script.process.pid, int(child)}
        script.kill(signal.SIGKILL)
        assert script.process.wait(60) == -signal.SIGKILL
        assert [process.pid for process in script.living()] == [int(child)]
        assert len(script.leftovers()) == 1
    assert script.survivors() == []


# Surroundings.


TEST = """
import os, re, subprocess, sys

CHILD = '''
import os, re, resource, signal
status = open("/proc/self/status").read()
print(re.findall(r"^Sig(?:Ign|Blk):.*", status, re.MULTILINE))
print([resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)])
print(oct(os.umask(0)), sorted(os.environ.keys() - {"PYTEST_CURRENT_TEST"}))
'''

def test_children():
    with open("seen", "w") as seen:
        subprocess.run([sys.executable, "-c", CHILD], check=True, stdout=seen)
"""
ODD = {"OMP_NUM_THREADS": "7", "RANK": "3", "WORLD_SIZE": "4", "PYTHONWARNINGS": "error", "COLUMNS": "20", "CI": "true"}


def be_a_background_job() -> None:
    """As a shell without job control, under nohup, in a service with limits of its own, would start it."""
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.umask(0o077)


def seen_by_children(directory: Path, begin: Callable[[], None] | None, environ: dict[str, str]) -> str:
    directory.mkdir()
    (directory / "conftest.py").write_text("import surroundings\nsurroundings.normalize()\n")
    (directory / "test_children.py").write_text(TEST)
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:hypothesispytest"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=directory,
        env={**own, "PYTHONPATH": str(Path(__file__).parent), **environ},
        preexec_fn=begin,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    return (directory / "seen").read_text()


def test_children_see_the_same_surroundings_however_pytest_was_started(tmp_path: Path) -> None:
    plain = seen_by_children(tmp_path / "plain", None, {})
    assert seen_by_children(tmp_path / "odd", be_a_background_job, ODD) == plain
    ignored = int(plain.split("SigIgn:\\t")[1].split("'")[0], 16)
    assert not any(ignored >> (each - 1) & 1 for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP))


# Time limits.


LIMIT_S = 3
CONFTEST = """
pytest_plugins = ["running_again", "time_limit"]

def pytest_configure():
    import time_limit
    time_limit.ENDED_AFTER_S, time_limit._OUTPUT_S = 8.0, 3.0
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

@pytest.mark.timeout(60)
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
    return {"": run.stdout + run.stderr, **dict(zip(found[1::2], found[2::2], strict=True))}


@pytest.mark.slow
@pytest.mark.waits_long
@pytest.mark.timeout(300)
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


ONCE = """
from pathlib import Path
def test_is_fine():
    pass
def test_fails_once():
    mark = Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


@pytest.mark.parametrize(("further", "exit_code"), [("", 0), ("def test_fails():\n    assert False\n", 1)])
@pytest.mark.slow
def test_ci_repeats_a_failed_test_once_and_lists_it_if_it_then_passes(
    tmp_path: Path, further: str, exit_code: int
) -> None:
    (tmp_path / "test_some.py").write_text(ONCE + further)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    again = Path(__file__).parent.parent / ".ci" / "pytest_again.py"
    run = subprocess.run(
        [sys.executable, again, "-n1", "--dist", "worksteal"], cwd=tmp_path, env=own, capture_output=True, text=True
    )
    assert run.returncode == exit_code, run.stdout
    listed = tmp_path / "out" / "flaky.txt"
    if exit_code:
        assert re.search(r"^=+ 1 failed, 1 passed in", run.stdout, re.MULTILINE)
        assert not listed.exists()
    else:
        assert re.search(r"^=+ 1 passed in", run.stdout, re.MULTILINE)
        assert listed.read_text() == "test_some.py::test_fails_once\n"


def old_python() -> str | None:
    """A Python that Unisono does not run on, in the path or among pyenv's."""
    names = [f"python3.{minor}" for minor in (10, 9, 8)]
    known = [
        *(shutil.which(name) for name in names),
        *map(str, Path.home().glob(".pyenv/versions/3.[89].*/bin/python3")),
    ]
    known += map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python3"))
    runs = (each for each in known if each and subprocess.run([each, "-c", ""], capture_output=True).returncode == 0)
    return next(runs, None)


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    if (python := old_python()) is None:
        pytest.skip("no Python older than 3.11 is here")
    shutil.copy(Path(__file__).parent.parent / "Makefile", tmp_path)
    run = subprocess.run(["make", ".venv/bin/python", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.startswith("Unisono needs Python 3.11 or later, and this is 3.")
    assert not (tmp_path / ".venv").exists()
