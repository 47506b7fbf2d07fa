"""The machine-readable side of a run: lines of JSON, one clock, exit codes, and how far the ranks are."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from faults import Script
from recorded_runs import read_run

from unisono.backends.cpu import CpuBackend
from unisono.errors import ClosedError, StoppedError, WorkerDiedError
from unisono.launch.exit_codes import exit_code_of
from unisono.launch.heartbeat import HeartbeatSender
from unisono.launch.options import Output
from unisono.launch.spawn import spawn
from unisono.launch.watching import clock
from unisono.launch.watching.json_lines import describe_line
from unisono.parallel.optimizer import backward
from unisono.world import solo_world, use_world


@pytest.mark.slow
def test_each_line_of_a_worker_is_an_object(tmp_path):
    source = """
import sys
from unisono.launch.options import Output
from unisono.launch.spawn import spawn

def talk(index):
    print("one\\ntwo")
    sys.stderr.write('10 %\\r20 %\\r"quoted" \\u00fc\\nno end')

spawn(talk, nprocs=2, output=Output(format="json"))
"""
    with Script(source, tmp_path) as script:
        code, output, errors = script.end()
    assert code == 0
    shown = [json.loads(line) for line in (output + errors).splitlines()]
    for rank in range(2):
        lines = [(each["stream"], each["text"]) for each in shown if each["rank"] == rank]
        assert [text for stream, text in lines if stream == "stdout"] == ["one", "two"]
        assert [text for stream, text in lines if stream == "stderr"] == ["10 %", "20 %", '"quoted" ü', "no end"]
    assert all(abs(clock.to_seconds(each["time"]) - time.time()) < 600 for each in shown)


def test_a_line_says_what_it_showed_last():
    assert json.loads(describe_line(3, "stderr", b"10 %\r20 %\r\n"))["text"] == "20 %"


def test_there_is_one_clock():
    at = 1_795_000_000.125
    assert clock.to_text(at) == datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    assert clock.to_seconds(clock.to_text(at)) == at
    assert abs(clock.to_seconds(clock.now()) - time.time()) < 60


def stopped_by_caller():
    error = ClosedError("as the calling process asked")
    error.__cause__ = WorkerDiedError("", 0, -signal.SIGTERM)
    return error


CODES = {
    "well": (None, 0),
    "an exception": (ValueError(), 1),
    "sys.exit(7)": (WorkerDiedError("", 0, 7), 7),
    "sys.exit(0)": (WorkerDiedError("", 0, 0), 1),
    "sys.exit(512)": (WorkerDiedError("", 0, 512), 1),
    "a signal": (WorkerDiedError("", 0, -signal.SIGSEGV), 139),
    "stop()": (stopped_by_caller(), 143),
    "unknown": (WorkerDiedError("", 0, None), 1),
    "an agreed stop": (StoppedError([]), 143),
    "a signal to an agent": (SystemExit(129), 129),
    "Ctrl-C": (KeyboardInterrupt(), 130),
}


@pytest.mark.parametrize("name", CODES)
def test_each_end_has_its_exit_code(name):
    error, code = CODES[name]
    assert exit_code_of(error) == code


def test_a_run_says_its_versions_its_end_and_its_exit_code(tmp_path):
    with pytest.raises(WorkerDiedError):
        spawn(lambda index: os._exit(3), nprocs=2, output=Output(tmp_path))
    run = read_run(tmp_path / "latest")
    assert run.facts["versions"]["torch"] == torch.__version__
    assert run.facts["exit_code"] == 3
    assert {**run.events[-1], "time": ""}.items() >= {"event": "finished", "state": "failed", "exit_code": 3}.items()
    spawn(lambda index: None, nprocs=2, output=Output(tmp_path))
    run = read_run(tmp_path / "latest")
    assert (run.facts["exit_code"], run.events[-1]["state"]) == (0, "finished")


def test_a_pulse_has_step_loss_and_samples_per_second():
    world = solo_world()
    with use_world(world):
        taker = HeartbeatSender(world)
        track = world.timeline.loop()
        model = torch.nn.Linear(2, 1)
        loss = model(torch.ones(4, 2)).sum()
        backward(loss)
        track.count("samples", 4)
        track.count("steps")
        first, second = taker.take(), taker.take()
    assert (first.step, first.loss) == (1, loss.item())
    assert first.samples_per_s > 0.0
    assert second.samples_per_s == 0.0
    assert second.progress == first.progress


def test_a_pulse_waits_for_no_loss_that_a_device_has_not_come_to():
    class Behind(CpuBackend):
        has_come = False

        def mark(self, device: torch.device, tensors: Any = ()) -> str:
            return "a mark"

        def is_reached(self, mark: Any) -> bool:
            return self.has_come

    class Loss(torch.Tensor):
        def __float__(self) -> float:
            assert backend.has_come, "it waits for the device"
            return 2.5

    backend = Behind()
    world = solo_world(backend)
    taker, track = HeartbeatSender(world), world.timeline.loop()
    track.loss = torch.zeros(()).as_subclass(Loss)
    assert [taker.take().loss, taker.take().loss] == [None, None]
    backend.has_come = True
    assert taker.take().loss == 2.5
    backend.has_come = False
    assert taker.take().loss == 2.5  # the last that is known
