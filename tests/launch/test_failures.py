"""A worker that fails: the caller gets the first cause, in its own type, with the place it came from."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults import SOON_S, Script, stand_still

from unisono import Accelerator, is_rank_zero
from unisono.comm.outcome import RemoteTraceback, this_process
from unisono.errors import BrokenWorldError, CollectiveMismatchError, UnpicklableError, WorkerDiedError
from unisono.launch import spawn as spawning
from unisono.launch.messages import describe_limit
from unisono.world import current_world

spawn = partial(spawning.spawn, grace_s=60.0)  # what ends sooner has killed nobody


class AwkwardError(Exception):
    """Its `__init__` wants other arguments than it keeps, and it holds what no pickle takes."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code
        self.lock = threading.Lock()


def test_an_error_keeps_its_type_and_tells_where_it_came_from():
    def fail(index):
        if index == 1:
            raise FileNotFoundError(2, "no such data", "train.csv")
        current_world().comm.barrier()

    with pytest.raises(FileNotFoundError, match=re.escape("[Errno 2] no such data: 'train.csv'")) as caught:
        spawn(fail, nprocs=2)
    error = caught.value
    assert error.filename == "train.csv"
    assert re.fullmatch(r"rank 1 of 2, cpu:1, pid \d+ on \S+, restart 0", error.__notes__[0])
    assert type(error.__cause__) is RemoteTraceback
    shown = "".join(traceback.format_exception(error))
    assert shown.index('raise FileNotFoundError(2, "no such data", "train.csv")') < shown.index("the direct cause")
    assert "test_failures.py" in shown


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class SilentError(RuntimeError):
    def __str__(self):
        raise TypeError("no text")


class NotedError(Exception):
    def __init__(self):
        self.__notes__ = "a text, and no list"


@pytest.mark.parametrize("kind", [partial(FrozenError, 3), partial(SilentError, "x"), NotedError])
def test_an_error_that_cannot_be_read_or_noted_arrives_all_the_same(kind):
    def fail(index):
        raise kind()

    error = kind()
    with pytest.raises(type(error)) as caught:
        spawn(fail, nprocs=2)
    assert (caught.value.args, type(caught.value.__cause__)) == (error.args, RemoteTraceback)
    assert caught.value.__notes__[-1].startswith(("rank ", "ranks "))


@pytest.mark.parametrize(("leave", "code"), [(int, 0), (partial(sys.exit, 3), 3), (partial(int, "x"), 1)])
def test_a_child_that_fn_forks_and_leaves_fn_in_reports_nothing(leave, code):
    def fork(index):
        child = os.fork()
        if not child:
            return leave()
        return index, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert spawn(fork, nprocs=2) == [(0, code), (1, code)]


class Unloadable:
    def __reduce__(self):
        return int, ("not a number",)


LOCK = threading.Lock()
CANNOT_TRAVEL = {
    "fn": (lambda index: LOCK, (), r"fn, a function, cannot be sent to the workers \(TypeError: .*lock.*\); the func"),
    "an argument": (lambda index, *args: None, (1, LOCK), r"args\[1\], a lock, cannot be sent"),
    "one to rebuild": (lambda index, arg: None, (Unloadable(),), r"cannot be rebuilt in the worker \(ValueError"),
    "a result": (lambda index: threading.Lock(), (), "the result, a lock, cannot be sent"),
}


@pytest.mark.parametrize("what", CANNOT_TRAVEL)
def test_what_cannot_travel_is_named(what):
    fn, args, words = CANNOT_TRAVEL[what]
    with pytest.raises(UnpicklableError, match=words):
        spawn(fn, args, nprocs=2)


