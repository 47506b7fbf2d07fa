"""The threads under a DataParallel: one outcome for each piece of work, whatever interrupts the waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from interrupts import interrupt_main_thread, interrupting

from unisono.comm.outcome import Outcome
from unisono.threads import replicas
from unisono.threads.replicas import ReplicaThreads

PATIENCE_S = 60.0


def unexpected(error: BaseException) -> None:
    raise AssertionError("nothing interrupted") from error


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("unisono-replica-")]


def test_what_a_call_worked_on_is_not_kept():
    class Thing: ...

    threads = ReplicaThreads(1)
    thing = Thing()
    gone = weakref.ref(thing)
    threads.run([lambda thing=thing: thing], unexpected)
    del thing
    threads.run([lambda: None], unexpected)  # the thread has let go of the work before when it takes the next
    assert gone() is None


def test_an_interrupt_is_passed_on_and_the_functions_are_still_waited_for():
    threads, ended, is_sized, seen = ReplicaThreads(2), [], threading.Event(), []

    def body(number: int) -> None:
        if number == 0:
            interrupt_main_thread()
        is_sized.wait(PATIENCE_S)
        ended.append(number)

    def on_interrupt(error: BaseException) -> None:
        seen.append(type(error))
        is_sized.set()

    with pytest.raises(KeyboardInterrupt):
        threads.run([lambda: body(0), lambda: body(1)], on_interrupt)
    assert sorted(ended) == [0, 1]
    assert seen == [KeyboardInterrupt]
    assert [outcome.unwrap() for outcome in threads.run([lambda: 1, lambda: 2], unexpected)] == [1, 2]


def test_an_outcome_whose_news_an_interrupt_loses_is_there_all_the_same(monkeypatch):
    """An interrupt may strike between taking the news from the queue and acting on it."""
    threads = ReplicaThreads(2)
    losing = [True]

    class Lossy:
        def __init__(self) -> None:
            self._news = real()

        def put(self, item: None) -> None:
            self._news.put(item)

        def get(self, **limit: float) -> None:
            self._news.get(**limit)
            if losing:
                losing.clear()
                raise KeyboardInterrupt

    real = replicas.SimpleQueue
    threads.run([lambda: None] * 2, unexpected)
    monkeypatch.setattr(replicas, "SimpleQueue", Lossy)
    raised: list[type] = []

    def run() -> None:
        raised.append(type(Outcome.capture(threads.run, [lambda: None] * 2, lambda error: None).error))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(PATIENCE_S)
    assert raised == [KeyboardInterrupt]


def test_after_any_interrupt_all_or_none_have_run_and_the_next_call_works():
    at, is_reached, partial_runs = 0, True, []
    threads = ReplicaThreads(2)
    while is_reached:
        threads = threads if at % 7 else ReplicaThreads(2)  # where it starts its threads, too
        together, ran = threading.Barrier(2), []

        def body(number: int, together: threading.Barrier = together, ran: list[int] = ran) -> None:
            ran.append(number)
            together.wait(PATIENCE_S)  # who came alone would wait here

        is_reached = interrupting(
            at,
            ("threads/replicas.py",),
            lambda threads=threads, body=body: threads.run([lambda: body(0), lambda: body(1)], lambda error: None),
        )
        if len(ran) not in (0, 2):
            partial_runs.append(at)
        assert threads.running == []
        assert [outcome.unwrap() for outcome in threads.run([lambda: 1, lambda: 2], unexpected)] == [1, 2]
        at += 1
    assert not partial_runs
    assert at > 10


def test_a_forked_process_has_threads_of_its_own():
    threads = ReplicaThreads(2)
    threads.run([lambda: None] * 2, unexpected)
    ends = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(int(PATIENCE_S))  # ends a child that waits for its parent's threads
        answers = [each.value for each in threads.run([lambda: 1, lambda: 2], unexpected)]
        os.write(ends[1], repr(answers).encode())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os.close(ends[1])
    answer = os.read(ends[0], 100).decode()
    os.close(ends[0])
    assert (status, answer) == (0, "[1, 2]")


ENDING = """
import atexit, threading
atexit.register(lambda: print([each.name for each in threading.enumerate() if each.name.startswith("unisono-")]))
import torch
from unisono import DataParallel  # what it registers runs before
kept = DataParallel(torch.nn.Linear(1, 1), ["cpu:0", "cpu:1"])
def train(*_):
    raise ValueError("no such digit")
kept.run_on_replicas(train)
"""


def test_no_thread_of_a_replica_outlives_the_interpreter():
    """torch aborts the process where it frees what such a thread has kept."""
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
    assert "ValueError: no such digit" in done.stderr
