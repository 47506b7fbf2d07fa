"""The monitor sees what a worker's whole tree uses, survives whatever vanishes, and costs next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from faults import SOON_S, until

from unisono.launch.reports import Pulse
from unisono.launch.watching import monitor as monitor_module
from unisono.launch.watching.monitor import Monitor, Sample

MIB = 1 << 20

IDLE = "input()"
BUSY = "while True: pass"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "held = b'x' * (64 << 20); print('ready', flush=True); input()"])
input()
child.kill()
child.wait()
print("reaped", flush=True)
input()
"""
BREEDER = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-S", "-c", "for _ in range(1_000_000): pass"])
"""


@pytest.fixture
def monitors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Monitor]]:
    """Makes monitors that look as often as they are told to, whatever it costs."""
    monkeypatch.setattr(monitor_module, "_REST", 0)
    with contextlib.ExitStack() as stack:
        yield lambda path=None, interval_s=0.02: stack.enter_context(contextlib.closing(Monitor(path, interval_s)))


@contextlib.contextmanager
def running(source: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        with process.stdin, process.stdout:
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def samples_to_come(monitor: Monitor, rank: int, count: int) -> list[Sample]:
    """The next so many samples of a rank, of those that are begun from now on."""
    at = time.time()
    until(lambda: sum(sample.at > at for sample in monitor.curve(rank)) > count)
    return [sample for sample in monitor.curve(rank) if sample.at > at][1:]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "unisono-monitor"]


# What it sees.


def test_a_busy_worker_and_an_idle_one_are_told_apart(monitors):
    monitor = monitors(interval_s=0.3)
    with running(BUSY) as busy, running(IDLE) as idle:
        monitor.watch(0, busy.pid)
        monitor.watch(1, idle.pid)
        samples_to_come(monitor, 1, 2)
        curves = monitor.curve(0), monitor.curve(1)
    assert [curve[0].cpu_percent for curve in curves] == [0, 0]
    assert curves[1][-1].cpu_percent < curves[0][-1].cpu_percent < 120
    assert curves[1][-1].cpu_percent < 10
    assert [{sample.pid for sample in curve} for curve in curves] == [{busy.pid}, {idle.pid}]


def test_the_memory_of_the_processes_below_counts_and_goes_with_them(monitors):
    monitor = monitors()
    with running(PARENT) as parent:
        assert parent.stdout.readline() == "ready\n"
        monitor.watch(3, parent.pid)
        together = samples_to_come(monitor, 3, 1)[-1]
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "reaped\n"
        alone = samples_to_come(monitor, 3, 1)[-1]
    assert together.rss > 64 * MIB > alone.rss > MIB


def test_the_cpu_time_of_children_that_come_and_go_is_seen(monitors):
    monitor = monitors(interval_s=0.3)
    with running(BREEDER) as breeder:
        monitor.watch(0, breeder.pid)
        shares = [sample.cpu_percent for sample in samples_to_come(monitor, 0, 3)]
    assert all(share >= 0 for share in shares)
    assert sum(shares) / len(shares) > 5  # of a core that others may want, too


def test_what_a_worker_tells_of_itself_stands_in_its_later_samples(monitors):
    monitor = monitors()
    with running(IDLE) as worker:
        monitor.watch(0, worker.pid)
        samples_to_come(monitor, 0, 1)
        monitor.tell_pulse(0, Pulse(1, device_bytes=5 * MIB, step=3))
        sample = samples_to_come(monitor, 0, 1)[-1]
        assert (sample.device_bytes, sample.step) == (5 * MIB, 3)
        assert monitor.curve(0)[0].device_bytes is None


# Who vanishes.


def test_a_worker_that_is_gone_keeps_its_curve_and_gets_no_more_samples(monitors):
    monitor = monitors()
    with running(IDLE) as gone, running(IDLE) as other:
        monitor.watch(0, gone.pid)
        monitor.watch(1, other.pid)
        samples_to_come(monitor, 0, 1)
        gone.kill()
        samples_to_come(monitor, 1, 2)  # a zombie all the while
        curve = monitor.curve(0)
        gone.wait()
        samples_to_come(monitor, 1, 2)
        assert monitor.curve(0) == curve
    assert curve[-1].rss > 0


def test_the_worker_that_takes_a_ranks_place_begins_a_curve_of_its_own(monitors):
    monitor = monitors()
    with running(IDLE) as first, running(IDLE) as second:
        monitor.watch(0, first.pid)
        monitor.tell_pulse(0, Pulse(1, device_bytes=5))
        samples_to_come(monitor, 0, 1)
        monitor.watch(0, second.pid)
        until(lambda: monitor.curve(0))
        assert {(sample.pid, sample.device_bytes) for sample in monitor.curve(0)} == {(second.pid, None)}


# The thread.


def test_there_is_no_thread_before_the_first_worker_nor_after_the_end():
    monitor = Monitor(None, interval_s=1000)
    assert not threads()
    monitor.watch(0, os.getpid())
    assert threads()
    start = time.monotonic()
    monitor.close()
    monitor.close()
    assert time.monotonic() - start < SOON_S
    assert not threads()
    monitor.watch(1, os.getpid())
    assert not threads()


def test_measuring_rests_a_hundred_times_as_long_as_it_took(monkeypatch):
    rests: list[float] = []
    monitor = Monitor(None, interval_s=0.0)
    monkeypatch.setattr(time, "thread_time", iter([1.0, 1.5, 2.0, 2.25]).__next__)
    monkeypatch.setattr(Monitor, "_measure_all", lambda self: None)
    monkeypatch.setattr(monitor._is_closed, "wait", lambda rest: rests.append(rest) or len(rests) > 2)
    monitor_module._sample(monitor)
    assert rests == [0.0, 50.0, 25.0]


# The file.


def test_samples_are_appended_to_the_file_as_they_are_in_memory(monitors, tmp_path):
    path = tmp_path / "samples.jsonl"
    monitor = monitors(path)
    with running(IDLE) as worker:
        monitor.watch(2, worker.pid)
        samples_to_come(monitor, 2, 2)
    monitor.close()
    lines = map(json.loads, path.read_text().splitlines())
    assert [(datetime.fromisoformat(each["time"]).timestamp(), each["rss"], each["pid"]) for each in lines] == [
        (each.at, each.rss, each.pid) for each in monitor.curve(2)
    ]


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(monitors, tmp_path, caplog):
    monitor = monitors(tmp_path / "missing" / "samples.jsonl")
    with running(IDLE) as worker:
        monitor.watch(0, worker.pid)
        samples_to_come(monitor, 0, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "missing/samples.jsonl" in caplog.text
