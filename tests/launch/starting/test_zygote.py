"""The process that workers are forked from: its death, its start under bad stars, and forks that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import warm_scripts
from faults import SOON_S, Script, grandchild, in_child, stand_still, survivors, until, zygote_pid

from unisono.errors import ClosedError, UnisonoError, WorkerDiedError
from unisono.launch.spawn import spawn
from unisono.launch.starting import zygote_client
from unisono.launch.starting.warm_at_import import warm_early
from unisono.launch.starting.zygote_client import warm
from unisono.world import current_world


@pytest.fixture
def new_zygote():
    """The next spawn starts a zygote, and the test's own does not serve the tests after it."""
    zygote_client.close_all()
    yield
    zygote_client.close_all()


@pytest.fixture
def running(line, ear):
    """A running group, with loader workers and an escaped grandchild: its context, and all pids."""

    def work(index):
        loader = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
        next(iter(loader))
        escaped = grandchild()
        line.say(os.getpid(), *(child.pid for child in psutil.Process().children()))
        current_world().comm.barrier()
        assert escaped
        stand_still()

    context = spawn(work, nprocs=2, join=False)
    yield context, [int(pid) for words in ear.hear_all(2) for pid in words]
    context.stop()


@pytest.mark.slow
def test_a_killed_zygote_is_an_error_and_the_next_spawn_works(running):
    context, pids = running
    zygote = zygote_pid()
    escaped = [pid for pid in pids if os.getsid(pid) == pid and pid not in context.pids()]
    os.kill(zygote, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="ended because the process that it was forked from died"):
        context.join()
    assert time.monotonic() - began < SOON_S
    assert survivors([pid for pid in pids if pid not in escaped]) == []
    for pid in escaped:  # what left its session is out of reach when its reaper was killed
        os.kill(pid, signal.SIGKILL)
    assert spawn(lambda index: index, nprocs=2) == [0, 1]
    assert zygote_pid() not in (None, zygote)


@pytest.mark.slow
def test_signals_blocked_or_ignored_by_the_caller_still_reach_the_workers(new_zygote, line, ear):
    blocked = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:

        def work(index):
            line.say(index)
            stand_still()

        assert spawn(lambda index: index, nprocs=2) == [0, 1]
        context = spawn(work, nprocs=2, join=False, grace_s=60.0)
        ear.hear_all(2)
        began = time.monotonic()
        context.stop()
        with pytest.raises(ClosedError):
            context.join()
        assert time.monotonic() - began < SOON_S
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGTERM, handler)


SITE = """
import os
if os.path.exists({gate!r}):
    os._exit(7)
fork = os.fork
def fork_or_fail():
    if os.path.exists({count!r}):
        left = int(open({count!r}).read())
        if left == 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        open({count!r}, "w").write(str(left - 1))
    return fork()
os.fork = fork_or_fail
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch, new_zygote):
    """Files that make the zygote fail: one at its start, one at the fork whose number it holds."""
    gate, count = tmp_path / "fails-at-start", tmp_path / "forks-left"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(gate=str(gate), count=str(count)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return gate, count


@pytest.mark.slow
def test_a_start_or_a_fork_that_fails_is_an_error_and_costs_no_descriptor(faulty):
    gate, count = faulty
    gate.touch()
    with pytest.raises(UnisonoError, match="ended before it forked one"):
        spawn(lambda index: index, nprocs=2)
    gate.unlink()
    assert spawn(lambda index: index, nprocs=2) == [0, 1]
    zygote = psutil.Process(zygote_pid())
    fds = zygote.num_fds()
    for forks in (0, 1):
        count.write_text(str(forks))
        with pytest.raises(WorkerDiedError, match=r"could not be started \(\[Errno 11\] Resource temporarily"):
            spawn(stand_still_at, nprocs=2)
    count.unlink()
    assert spawn(lambda index: index, nprocs=2) == [0, 1]
    until(lambda: zygote.num_fds() == fds)  # the thread that it has when it is idle for the first time opens files
    assert zygote.children() == []


def stand_still_at(index):
    stand_still()


SLOW_TO_JOIN = """
import os
import torch.distributed as dist
join = dist.init_process_group
def join_and_stand(*args, rank, **kwargs):
    join(*args, rank=rank, **kwargs)
    if rank == 1:
        os.read(os.open({gate!r}, os.O_RDONLY), 1)
dist.init_process_group = join_and_stand
"""


@pytest.mark.slow
def test_no_fn_begins_before_all_ranks_have_joined(tmp_path, monkeypatch, new_zygote, line, ear, gate, let_pass):
    """Or one that is short would leave while a slow peer still connects to it, which then could not join."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_JOIN.format(gate=str(gate.path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    context = spawn(line.say, nprocs=2, join=False)
    context.pids()
    with pytest.raises(AssertionError, match="nothing was said"):
        ear.hear(0.5)
    let_pass(1)
    context.join()
    assert ear.hear_all(2) == [["0"], ["1"]]


