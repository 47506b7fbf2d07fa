"""The threads under a DataParallel: one outcome for each piece of work, whatever interrupts the waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from unisono.comm.outcome import Outcome
from unisono.threads import replicas
from unisono.threads.replicas import ReplicaThreads

PATIENCE_S = 60.0


def unexpected(error: BaseException) -> None:
    raise AssertionError("nothing interrupted") from error


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


@pytest.mark.slow
def test_no_thread_of_a_replica_outlives_the_interpreter():
    """torch aborts the process where it frees what such a thread has kept."""
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
    assert "ValueError: no such digit" in done.stderr
