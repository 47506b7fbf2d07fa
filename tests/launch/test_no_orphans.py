"""Whatever signal hits whichever process: nothing of a run outlives it, and its directory goes too."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from faults import RICH, SOON_S, Script, grandchild, stand_still, survivors

from unisono.errors import WorkerDiedError
from unisono.launch.job import private_directory
from unisono.launch.spawn import spawn
from unisono.world import current_world

GRACE_S = 0.5


def run(source, directory):
    return Script(RICH + source, directory)


def test_no_worker_survives_when_the_caller_and_the_zygote_are_killed(tmp_path, ear):
    source = """
def stand(index):
    line.say("running", os.getpid(), os.getppid())
    dist.all_reduce(torch.ones(1)) if index == 0 else stand_still()
spawn(stand, nprocs=2)
"""
    with run(source, tmp_path) as script:
        told = [ear.hear(), ear.hear()]
        workers, [zygote] = [int(words[1]) for words in told], {int(words[2]) for words in told}
        script.kill(signal.SIGSTOP)  # it cannot come to the help of its workers
        os.kill(zygote, signal.SIGKILL)
        assert survivors(workers) == []
        script.kill(signal.SIGKILL)
        assert script.survivors() == []


OPEN_TO_ALL = """
import os
os.umask(0)
import stat, tempfile
from pathlib import Path
import torch, unisono
from torch.utils.data import DataLoader

def look(index):
    loader = unisono.DeviceLoader(DataLoader(torch.ones(64, 64), num_workers=1))
    held = [batch for batch, _ in zip(loader, range(4))]
    unisono.all_reduce(torch.ones(1 << 20))
    mapped = {line.split()[-1] for line in open("/proc/self/maps")}  # what the loader worker has sent, too
    places = [each for each in map(Path, mapped) if each.is_relative_to("/dev/shm") and each.exists()]
    temporary = tempfile.gettempdir()
    unisono.barrier()
    return [(str(each), stat.filemode(each.stat().st_mode)) for each in [*Path(temporary).iterdir(), *places]], [
        each.name for each in Path(temporary).rglob("*")
    ]

if __name__ == "__main__":
    for each in unisono.spawn(look, nprocs=2, backend="cpu"):
        print(each)
"""


@pytest.mark.slow
def test_no_other_user_can_open_what_a_run_makes_whatever_the_umask(tmp_path):
    with Script(OPEN_TO_ALL, tmp_path, "file") as script:
        code, output, errors = script.end()
    assert code == 0, errors
    for line in output.splitlines():
        reached, within = ast.literal_eval(line)
        assert {"store", "multiprocessing"} <= set(within)
        assert any(name.startswith("unisono-1-") for name in within)
        assert {mode[4:] for _, mode in reached} == {"------"}, reached


def test_the_next_run_removes_a_dead_runs_files_but_not_a_living_runs(tmp_path, ear, gate, let_pass, monkeypatch):
    source = """
def stand(index):
    line.say("running", os.getppid(), os.environ["TMPDIR"])
    stand_still()
spawn(stand, nprocs=2)
"""
    with run(source, tmp_path) as script:
        _, [_, zygote, temporary] = ear.hear(), ear.hear()
        script.kill(signal.SIGSTOP)
        os.kill(int(zygote), signal.SIGKILL)
        script.kill(signal.SIGKILL)
        assert script.survivors() == []
        [left] = script.leftovers()
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        living = spawn(lambda index: gate.wait(), nprocs=2, join=False)
        living.pids()
        [kept] = script.leftovers()
        assert kept != left
        assert spawn(lambda index: index, nprocs=2) == [0, 1]
        assert script.leftovers() == [kept]
        let_pass(2)
        living.join()


STANDS_AT_ITS_START = """
import os, re, select, sys
if os.path.exists("stands") and (zygote := re.search(r"zygote import main; main.*?([0-9]+)", sys.orig_argv[-1])):
    select.select([int(zygote[1])], [], [])  # the caller has requested a group
    open("line", "w").write("starting\\n")
    open("gate").read(1)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_a_caller_ended_while_a_new_zygote_starts(tmp_path, ear, gate, let_pass, signum):
    (tmp_path / "sitecustomize.py").write_text(STANDS_AT_ITS_START)
    path = f"{tmp_path}{os.pathsep}{os.path.dirname(__file__)}/.."
    source = RICH + "spawn(work, nprocs=2, max_restarts=1)"
    with Script(source, tmp_path, PYTHONPATH=path) as script:
        zygote, _ = (int(ear.hear()[3]) for _ in range(2))
        (tmp_path / "stands").touch()
        os.kill(zygote, signal.SIGKILL)
        assert ear.hear() == ["starting"]
        script.kill(signum)
        if signum == signal.SIGKILL:  # otherwise it waits for the zygote
            script.process.wait()
        let_pass(1)
        assert script.survivors() == [] == script.leftovers()