@pytest.mark.parametrize("suppresses", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_is_blamed_even_if_a_peer_raises_its_own_error(soon, suppresses):
    def work(index):
        comm = current_world().comm
        comm.barrier()
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.barrier()
        except BrokenWorldError as error:
            if index == 0:
                raise RuntimeError("the step failed") from None if suppresses else error
            sys.exit(4)

    for _ in range(5 if suppresses else 1):  # whichever news comes first
        with pytest.raises(WorkerDiedError, match=r"rank 1 .*was killed by SIGKILL") as caught:
            spawn(work, nprocs=3)
        assert not any("ranks [1] were stopped" in note for note in caught.value.__notes__)


DEATHS = {
    "os._exit(0)": (lambda index: os._exit(0), "exited with code 0", 0),
    "os._exit(3)": (lambda index: os._exit(3), "exited with code 3", 3),
    "sys.exit(0)": (lambda index: sys.exit(0), "called sys.exit(0)", 0),
    "sys.exit('text')": (lambda index: sys.exit("text"), "called sys.exit('text')", 1),
    "SIGABRT": (lambda index: os.abort(), "was killed by SIGABRT", -signal.SIGABRT),
    "SIGSEGV": (lambda index: ctypes.string_at(0), "was killed by SIGSEGV", -signal.SIGSEGV),
    "SIGTERM": (lambda index: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM", -signal.SIGTERM),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_ends_without_a_result_has_died(death, capfd, soon):
    die, told, code = DEATHS[death]

    def work(index):
        if index == 1:
            print("a line before the end")
            print("another")
            die(index)
        current_world().comm.barrier()

    with pytest.raises(WorkerDiedError) as caught:
        spawn(work, nprocs=2)
    assert re.search(rf"rank 1 (\(pid \d+\) )?{re.escape(told)}.* before fn returned", str(caught.value))
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    output, errors = capfd.readouterr()
    assert output == "a line before the end\nanother\n"
    assert ("Fatal Python error" in errors) == (death in ("SIGABRT", "SIGSEGV"))
    if death == "SIGSEGV":
        (last,) = (note for note in caught.value.__notes__ if note.startswith("the last lines of rank 1 on stderr:"))
        kind, *stack = last.splitlines()[1:]
        assert kind == "  Fatal Python error: Segmentation fault"
        assert [line.rpartition(" in ")[2] for line in stack] == ["string_at", "<lambda>", "work"]
    if "sys.exit" in death:
        assert "SystemExit" in str(caught.value.__cause__)


def reduce_alone(index):
    if index == 0:
        dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(1000))


def gather_alone(index):
    accelerator = Accelerator(strategy="fsdp")
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    if is_rank_zero():
        next(model.parameters()).full_tensor()
    accelerator.backward(model(torch.ones(2, 8)).sum())


@pytest.mark.parametrize(
    ("work", "calls"),
    [
        (reduce_alone, ["all_reduce", "all_reduce"]),
        pytest.param(gather_alone, ["full_tensor", "(?:for|back)ward"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("process_group", [None, "gloo"])
def test_ranks_out_of_step_in_torch_collectives_are_named_with_their_calls(work, calls, process_group, soon):
    with pytest.raises(CollectiveMismatchError) as caught:
        spawn(work, nprocs=2, process_group=process_group)
    text = str(caught.value)
    lines = []
    for rank, call in enumerate(calls):
        place = rf'in {work.__name__} \("{__file__}", line (\d+)\)'
        found = re.search(rf'rank {rank} (?:called|came to) (?:[^"]* by )?{call}\([^"]*\) {place}', text)
        # gloo ends the process that gets what it does not expect, which knows its own call.
        if found is None and process_group == "gloo":
            assert "while its peers called another one" in text
            continue
        if found is None and f"rank {rank} came to a forward pass of the Sequential" in text:
            continue  # it was not in a collective yet
        assert found is not None, text
        lines.append(int(found[1]))
    assert lines
    assert lines == sorted(set(lines))
    assert isinstance(caught.value.__cause__, WorkerDiedError) == (process_group == "gloo")
    assert caught.value.failures.keys() == {0, 1}


def test_a_keyboard_interrupt_in_a_worker_reaches_the_caller(soon):
    def work(index):
        if index == 1:
            raise KeyboardInterrupt
        current_world().comm.barrier()

    with pytest.raises(KeyboardInterrupt) as caught:
        spawn(work, nprocs=2)
    assert "rank 1 of 2" in caught.value.__notes__[0]


def test_a_ctrl_c_shows_where_the_caller_was_and_nothing_of_the_wait():
    caller = os.getpid()

    def work(index):
        if index == 0:
            os.kill(caller, signal.SIGINT)
        stand_still()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            spawn(work, nprocs=2, grace_s=0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    shown = [os.path.basename(each.filename) for each in traceback.extract_tb(caught.value.__traceback__)]
    assert shown[0] == "test_failures.py"
    assert set(shown[1:]) <= {"test_failures.py", "spawn.py"}


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace():
    def work(index):
        if index == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        current_world().comm.barrier()
        if index == 0:
            stand_still()
        raise ValueError("the cause")

    began = time.monotonic()
    with pytest.raises(ValueError, match="the cause") as caught:
        spawn(work, nprocs=2, grace_s=0.5)
    assert 0.5 <= time.monotonic() - began < SOON_S
    assert "ranks [0] were stopped because of it" in caught.value.__notes__


def test_a_worker_that_is_told_to_stop_may_still_finish(line, ear):
    def work(index):
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        line.say(index)
        while not asked.wait(1):  # Python misses a signal that comes just before it begins to wait
            pass
        return f"rank {index} saved its state"

    context = spawn(work, nprocs=2, join=False)
    ear.hear_all(2)
    context.stop()
    assert context.join() == ["rank 0 saved its state", "rank 1 saved its state"]


def test_a_world_of_one_fails_as_a_worker_does():
    def fail(index):
        raise AwkwardError(code=5)

    with pytest.raises(AwkwardError) as caught:
        spawn(fail, nprocs=1)
    assert caught.value.__notes__ == [f"rank 0 of 1, cpu:0, {this_process()}, restart 0"]
    with pytest.raises(WorkerDiedError, match=r"rank 0 called sys.exit\(3\)") as died:
        spawn(lambda index: sys.exit(3), nprocs=1)
    assert died.value.exit_code == 3


def test_a_worker_that_cannot_join_its_peers_says_so(monkeypatch, soon):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0") as caught:
        spawn(lambda index: None, nprocs=2, process_group="gloo")
    told, where = caught.value.__notes__[:2]
    assert re.fullmatch("rank [01] could not join the process group of its peers", told)
    assert re.fullmatch(r"rank [01], pid \d+ on \S+, before it joined the world", where)


# What a machine has no more of: the limit, and how to get more.


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


def test_running_out_of_open_files_names_a_way_out_and_the_next_run_works(tmp_path):
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
