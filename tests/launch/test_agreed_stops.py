"""SIGTERM as a request: the ranks agree, save and return, and the caller ends as its scheduler expects."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import psutil
import pytest
import torch
from faults import SOON_S, Script, survivors, until

from unisono.errors import StoppedError, WorkerDiedError
from unisono.launch.spawn import spawn
from unisono.training.optimizer import backward, optimizer_step
from unisono.training.stopping import should_stop
from unisono.world import current_world

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from faults import Line
from unisono import is_rank_zero, should_stop, spawn
from torch.utils.data import DataLoader

line = Line(Path("line").absolute())

def train(index):
    loader = DataLoader(range(10**9), num_workers=2, batch_size=1)
    should_stop()
    for step, batch in enumerate(loader):
        if step == 3:
            line.say("running", os.getpid())
        if should_stop():
            if is_rank_zero():
                Path("checkpoint").write_text(str(int(batch)))
            return step

spawn(train, nprocs=2)
print("not reached")
"""


# The main thread, which runs handlers, is not woken by a signal that comes there.
ELSEWHERE = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
"""


def signal_everything(script):
    """As SLURM does, with the step: the caller, the zygote, the workers and their loader workers."""
    for process in script.living():
        with contextlib.suppress(psutil.NoSuchProcess):  # the first ones may have ended it
            process.terminate()


BY_SIGTERM = "unisono: asked by SIGTERM, the workers stop at their next should_stop()\n"
ASKED = {
    "SIGTERM that another thread takes": (lambda script: script.kill(signal.SIGTERM), BY_SIGTERM),
    "SIGTERM to every process": (signal_everything, ""),
    "the first Ctrl-C, to the group": (
        lambda script: script.kill_group(signal.SIGINT),
        "\nunisono: asked by SIGINT, the workers stop at their next should_stop(); Ctrl-C again ends them now\n",
    ),
}


def test_ctrl_c_lets_one_rank_save_although_its_loader_workers_get_it_too(tmp_path, line, ear):
    with Script(SCRIPT.replace("nprocs=2", "nprocs=1"), tmp_path) as script:
        ear.hear_all(1)
        script.kill_group(signal.SIGINT)
        code, output, errors = script.end()
        assert (code, output) == (143, ""), errors
        assert "this process stops at its next should_stop(); Ctrl-C again ends it now\n" in errors
        assert (tmp_path / "checkpoint").exists()
        assert script.survivors() == []


@pytest.mark.parametrize("way", ASKED)
def test_a_caller_that_is_asked_lets_the_ranks_save_and_ends_with_143(tmp_path, line, ear, way):
    ask, said = ASKED[way]
    with Script(ELSEWHERE * ("thread" in way) + SCRIPT, tmp_path) as script:
        ear.hear_all(2)
        ask(script)
        code, output, errors = script.end()
        assert (code, output) == (143, "")
        assert errors == f"{said}stopped early as asked; run again to resume\n" or ask is signal_everything
        assert (tmp_path / "checkpoint").exists()
        assert script.survivors() == []


DEAF = """
from faults import Line, stand_still
from pathlib import Path
from unisono import should_stop, spawn

line = Line(Path("line").absolute())

def train(index):
    should_stop()
    line.say("running")
    stand_still()

try:
    spawn(train, nprocs=2, grace_s=60.0)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_second_interrupt_ends_them(tmp_path, line, ear):
    with Script(DEAF, tmp_path) as script:
        ear.hear_all(2)
        script.kill(signal.SIGINT)
        until(lambda: b"Ctrl-C again" in script.process.stderr.data)
        script.kill(signal.SIGINT)
        code, output, _ = script.end()
        assert (code, output) == (0, "interrupted\n")
        assert script.survivors() == []


def train(index, line):
    should_stop()
    line.say(index, os.getpid())
    steps = 0
    while not should_stop():
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("nprocs", "leave"),
    [(1, sys.exit), (2, lambda: None), (2, lambda: sys.exit(143))],
    ids=["alone, exit 0", "return", "exit 143"],
)
def test_an_agreed_stop_reports_its_step_however_fn_leaves(caplog, nprocs, leave):
    def work(index):
        parameter = torch.nn.Parameter(torch.ones(1))
        should_stop()
        for step in range(4):
            if (step, index) == (2, nprocs - 1):
                os.kill(os.getpid(), signal.SIGTERM)
            backward(parameter.sum())
            optimizer_step(torch.optim.SGD([parameter], 0.1))
            if should_stop():
                leave()
                return

    with pytest.raises(StoppedError) as caught:
        spawn(work, nprocs=nprocs)
    assert caught.value.code == 143
    assert str(caught.value) == "stopped early as asked, after 3 steps; run again to resume"
    assert caplog.messages.count(str(caught.value)) == 1