def test_a_signal_that_ends_the_caller_says_so_in_a_line(tmp_path, ear):
    with run("spawn(work, nprocs=2)", tmp_path) as script:
        _ = ear.hear(), ear.hear()
        script.kill(signal.SIGHUP)
        code, _, errors = script.end()
        assert (code, errors) == (-signal.SIGHUP, "unisono: asked by SIGHUP, the workers have 5 s to end\n")
        assert script.survivors() == [] == script.leftovers()


@pytest.mark.slow
def test_a_hundred_workers_of_a_killed_caller_take_seconds_to_reap(tmp_path):
    source = """
groups = [spawn(lambda index: stand_still(), nprocs=1, backend="cpu", join=False) for _ in range(100)]  # none waits
assert len([pid for group in groups for pid in group.pids()]) == 100
os.kill(os.getpid(), signal.SIGKILL)
"""
    with run(source, tmp_path) as script:
        script.end()
        assert script.survivors(SOON_S) == []  # looking at all processes for each of them, it took a minute


def test_nothing_survives_an_interrupt_while_the_workers_start(tmp_path, ear):
    with run("line.say('starting')\nspawn(work, nprocs=2)", tmp_path) as script:
        assert ear.hear() == ["starting"]
        script.kill(signal.SIGINT)
        assert script.end()[0] == -signal.SIGINT
        assert script.survivors() == [] == script.leftovers()


@pytest.mark.slow
def test_nothing_survives_when_the_caller_of_nested_workers_is_killed(tmp_path, ear):
    source = "spawn(lambda index: spawn(work, nprocs=2) if index == 0 else stand_still(), nprocs=2)"
    with run(source, tmp_path) as script:
        assert [ear.hear()[0], ear.hear()[0]] == ["rank", "rank"]
        assert len(script.living()) == 2 + 2 + 1 + 2 + 4 + 2  # with the inner zygote and the inner workers
        script.kill(signal.SIGKILL)
        assert script.survivors() == [] == script.leftovers()


TELL_THE_END = """
def tell_the_end():
    threading.main_thread().join()
    line.say("exiting")
threading.Thread(target=tell_the_end).start()
"""


def test_the_interpreter_waits_for_a_group_that_is_no_daemon(tmp_path, ear, gate, let_pass):
    source = f"""
def finish(index):
    Gate(Path("gate").absolute()).wait()
    print("rank", index, "finished")
context = spawn(finish, nprocs=2, join=False)
{TELL_THE_END}
"""
    with run(source, tmp_path) as script:
        assert ear.hear() == ["exiting"]
        let_pass(2)
        code, output, errors = script.end()
        assert (code, errors) == (0, "")
        assert sorted(output.splitlines()) == ["rank 0 finished", "rank 1 finished"]
        assert script.survivors() == [] == script.leftovers()


@pytest.mark.parametrize("daemon", [True, False], ids=["a daemon group", "an interrupt at the exit"])
def test_nothing_survives_the_end_of_the_interpreter(tmp_path, ear, gate, let_pass, daemon):
    source = f"""
context = spawn(work, nprocs=2, join=False, daemon={daemon})
context.pids()
{TELL_THE_END}
Gate(Path("gate").absolute()).wait()
"""
    with run(source, tmp_path) as script:
        assert [ear.hear()[0], ear.hear()[0]] == ["rank", "rank"]
        let_pass(1)
        assert ear.hear() == ["exiting"]
        while not daemon and script.process.poll() is None:
            script.kill(signal.SIGINT)  # Python misses one that comes just before it begins to wait
            with contextlib.suppress(subprocess.TimeoutExpired):
                script.process.wait(10)
        script.process.wait(60)
        assert script.living() == []  # at once: the interpreter's end has waited for it
        assert script.leftovers() == []


