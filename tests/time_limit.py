"""A test that hangs fails alone, and its report has the stacks of all threads and what the workers said last.

At the limit, SIGALRM raises in the main thread, wherever Python runs or waits, and again every few seconds if the
teardown hangs, too. What is stuck in C is beyond signals: a second watch, in C itself, writes the stacks and ends the
process; pytest-xdist fails the test, and starts another process for the rest. The report then has no output of workers.

pytest-timeout reads the limits. Its own watches end with the first failure of a test, when its teardown may hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any, TextIO

import psutil
import pytest
import pytest_timeout
from running_again import command

AGAIN_S = 20.0  # between interrupts of a test that does not end
ENDED_AFTER_S = 60.0  # after the limit
_OUTPUT_S = 1.0  # which the workers' stacks take to be here

_last_words = pytest.StashKey[TextIO]()  # where the second watch writes, if it must
_limit_s = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """While stderr is that of the terminal: later, output is captured."""
    config.stash[_last_words] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_last_words].close()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Arm both watches, in place of pytest-timeout's own."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if not pytest_timeout.is_debugging():
            pytest.fail(f"the test ran for more than {settings.timeout:g} s\n\n{_describe_threads()}")

    item.stash[_limit_s] = settings.timeout
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    _arm_second_watch(item)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """Go on watching: it is called for each failure."""
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """pytest, too, cancels the second watch at a failure."""
    if _limit_s in item.stash:
        _arm_second_watch(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


def _arm_second_watch(item: pytest.Item) -> None:
    limit_s = item.stash[_limit_s] + ENDED_AFTER_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_last_words])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """In the process that hands out the tests: one of the others has died over this one."""
    report.sections.append(("to run it again", command(sched.config, crashitem)))


def _describe_threads() -> str:
    """The stacks of all threads of this process; the workers write theirs where they write their errors."""
    _ask_workers()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _ask_workers() -> None:
    """Each worker has registered that signal for its stacks (`unisono.launch.worker`)."""
    asked = False
    for worker in _workers():
        with contextlib.suppress(psutil.Error):
            worker.send_signal(signal.SIGUSR1)
            asked = True
    if asked:
        time.sleep(_OUTPUT_S)


def _workers() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("unisono-rank-"):
                yield process