def test_an_exit_with_another_code_after_an_agreed_stop_is_a_failure():
    def work(index):
        should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        while not should_stop():
            pass
        sys.exit("cannot save")

    with pytest.raises(WorkerDiedError, match="cannot save"):
        spawn(work, nprocs=2)


def test_a_group_that_does_not_handle_sigterm_is_ended_by_it(tmp_path, line, ear):
    source = SCRIPT.replace("    should_stop()\n", "").replace("if should_stop():", "if False:")
    with Script(source, tmp_path) as script:
        ear.hear_all(2)
        script.kill(signal.SIGTERM)
        code, _, errors = script.end()
        assert (code, errors) == (-signal.SIGTERM, "unisono: asked by SIGTERM, the workers have 5 s to end\n")
        assert script.survivors() == []


def test_a_rank_handling_sigterm_is_still_stopped_when_a_peer_fails(line, ear):
    def work(index):
        should_stop()
        line.say(os.getpid())
        current_world().comm.barrier()  # so that both have spoken before one fails
        if index == 1:
            raise ValueError("of rank 1")
        while True:
            time.sleep(0.01)  # in Python for ever, and deaf to a request

    began = time.monotonic()
    with pytest.raises(ValueError, match="of rank 1"):
        spawn(work, nprocs=2, grace_s=60.0)
    assert time.monotonic() - began < SOON_S
    assert survivors([int(pid) for [pid] in ear.hear_all(2)]) == []


ALONE = """
import os, signal
from unisono import should_stop, spawn

def train(index):
    for step in range(1000):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if should_stop():
            return step

"""


@pytest.mark.parametrize(
    ("rest", "code", "output"),
    [
        ("spawn(train, nprocs=1); print('not reached')", 143, ""),
        ("try: spawn(train, nprocs=1)\nexcept SystemExit as stop: print(stop.code, stop.results)", 0, "143 [3]\n"),
        (
            "try: spawn(train, nprocs=1)\nexcept SystemExit: pass\nos.kill(os.getpid(), signal.SIGTERM)\nprint('deaf')",
            -signal.SIGTERM,
            "",
        ),
    ],
    ids=["its exit code", "its results", "afterwards SIGTERM ends"],
)
def test_a_group_of_one_in_the_calling_process_stops_alike(tmp_path, rest, code, output):
    with Script(ALONE + rest, tmp_path) as script:
        assert script.end()[:2] == (code, output)


LATE = """
import os, signal, threading
from pathlib import Path
from faults import Gate, Line
from unisono import should_stop, spawn

line, gate = Line(Path("line").absolute()), Gate(Path("gate").absolute())

def train(index):
    should_stop()
    line.say("past the last question")
    gate.wait()
    return "done"

{begin}
try:
    spawn(train, nprocs=2)
except SystemExit as stop:
    print(stop.code, stop.results)
"""
# SIGTERM arrives in another thread; the main one, which runs handlers, waits for the end of the job meanwhile.
IN_ANOTHER_THREAD = """
arrived, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)

def announce():
    os.read(arrived, 1)
    line.say("SIGTERM has arrived")

threading.Thread(target=announce).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
"""


@pytest.mark.parametrize("is_handled_late", [False, True], ids=["handling", "once the workers have ended"])
def test_a_stop_after_the_last_question_is_not_lost(tmp_path, line, ear, gate, let_pass, is_handled_late):
    begin = IN_ANOTHER_THREAD if is_handled_late else "should_stop()\n"
    with Script(LATE.format(begin=begin), tmp_path) as script:
        ear.hear_all(2)
        script.kill(signal.SIGTERM)
        if is_handled_late:
            assert ear.hear() == ["SIGTERM", "has", "arrived"]
        let_pass(2)
        code, output, errors = script.end()
        assert (code, output) == (0, "143 ['done', 'done']\n")
        assert errors == BY_SIGTERM + "stopped early as asked; run again to resume\n"


def test_an_agreed_stop_whose_save_fails_is_not_restarted(line, ear):
    def work(index, line):
        train(index, line)
        if index == 0:
            raise OSError("no space left")
        return index

    context = spawn(work, args=(line,), nprocs=2, join=False, max_restarts=3)
    pids = [int(pid) for _, pid in ear.hear_all(2)]
    os.kill(pids[1], signal.SIGTERM)
    with pytest.raises(OSError, match="no space left") as caught:
        context.join()
    assert caught.value.__notes__[0].endswith("restart 0")
