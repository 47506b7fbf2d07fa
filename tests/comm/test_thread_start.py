"""A thread's start, interrupted at every moment: all have run, or none ever was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from interrupts import interrupting
from torch import nn

from unisono.checkpoint.background import start_save
from unisono.comm.thread_start import start_threads
from unisono.compat.torch_xla.core.steps import add_step_closure, mark_step
from unisono.errors import UnisonoError
from unisono.loading.device_loader import DeviceLoader
from unisono.threads.data_parallel import DataParallel

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


def loop_over_a_loader() -> None:
    next(iter(DeviceLoader([1, 2], device="cpu")))


def save_beside_the_loop() -> None:
    start_save(lambda: None, "saving").result()


def train_replicas() -> None:
    DataParallel(nn.Linear(1, 1), ["cpu:0", "cpu:1"])(lambda *_: None, [[1], [2]])


def end_a_step_with_closures() -> None:
    add_step_closure(lambda: None, run_async=True)
    mark_step()


@pytest.mark.parametrize("start", [loop_over_a_loader, save_beside_the_loop, train_replicas, end_a_step_with_closures])
def test_what_starts_threads_is_refused_where_they_would_be_none(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library does that replaces them (`monkey.patch_all()`): what waits for such a thread would wait for good."""
    with monkeypatch.context() as patched:
        patched.setattr(threading, "get_ident", lambda plain=threading.get_ident: plain())
        with pytest.raises(UnisonoError, match=f"needs Python's own threads .* and {__name__} has replaced"):
            start()
    start()
