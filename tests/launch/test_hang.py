"""A group that stands still: the late rank is named, with every rank's stack; a slow one is left alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults import stand_still
from torch.utils.data import DataLoader, TensorDataset

from unisono.comm.stacks import main_stack
from unisono.errors import WorkerDiedError, WorkerHungError
from unisono.launch import spawn as spawning
from unisono.launch.hang import HangWatch, hung_error
from unisono.launch.reports import Pulse
from unisono.loading.device_loader import DeviceLoader
from unisono.world import current_world

spawn = partial(spawning.spawn, grace_s=60.0)  # workers that stand still in Python need none
HANG_S = 3.0  # longer than a rank on its way into a collective is kept from it by the other processes here


def compute_slowly():
    stand_still()


def test_the_late_rank_is_named_with_its_place_and_what_the_others_wait_in(soon):
    def work(index):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what they do when they are stopped does not hide it
        if index == 1:
            compute_slowly()
        current_world().comm.all_reduce(torch.ones(10))

    with pytest.raises(WorkerHungError, match="no rank has made progress for 3 s, and rank 1 is late") as caught:
        spawn(work, nprocs=3, hang_timeout_s=HANG_S)
    text = str(caught.value)
    assert 'rank 1 is in stand_still ("' in text
    assert "ranks [0, 2] wait in all_reduce(float32[10], 'sum')" in text
    assert caught.value.ranks == [1]
    assert sorted(caught.value.stacks) == [0, 1, 2]
    notes = "\n".join(caught.value.__notes__)
    parts = ("rank 0:", "frames of unisono\n", "in all_reduce", "in work\n", "rank 1:", "compute_slowly")
    places = [notes.index(text) for text in parts]
    assert places == sorted(places)
    assert sorted(caught.value.failures) == [0, 1, 2]


def test_a_collective_that_the_user_called_himself_is_found_on_the_stack(soon):
    def work(index):
        if index == 0:
            compute_slowly()
        dist.broadcast(torch.ones(1), 0)

    with pytest.raises(WorkerHungError, match=r"rank 0 is late: .*; rank 1 waits in broadcast\(\)") as caught:
        spawn(work, nprocs=2, hang_timeout_s=HANG_S)
    assert caught.value.ranks == [0]


@pytest.mark.slow
def test_a_rank_that_never_lets_go_of_the_interpreter_is_named(soon):
    def work(index):
        current_world().comm.barrier()
        if index == 1:
            mutex = ctypes.create_string_buffer(64)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        current_world().comm.barrier()

    # Whether it could still tell that it had left the barrier is a race: the thread that tells needs the interpreter.
    with pytest.raises(WorkerHungError, match=r"rank 1 is (late: rank 1 is in work|behind the others)"):
        spawn(work, nprocs=2, hang_timeout_s=HANG_S)


def test_a_stopped_rank_is_named_and_gone_soon(soon):
    def work(index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        current_world().comm.barrier()

    with pytest.raises(WorkerHungError, match="rank 1 is late: rank 1 does not report where it is: it is stopped"):
        spawn(work, nprocs=2, hang_timeout_s=HANG_S)


def test_a_rank_that_makes_progress_alone_is_no_hang():
    def work(index):
        if index == 0:
            data = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=1)
            for _ in DeviceLoader(data, current_world().device, already_sharded=True):
                time.sleep(0.3)  # twelve times, longer than the limit in all: the subject of this test is time
        current_world().comm.barrier()
        return index

    assert spawn(work, nprocs=2, hang_timeout_s=HANG_S) == [0, 1]


@pytest.mark.slow
def test_by_default_the_late_rank_is_named_just_before_the_timeout(soon):
    def work(index):
        if index == 1:
            compute_slowly()
        current_world().comm.barrier()

    with pytest.raises(WorkerHungError, match=r"no rank has made progress for 4.8 s, and rank 1 is late") as caught:
        spawn(work, nprocs=2, timeout=timedelta(seconds=6))
    assert "pass a longer timeout (--timeout); collectives" in str(caught.value)


@pytest.mark.slow
def test_ranks_that_stand_still_outside_any_collective_are_restarted(caplog):
    def work(index):
        if current_world().restart_count == 0:
            stand_still()
        return current_world().restart_count

    assert spawn(work, nprocs=2, hang_timeout_s=HANG_S, max_restarts=1) == [1, 1]
    assert "no rank is in a collective: rank 0 is in stand_still" in caplog.text
    assert "rank 1 is in stand_still" in caplog.text


def test_a_failure_wins_over_the_hang_that_it_ends_in(line, ear):
    def work(index):
        if index == 1:
            os._exit(3)
        stand_still()

    with pytest.raises(WorkerDiedError, match="exited with code 3"):
        spawn(work, nprocs=2, hang_timeout_s=HANG_S)


def test_a_device_waiting_for_a_returned_rank_is_reported_within_seconds():
    """On the host, the transport tells it at once."""
    watch = HangWatch(None, timeout_s=1800.0)
    watch.hear(0, Pulse(1), 0.0)
    watch.hear(1, Pulse(1, "the device's work since barrier()"), 0.0)
    watch.forget(0, 1.0, has_returned=True)
    assert watch.deadline() == 6.0
    error = hung_error(watch, {}, [1])
    assert "for 5 s, and rank 0 has returned, while rank 1 waits in the device's work since barrier()" in str(error)
    assert "Every rank must call the same collectives" in str(error)
    assert error.ranks == [0]


def test_durations_of_many_weeks_are_waited_for():
    def work(index):
        current_world().comm.barrier()
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        spawn(work, nprocs=2, timeout=timedelta(days=300), hang_timeout_s=1e7, grace_s=1e7)


# The arithmetic, and the words.


def test_the_time_begins_anew_with_every_progress_of_any_rank():
    watch = HangWatch(hang_timeout_s=10.0, timeout_s=100.0)
    assert watch.deadline() is None  # the ranks have not joined
    watch.hear(0, Pulse(5), 4.0)
    assert watch.deadline() == 14.0
    watch.hear(1, Pulse(5), 6.0)
    watch.hear(0, Pulse(5, "barrier()"), 8.0)  # a sign of life, and no progress
    assert watch.deadline() == 16.0
    watch.forget(1, 9.0)
    assert watch.deadline() == 19.0


def test_unless_told_only_a_rank_that_waits_can_hang():
    watch = HangWatch(hang_timeout_s=None, timeout_s=100.0)
    assert watch.deadline() is None
    watch.hear(0, Pulse(5), 4.0)
    assert watch.deadline() is None
    watch.hear(1, Pulse(6, "barrier()"), 5.0)
    assert watch.deadline() == 85.0
    watch.hear(1, Pulse(7), 6.0)
    assert watch.deadline() is None


def test_of_ranks_on_several_machines_it_is_not_known_what_is_on_its_way():
    here, spread = HangWatch(None, 100.0), HangWatch(None, 100.0, is_of_one_machine=False)
    for watch in (here, spread):
        watch.hear(0, Pulse(5), 3.0)
        watch.hear(1, Pulse(5, "barrier()"), 4.0)
        watch.forget(0, 4.0, has_returned=True)
    assert (here.deadline(), spread.deadline()) == (9.0, 84.0)


STACKS = """Thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/x/helper.py", line 3 in run

Current thread 0x2 (most recent call first):
  File "{}", line 7 in {}
  File "/home/me/train.py", line 3 in train
"""


def test_only_the_main_thread_tells_what_a_rank_does():
    assert main_stack(STACKS.format("/home/me/data.py", "load")).startswith("Current thread 0x2")
    stacks = {0: STACKS.format("/x/torch/distributed/distributed_c10d.py", "barrier"), 1: STACKS.format("d.py", "load")}
    error = hung_error(HangWatch(60.0, 100.0), stacks, [0, 1])
    assert 'rank 1 is late: rank 1 is in load ("d.py", line 7); rank 0 waits in barrier()' in str(error)


def test_ranks_in_different_collectives_are_listed_with_the_lagging_one():
    pulses = {0: Pulse(7, "barrier()"), 1: Pulse(7, "barrier()"), 2: Pulse(4, "all_reduce(float32[1], 'sum')")}
    error = hung_error(HangWatch(60.0, 100.0, pulses=pulses), {}, [0, 1, 2])
    assert (
        "all ranks wait, but not in the same call: ranks [0, 1] wait in barrier(), rank 2 waits in "
        "all_reduce(float32[1], 'sum') (rank 2 is behind the others)"
    ) in str(error)
    assert error.ranks == [2]
