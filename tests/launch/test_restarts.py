"""A group that fails is restarted: with a new rendezvous, a higher count, and its function's own checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from faults import stand_still

from unisono.errors import ClosedError, UnpicklableError, WorkerDiedError
from unisono.launch.spawn import spawn
from unisono.world import current_world


def restart_count():
    return current_world().restart_count


def test_a_failed_group_is_restarted_with_a_higher_count(caplog):
    def work(index):
        current_world().comm.barrier()
        if index == 1 and restart_count() < 2:
            raise ValueError(f"failure {restart_count()}")
        current_world().comm.barrier()
        return restart_count()

    with caplog.at_level(logging.WARNING):
        assert spawn(work, nprocs=2, max_restarts=3) == [2, 2]
    records = [record for record in caplog.records if record.name == "unisono.launch.supervisor"]
    for number, record in enumerate(records):
        begin = f'restart {number + 1} of 3, because of ValueError: failure {number}, in work ("{__file__}", line '
        assert record.getMessage().startswith(begin)
        assert "(rank 1 of 2, cpu:1, pid " in record.getMessage()
        assert record.exc_info is None  # one line, without a traceback
    assert len(records) == 2


def test_when_no_restart_is_left_the_last_failure_is_raised_with_its_count():
    def work(index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        current_world().comm.barrier()

    with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
        spawn(work, nprocs=2, max_restarts=2)
    assert caught.value.__notes__[0].endswith("restart 2")


def test_one_worker_alone_is_restarted_too():
    def work(index):
        if restart_count() == 0:
            os._exit(0)
        return os.getpid()

    [pid] = spawn(work, nprocs=1, max_restarts=1)
    assert pid != os.getpid()


def test_what_the_caller_stops_is_not_restarted(line, ear):
    def work(index):
        line.say(restart_count())
        stand_still()

    context = spawn(work, nprocs=2, join=False, max_restarts=5)
    ear.hear_all(2)
    context.stop()
    with pytest.raises(ClosedError):
        context.join()
    with pytest.raises(AssertionError, match="nothing was said"):
        ear.hear(0.1)


def test_what_would_fail_each_time_is_not_restarted(tmp_path):
    tries = tmp_path / "tries"

    def refuse(index):
        with tries.open("a") as file:
            file.write("x")
        return threading.Lock()

    with pytest.raises(UnpicklableError):
        spawn(refuse, nprocs=1, max_restarts=5)
    assert tries.read_text() == "x"


def test_a_restarted_group_meets_nothing_of_the_failed_one():
    times = 3

    def work(index):
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        if restart_count() < times and index == restart_count() % 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(dist.all_reduce(ones := torch.ones(1)) or ones)

    assert spawn(work, nprocs=4, max_restarts=times) == [4.0] * 4
