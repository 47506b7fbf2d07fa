"""All ranks stop after the same step, whichever of them was asked."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from faults import Line, Script
from modes import PROCESSES_2, THREADS_2, THREADS_4
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.comm import preemption
from unisono.errors import StoppedError, UnisonoError
from unisono.training.stopping import should_stop
from unisono.world import current_world, solo_world, use_world

T = TypeVar("T")

NUMBERS = TensorDataset(torch.arange(400))


def batches() -> Iterator[list[torch.Tensor]]:
    """Batches without end, made by loader workers."""
    while True:
        yield from DataLoader(NUMBERS, 4, num_workers=1)


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGTERM is handled, as the main thread has asked for."""
    with preemption.scope():
        preemption.handle()
        yield


@pytest.mark.any_family
def test_replicas_stop_after_the_same_step_when_one_of_them_is_asked(handled):
    def body() -> int:
        for step in range(1000):
            if should_stop(unisono.rank() == 1 and step == 5):
                return step
        return -1

    assert THREADS_4.run(body) == [5] * 4


@pytest.mark.any_family
def test_once_agreed_it_stays_so_in_that_world_and_meets_nobody(handled):
    def body() -> tuple[list[bool], int]:
        world, calls = current_world(), []
        reduce = world.comm.all_reduce
        world.comm.all_reduce = lambda *a: (calls.append(a), reduce(*a))[1]
        found = [should_stop() for _ in range(2)]
        world.comm.barrier()
        found.append(should_stop(True))
        return found + [should_stop() for _ in range(2)], len(calls)

    assert THREADS_2.run(body) == [([False, False, True, True, True], 3)] * 2
    assert not should_stop(world=solo_world())


def test_a_rank_in_an_engines_thread_stops_when_the_engine_asks():
    found: list[Any] = []

    def body() -> None:
        with pytest.raises(UnisonoError, match=r"pass should_stop\(asked=\) whether this rank was asked"):
            should_stop()
        with use_world(solo_world()):
            found.extend([should_stop(False), should_stop(True), should_stop(False)])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False, True, True]


def run_to_its_stop(body: Callable[[], T]) -> list[T]:
    """What the ranks return that have agreed to stop."""
    with pytest.raises(StoppedError) as stopped:
        PROCESSES_2.run(body)
    return stopped.value.results


def test_workers_stop_after_the_same_step_when_one_of_them_gets_sigterm():
    def body() -> tuple[int, bool]:
        step = 0
        while not should_stop():
            step += 1
            if unisono.rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        return step, preemption.is_requested()

    assert run_to_its_stop(body) == [(5, False), (5, True)]


def test_loader_workers_live_until_the_loop_has_come_to_its_stop_and_saved():
    """SIGTERM comes from outside and goes to everything that a worker has started, as a scheduler's does."""

    def body() -> tuple[int, int]:
        should_stop()
        loaded, step = batches(), 0
        for step, _ in enumerate(loaded):
            if unisono.rank() == 1 and step == 5:
                subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], start_new_session=True, check=True)
            if should_stop():
                break
        rest = [next(loaded) for _ in range(50)]  # a validation before it saves, say
        return step, len(rest)

    found = run_to_its_stop(body)
    assert found[0] == found[1]
    assert 0 < found[0][0] <= 6
    assert found[0][1] == 50


SOLO = """
import sys
from pathlib import Path
import torch
from faults import Line
from torch.utils.data import DataLoader, TensorDataset
from unisono.comm import preemption
from unisono.training.stopping import should_stop

should_stop()
line, count = Line(Path(sys.argv[0]).parent / "line"), 0
while True:
    for batch in DataLoader(TensorDataset(torch.arange(400)), 4, num_workers=2):
        count += 1
        if count == 3:
            line.say("trains")
        if should_stop():
            Path("checkpoint").write_text(str(count))
            sys.exit(143)
"""

THREADS = """
import os, signal, threading
import torch
from torch import nn
from unisono import DataParallel, rank
from unisono.training.stopping import should_stop

def loop(model, loader, device, context):
    for step, batch in enumerate(loader):
        if rank() == 1 and step == 5:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if should_stop():
            return step
    return -1

steps = DataParallel(nn.Identity(), ["cpu:0", "cpu:1"])(loop, [torch.ones(2)] * 100_000)
print(len(set(steps)), steps[0] > 0)
"""


def test_a_plain_script_saves_on_a_group_wide_sigterm_and_leaves_nothing(tmp_path: Path):
    line = Line.at(tmp_path / "line")
    with line.hearing() as ear, Script(SOLO, tmp_path) as script:
        ear.hear()
        script.kill_group(signal.SIGTERM)
        code, _, errors = script.end()
        assert (code, errors) == (143, "")
        assert int((tmp_path / "checkpoint").read_text()) >= 3
        assert script.survivors() == []


def test_a_signal_taken_by_a_replica_stops_all_the_main_thread_waits_for(tmp_path: Path):
    with Script(THREADS, tmp_path) as script:
        code, output, errors = script.end()
    assert (code, output.split(), errors) == (0, ["1", "True"], "")


def test_this_process_handles_nothing_after_all():
    """What the tests here do to signals, they do elsewhere."""
    assert threading.current_thread() is threading.main_thread()
    assert not preemption.takes(signal.getsignal(signal.SIGTERM))