CLOSED = """
import os, sys
inner = '''
import os, sys
assert sys.stdout is None and sys.stderr is None
from unisono.launch.spawn import spawn
def work(index):
    print("into the void", flush=True)
    return index
with open("found", "w") as file:
    file.write(repr(spawn(work, nprocs=2)))
'''
os.closerange(0, 3)
os.execv(sys.executable, [sys.executable, "-c", inner])
"""


@pytest.mark.slow
def test_a_caller_whose_standard_streams_are_closed_can_spawn(tmp_path):
    with Script(CLOSED, tmp_path, "file") as script:
        assert script.end() == (0, "", "")
        assert (tmp_path / "found").read_text() == "[0, 1]"
        assert script.survivors() == []


@pytest.mark.slow
def test_forks_of_the_caller_wait_for_a_group_that_is_just_being_opened(new_zygote, monkeypatch):
    """A child that was forked with the lock held, or with a socket that nobody closes, would hang, or keep workers."""
    forking, forked = threading.Event(), threading.Event()

    def fork():
        forking.set()
        codes.append(in_child(lambda: in_child(int)))  # to fork takes the lock
        forked.set()

    def start_while_another_thread_forks(*arguments, **options):
        thread.start()
        forking.wait()
        assert not forked.wait(0.1)
        return start(*arguments, **options)

    start, codes = zygote_client.Popen, []
    thread = threading.Thread(target=fork)
    monkeypatch.setattr(zygote_client, "Popen", start_while_another_thread_forks)
    assert spawn(lambda index: index, nprocs=2) == [0, 1]
    thread.join()
    assert codes == [0]


@pytest.fixture
def preloading(monkeypatch, new_zygote):
    """What tests ask zygotes to import is asked of no zygote after the test."""
    monkeypatch.setattr(zygote_client, "_preloaded", [])


@pytest.mark.slow
def test_workers_find_what_was_preloaded_also_after_the_zygote_was_killed(preloading, tmp_path, monkeypatch):
    (tmp_path / "preloaded_one.py").write_text("import os\npid = os.getpid()\n")
    (tmp_path / "preloaded_two.py").write_text("import os\npid = os.getpid()\n")
    warm(preload=["json"])
    monkeypatch.syspath_prepend(tmp_path)  # which the zygote that runs has not seen
    warm(preload=["preloaded_one"])
    warm(preload=("preloaded_one", "preloaded_two"))

    def look(index):
        return [sys.modules[name].pid for name in ("preloaded_one", "preloaded_two")]

    first = zygote_pid()
    assert spawn(look, nprocs=2) == [[first] * 2] * 2
    os.kill(first, signal.SIGKILL)
    until(lambda: zygote_pid() is None)
    warm()
    assert spawn(look, nprocs=2) == [[zygote_pid()] * 2] * 2
    assert zygote_pid() != first


@pytest.mark.slow
def test_a_preload_that_fails_or_starts_threads_is_reported_but_not_fatal(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no licence')\n")
    (tmp_path / "waits.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "script.py").write_text(
        "import unisono\nunisono.warm(preload=['fails', 'waits'])\nprint(unisono.spawn(abs, nprocs=2))\n"
    )
    code, output, errors = warm_scripts.complete(tmp_path / "script.py")
    assert (code, output) == (0, "[0, 1]\n"), errors
    assert "preload: the import of fails failed" in errors
    assert "SystemExit: no licence" in errors
    assert "preload: the import of waits started threads" in errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preload": "json"}, TypeError, r"a list of module names is expected: \['json'\]"),
        ({"preload": ["json"], "start_method": "spawn"}, ValueError, 'use start_method="zygote"'),
    ],
)
def test_what_cannot_be_preloaded_is_an_error_at_once(preloading, options, error, message):
    with pytest.raises(error, match=message):
        warm(**options)
    assert zygote_pid() is None


# Started before anybody asks for it: by default in notebooks and by `unisono run`, else not.


LOOK = """
import sys, types
{before}
import unisono
started = sys.modules.get("unisono.launch.starting.zygote_client")
print(started is not None and bool(started.clients), "torch" in sys.modules)
"""
NOTEBOOK = "sys.modules['ipykernel'] = types.ModuleType('ipykernel')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environ", "is_started"),
    [
        ("", {}, False),
        (NOTEBOOK, {}, True),
        (NOTEBOOK, {"RANK": "0", "WORLD_SIZE": "2"}, False),
        (NOTEBOOK, {"UNISONO_RENDEZVOUS": "/nowhere"}, False),
    ],
)
def test_an_import_starts_it_where_that_was_asked_for(before, environ, is_started):
    source = LOOK.format(before=before)
    done = subprocess.run([sys.executable, "-c", source], env=os.environ | environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{is_started} False\n", "")


def test_one_that_cannot_be_started_is_left_to_the_first_spawn(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more processes")

    zygote_client.close_all()
    monkeypatch.setattr(zygote_client, "Popen", refuse)
    warm_early()
    assert zygote_pid() is None
