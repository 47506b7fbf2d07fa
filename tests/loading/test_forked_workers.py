"""Loader workers that are forked while other threads hold locks."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.popen_fork import Popen
from typing import Any

import numpy
import psutil
import pytest
import torch
from epochs import Numbers
from faults import many_open_files
from modes import THREADS_2
from streams import COUNT, Stream
from torch.utils.data import DataLoader

from unisono import DeviceLoader, rank
from unisono.loading import forked_workers


def one_pass() -> list[int]:
    loader = DeviceLoader(DataLoader(Stream(), batch_size=3, num_workers=2))
    iterator = iter(loader)
    return [sample for batch in iterator for sample in batch[: iterator.valid_samples].tolist()]


@contextlib.contextmanager
def beside(draw: Callable[[], Any]) -> Iterator[None]:
    """Let another thread draw all the time."""
    is_over = threading.Event()

    def body() -> None:
        while not is_over.is_set():
            draw()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Sticky:
    """A stdout that waits for ever in the first `times` processes that are forked from this one."""

    closed = False

    def __init__(self, times: int) -> None:
        self.times = times
        self.forked = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._home = os.getpid()
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        if os.getpid() == self._home:
            return
        self.forked += 1
        if int(self.forked) <= self.times:
            self._lock.acquire()
            self._lock.acquire()


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: torch.randn(3_000_000), id="draws from torch's generator"),
        pytest.param(lambda: (numpy.random.rand(1_000_000), threading.Event().wait(0.001)), id="draws from numpy's"),
        pytest.param(lambda: (torch.manual_seed(1), threading.Event().wait(0.001)), id="seeds"),
    ],
)
def test_what_another_thread_does_all_the_time_does_not_stop_the_workers(work):
    with beside(work):
        assert sorted(one_pass()) == list(range(COUNT))


def test_a_lock_of_torchs_that_is_always_held_does_not_stop_the_workers():
    with torch.cuda._initialization_lock:
        assert sorted(one_pass()) == list(range(COUNT))


@pytest.mark.parametrize("is_log", [False, True])
def test_a_worker_that_is_stuck_is_forked_again(monkeypatch, is_log):
    stdout = Sticky(times=1)
    if is_log:
        monkeypatch.setattr(logging.getLogger("a.log"), "handlers", [logging.StreamHandler(stdout)])
    else:
        monkeypatch.setattr(sys, "stdout", stdout)
    # Longer and longer: on a loaded machine a worker is late, and is ended before it is stuck.
    monkeypatch.setattr(forked_workers, "PATIENCE_S", [0.1 * 2**attempt for attempt in range(10)])
    assert sorted(one_pass()) == list(range(COUNT))
    assert int(stdout.forked) >= 3


def test_a_worker_killed_at_its_start_holds_no_lock_the_next_one_needs(monkeypatch):
    kill = Popen.kill

    def kill_when_it_waits(popen):  # for its parent; without that, for samples, with the lock of their queue
        worker, before = psutil.Process(popen.pid), None
        while (now := (worker.cpu_times(), worker.num_ctx_switches())) != before or worker.status() != "sleeping":
            before = now
            threading.Event().wait(0.2)
        kill(popen)

    monkeypatch.setattr(Popen, "kill", kill_when_it_waits)
    monkeypatch.setattr(forked_workers, "PATIENCE_S", (0.0, 60.0))
    assert sorted(one_pass()) == list(range(COUNT))


def test_a_worker_loads_before_its_parent_has_awaited_any(monkeypatch):
    """Which in a pass of many workers is when the last one was forked."""
    has_loaded = multiprocessing.get_context("fork").Event()

    class Telling(Numbers):
        def __getitem__(self, index: int) -> int:
            has_loaded.set()
            return index

    def await_later(process, work=forked_workers._await):
        assert has_loaded.wait(60)
        work(process)

    monkeypatch.setattr(forked_workers, "_await", await_later)
    assert [int(each) for each in DeviceLoader(DataLoader(Telling(4), num_workers=2))] == [0, 1, 2, 3]


def test_workers_are_forked_despite_more_than_a_thousand_open_files():
    with many_open_files():
        assert sorted(one_pass()) == list(range(COUNT))


def test_workers_that_are_always_stuck_are_an_error_and_gone(monkeypatch):
    before = set(psutil.Process().children())
    monkeypatch.setattr(sys, "stdout", Sticky(times=1000))
    monkeypatch.setattr(forked_workers, "PATIENCE_S", (0.05, 0.05))
    with pytest.raises(RuntimeError, match=r"forked 2 times and did not begin.*num_workers=0"):
        one_pass()
    assert set(psutil.Process().children()) <= before


def test_a_worker_whose_parent_has_died_ends_in_silence():
    worker = forked_workers.Context().Process(target=pytest.fail)
    worker._line = socket.socketpair()
    worker._line[0].close()
    process = multiprocessing.get_context("fork").Process(target=worker.run)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_other_start_methods_and_contexts_are_left_as_they_are():
    spawning = multiprocessing.get_context("spawn")
    assert forked_workers.context_of(spawning) is spawning
    assert forked_workers.context_of("spawn") == "spawn"
    for given in ("fork", multiprocessing.get_context("fork")):
        assert isinstance(forked_workers.context_of(given), forked_workers.Context)


def seeded_pass() -> list[int]:
    """As scripts do: each replica seeds, and begins its loop."""
    torch.manual_seed(rank())
    return one_pass()


def test_two_replicas_start_their_workers_at_once():
    found = THREADS_2.run(seeded_pass)
    assert sorted(sample for each in found for sample in each) == list(range(COUNT))
