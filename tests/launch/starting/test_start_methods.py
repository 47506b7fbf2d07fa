"""Fresh interpreters instead of forks: the same supervisor, the same promises."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import NUM_PROCESSES, PATIENCE_S, RICH, Script, zygote_pid

from unisono.launch.spawn import spawn
from unisono.world import current_world

pytestmark = pytest.mark.slow

SCRIPT = (
    RICH
    + """
spawn(work, nprocs=2, start_method="spawn", grace_s=0.5)
"""
)


def test_a_fresh_interpreter_runs_local_code_and_its_starter_stays_bare():
    offset = 10

    def look():
        parent = Path(f"/proc/{os.getppid()}/maps").read_text()
        return "libtorch" in parent, os.environ.get("OPENBLAS_NUM_THREADS"), "torch._dynamo" in sys.modules

    def work(index, each):
        dist.all_reduce(total := torch.tensor([index]))
        return offset + index, int(total), each, look()

    found = spawn(work, args=("argument",), nprocs=2, start_method="spawn")
    plain = (False, os.environ.get("OPENBLAS_NUM_THREADS"), False)
    assert found == [(10, 1, "argument", plain), (11, 1, "argument", plain)]
    assert zygote_pid("spawn") not in (None, zygote_pid())


def test_deaths_and_errors_are_reported_and_the_group_restarts_in_between():
    def fail(index):
        current_world().comm.barrier()
        if index == 1 and current_world().restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 1:
            raise LookupError("in a fresh interpreter")
        current_world().comm.barrier()

    with pytest.raises(LookupError, match="in a fresh interpreter") as caught:
        spawn(fail, nprocs=2, start_method="spawn", max_restarts=1)
    assert re.match(r"rank 1 of 2, .*restart 1", caught.value.__notes__[0])


FROM_ELSEWHERE = """
import sys

from unisono import spawn
from unisono.engines import Local


def work(index, context):
    import beside, queue
    if context:
        from torch.utils.data import DataLoader
        loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context=context)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    return beside.__file__, queue.__file__


if __name__ == "__main__":
    print(spawn(work, args=(sys.argv[2],), nprocs=2, backend="cpu", **eval(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("how", "context"),
    [
        ("dict(start_method='zygote')", "forkserver"),
        ("dict(start_method='spawn')", "spawn"),
        ("dict(engine=Local(1))", ""),
    ],
)
def test_no_process_imports_from_the_directory_in_which_it_is_started(tmp_path: Path, how: str, context: str) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for directory in (ours, theirs):
        directory.mkdir()
    for name in ("json", "multiprocessing", "readline", "sitecustomize", "torch", "unisono"):
        (theirs / f"{name}.py").write_text("raise SystemExit('the code of another user has run')")
    (ours / "script.py").write_text(FROM_ELSEWHERE)
    for name in ("beside", "queue"):  # where the caller looks first, as before
        (ours / f"{name}.py").write_text(
            "from _queue import Empty, SimpleQueue\nQueue = SimpleQueue\nclass Full(Exception): pass"
        )
    # `-i` makes an interpreter import readline before anything else.
    done = subprocess.run(
        [sys.executable, "-i", str(ours / "script.py"), how, context],
        cwd=theirs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    found = [(str(ours / "beside.py"), str(ours / "queue.py"))]
    assert str(found * 2) in done.stdout, done.stderr


def test_nothing_survives_the_caller(tmp_path, line, ear):
    with Script(SCRIPT, tmp_path) as script:
        ear.hear_all(2)
        assert len(script.living()) == NUM_PROCESSES  # with a reaper in the place of the zygote
        script.kill(signal.SIGKILL)
        assert script.survivors() == [] == script.leftovers()


# Another Unix: none of Linux's own calls.

BARE_UNIX = """
import ctypes, os
for name in ("pidfd_open", "waitid", "sched_setaffinity", "sched_getaffinity"):
    delattr(os, name)
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
"""

ELSEWHERE = """
from unisono.launch.spawn import spawn
def give(index):
    return index
def die(index):
    import os
    import torch, torch.distributed as dist
    dist.all_reduce(total := torch.tensor(index + 1))
    if index == 1 and int(total) == 3:
        os.kill(os.getpid(), 9)
    stand_still()
print(spawn(give, nprocs=1, start_method="spawn"))
try:
    spawn(die, nprocs=2, start_method="spawn")
except Exception as error:
    print(type(error).__name__, error.rank)
"""


@pytest.fixture
def bare_unix(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE_UNIX)
    return f"{tmp_path}:{Path(__file__).parents[2]}"


def test_fresh_interpreters_need_no_call_of_linux(tmp_path, bare_unix):
    with Script("from faults import stand_still\n" + ELSEWHERE, tmp_path, PYTHONPATH=bare_unix) as script:
        code, output, errors = script.end()
        assert (code, output.splitlines()) == (0, ["[0]", "WorkerDiedError 1"]), errors
        assert script.survivors() == [] == script.leftovers()


def test_a_killed_caller_takes_its_workers_along_without_them_too(tmp_path, bare_unix, line, ear):
    source = SCRIPT.replace("    grandchild()\n", "")  # what leaves its session is out of reach there
    with Script(source, tmp_path, PYTHONPATH=bare_unix) as script:
        ear.hear_all(2)
        script.kill(signal.SIGKILL)
        assert script.survivors() == [] == script.leftovers()