class Actor:
    """A thread that acts when it hears the workers, while the test's own thread is in `spawn`."""

    def __init__(self, ear, *acts):
        self.heard = []
        self._thread = threading.Thread(target=self._act, args=(ear, acts))

    def _act(self, ear, acts):
        for lines, act in acts:
            self.heard += [ear.hear() for _ in range(lines)]
            act()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._thread.join()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def everything(line):
    """Loader workers, which live as long as the loader that is returned, and an escaped grandchild; says the pids."""
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
    next(iter(loader))
    grandchild()
    line.say(os.getpid(), *(child.pid for child in psutil.Process().children()))
    return loader


def test_workers_that_swallow_the_interrupt_are_killed_after_the_grace(line, ear, tmp_path, monkeypatch):
    (home := tmp_path / "rendezvous").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))

    def work(index):
        with contextlib.suppress(KeyboardInterrupt):  # it may come as soon as the worker has told its pids
            _loader = everything(line)
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                dist.all_reduce(torch.ones(1)) if index == 0 else stand_still()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Actor(ear, (2, interrupt)) as actor:
        spawn(work, nprocs=2, grace_s=GRACE_S)
    assert GRACE_S <= time.monotonic() - began < SOON_S
    assert survivors([int(pid) for words in actor.heard for pid in words]) == []
    assert list(home.iterdir()) == []


def test_a_second_interrupt_kills_at_once(line, ear):
    def work(index):
        try:
            line.say(os.getpid())
            stand_still()
        except KeyboardInterrupt:
            line.say("refused")
            stand_still()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Actor(ear, (2, interrupt), (2, interrupt)) as actor:
        spawn(work, nprocs=2, grace_s=300)
    assert time.monotonic() - began < SOON_S
    assert actor.heard[2:] == [["refused"], ["refused"]]
    assert survivors([int(pid) for [pid] in actor.heard[:2]]) == []


@pytest.mark.parametrize("join", [True, False])
def test_what_a_signal_handler_raises_in_the_caller_stops_the_workers(line, ear, join):
    def quit_politely(*_):
        raise SystemExit(15)

    def work(index):
        _loader = everything(line)
        stand_still()

    handler = signal.signal(signal.SIGTERM, quit_politely)
    try:
        with pytest.raises(SystemExit), Actor(ear, (2, lambda: os.kill(os.getpid(), signal.SIGTERM))) as actor:
            result = spawn(work, nprocs=2, join=join)
            result.join()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert survivors([int(pid) for words in actor.heard for pid in words]) == []


def test_what_a_worker_has_started_ends_with_it_though_its_peers_go_on(line, ear, gate, let_pass):
    def work(index):
        if index == 0:
            line.say(subprocess.Popen(["sleep", "1000"]).pid)
        else:
            gate.wait()

    context = spawn(work, nprocs=2, join=False)
    assert survivors([int(pid) for pid in ear.hear()]) == []
    assert context.join(0) is None
    let_pass(1)
    context.join()


def test_a_process_that_left_its_session_ends_with_its_own_group(line, ear, gate, let_pass):
    other = spawn(lambda index: gate.wait(), nprocs=2, join=False)
    other.pids()

    def work(index):
        if index == 0:
            line.say(grandchild())
            current_world().comm.barrier()
            stand_still()
        current_world().comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDiedError):
        spawn(work, nprocs=2)
    assert survivors([int(pid) for pid in ear.hear()]) == []
    let_pass(2)
    other.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_directory_beside_those_of_runs_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_directory("1") as directory:
        name = directory.name[:-8]
    mine, others = (tmp_path / f"{name}{each}" for each in ("mine", "theirs"))
    for each in (mine, others):
        (each / "kept").mkdir(parents=True)
    os.chown(others, 12345, 12345)
    with private_directory("1"):
        assert [each.exists() for each in (mine / "kept", others / "kept")] == [False, True]
