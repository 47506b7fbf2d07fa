"""A test that hangs fails alone, and its report has the stacks of all threads and what the workers said last.

At the limit, SIGALRM raises in the main thread, wherever Python runs or waits, and again every few seconds if tidying
up hangs, too. What is stuck in C is beyond signals: a second watch, in C itself, writes down the stacks and ends the
process; pytest-xdist fails the test, and starts another process for the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

AGAIN_S = 20.0  # between interrupts of a test that does not end
ENDED_AFTER_S = 60.0  # after the limit
_OUTPUT_S = 1.0  # which the workers' stacks take to be here

_last_words = pytest.StashKey[Path]()  # where the second watch writes, if it must


def pytest_configure(config: pytest.Config) -> None:
    """Every process of pytest-xdist has a file of its own, in a directory that all of them know."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    config.stash[_last_words] = Path(tempfile.gettempdir()) / f"last-words-{name}"


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Arm both watches, in place of pytest-timeout's own."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        pytest.fail(f"the test ran for more than {settings.timeout:g} s\n\n{_describe_threads()}")

    last_words = item.config.stash[_last_words].open("w")
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    faulthandler.dump_traceback_later(settings.timeout + ENDED_AFTER_S, exit=True, file=last_words)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()
        last_words.close()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # where pytest-timeout looks for it
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """In the process that hands out the tests: one of the others has died over this one."""
    words = Path(tempfile.gettempdir()) / f"last-words-{report.node.gateway.id}"  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        if stacks := words.read_text():
            report.sections.append(("stacks of all threads, when the process was ended", stacks))


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
    sys.stdout.flush()
    sys.stderr.flush()


def _workers() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("unisono-rank-"):
                yield process
