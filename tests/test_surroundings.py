"""What the children of a test are given does not depend on how pytest was started."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_children_see_the_same_signals_limits_and_environment_however_pytest_was_started(tmp_path: Path) -> None:
    plain = seen_by_children(tmp_path / "plain", None, {})
    assert seen_by_children(tmp_path / "odd", be_a_background_job, ODD) == plain
    ignored = int(plain.split("SigIgn:\\t")[1].split("'")[0], 16)
    assert not any(ignored >> (each - 1) & 1 for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP))
