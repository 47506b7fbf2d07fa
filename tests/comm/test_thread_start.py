"""A thread's start, interrupted at every moment: all have run, or none ever was."""

from __future__ import annotations

import threading
import time

import pytest
from interrupts import interrupting

from unisono.comm.thread_start import start_threads

PATIENCE_S = 20.0


def test_wherever_an_interrupt_strikes_no_thread_is_left_about_to_begin():
    at, is_reached = 0, True
    while is_reached:
        ran = threading.Event()
        thread = threading.Thread(target=ran.set, name=f"unisono-start-{at}", daemon=True)
        is_reached = interrupting(
            at, ("threading.py", "comm/thread_start.py"), lambda thread=thread: start_threads([thread])
        )
        if thread.ident is not None:
            assert ran.wait(PATIENCE_S)
        at += 1
    assert at > 3
    deadline = time.monotonic() + PATIENCE_S
    while left := [each.name for each in threading.enumerate() if each.name.startswith("unisono-start-")]:
        assert time.monotonic() < deadline, left


def test_a_thread_that_cannot_start_tells_why():
    thread = threading.Thread(target=int, name="unisono-twice")
    start_threads([thread])
    thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        start_threads([thread])
