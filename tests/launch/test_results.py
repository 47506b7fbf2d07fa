"""Results on their way to the caller: whole, and shared as they were."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy
import pytest
import torch
from faults import Script

from unisono.comm.outcome import Outcome
from unisono.launch.reports import Inbox, Kind, Reporter

LARGE = 100_000  # elements


def passed_on(value):
    """A value through the pipe between a worker and its supervisor."""
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    sender = threading.Thread(target=reporter.send, args=(Kind.OUTCOME, Outcome(value=value).to_bytes()))
    sender.start()
    messages: list[tuple[Kind, bytes]] = []
    inbox = Inbox()
    while inbox.read(reading):
        messages += inbox.take()
    os.close(reading)
    sender.join()
    [(_, data)] = messages
    return Outcome.from_bytes(data).unwrap()


VALUES = {
    "a large tensor": torch.arange(LARGE),
    "no elements": torch.empty(0, 3),
    "half precision": torch.rand(LARGE).to(torch.bfloat16),
    "complex, conjugated": torch.rand(LARGE, dtype=torch.complex64).conj(),
    "strided": torch.arange(LARGE).view(100, -1).t()[::2],
    "that requires grad": torch.rand(LARGE, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.rand(LARGE)),
    "sparse": torch.rand(300, 300).relu().to_sparse(),
    "an array of numpy": numpy.arange(LARGE),
    "many": [torch.full((LARGE,), each) for each in range(5)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_arrives_as_it_was(name):
    value, found = VALUES[name], passed_on(VALUES[name])
    assert type(found) is type(value)
    pairs = zip(value, found, strict=True) if isinstance(value, list) else [(value, found)]
    for ours, theirs in pairs:
        torch.testing.assert_close(torch.as_tensor(theirs), torch.as_tensor(ours), rtol=0, atol=0)
        if isinstance(ours, torch.Tensor):
            assert (theirs.requires_grad, theirs.dtype, theirs.layout) == (ours.requires_grad, ours.dtype, ours.layout)


@pytest.mark.parametrize("size", [10, LARGE])
def test_tensors_that_share_memory_still_do_and_it_can_grow(size):
    whole = torch.zeros(size)
    found, part = passed_on((whole, whole[1:3]))
    part += 1
    assert found[:4].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert found.resize_(2 * size).shape == (2 * size,)
    assert whole.sum() == 0


def received(raw, step):
    """The messages in some bytes that come in pieces of a size."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    inbox, messages = Inbox(), []
    for begin in range(0, len(raw), step):
        os.write(writing, raw[begin : begin + step])
        with contextlib.suppress(BlockingIOError):
            while True:
                inbox.read(reading)
                messages += inbox.take()
    for end in (reading, writing):
        os.close(end)
    return messages


@pytest.mark.parametrize("step", [1, 1009, 65536])
def test_messages_are_the_same_however_they_arrive(step):
    value = [torch.arange(9_000), "text", torch.arange(10_000)]
    reading, writing = os.pipe()
    sender = threading.Thread(target=send_all, args=(Reporter(writing), Outcome(value=value).to_bytes()))
    sender.start()
    with open(reading, "rb") as file:
        raw = file.read()
    sender.join()
    note, (_, result), second_note, end = received(raw, step)
    assert note == second_note == (Kind.NOTE, b"a note")
    assert end == (Kind.OUTCOME, b"")
    first, text, second = Outcome.from_bytes(result).unwrap()
    assert (first.tolist(), text, second.tolist()) == (value[0].tolist(), "text", value[2].tolist())


def send_all(reporter, result):
    reporter.send(Kind.NOTE, b"a note")
    reporter.send(Kind.PULSE, result)
    reporter.send(Kind.NOTE, b"a note")
    reporter.send(Kind.OUTCOME)


LARGE = """
import re, sys
from pathlib import Path
import torch
from unisono.launch.spawn import spawn

SIZE = 100_000_000

def memory(name):
    return 1024 * int(re.search(rf"{name}:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

def make(index, kind):
    if index == 1:
        return None
    return bytes(SIZE) if kind == "bytes" else torch.ones(SIZE, dtype=torch.uint8)

spawn(make, ("bytes",), nprocs=2)
for kind in "bytes", "tensor":
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    found = spawn(make, (kind,), nprocs=2)[0]
    print(kind, len(found), (memory("VmHWM") - before) / SIZE)
    del found
"""


@pytest.mark.slow
def test_a_large_result_takes_the_callers_memory_twice_and_no_more(tmp_path):
    with Script(LARGE, tmp_path) as script:
        code, output, errors = script.end()
    assert code == 0, errors
    for line in output.splitlines():
        kind, size, factor = line.split()
        assert int(size) == 100_000_000
        assert float(factor) <= 2.2, kind
    assert len(output.splitlines()) == 2
