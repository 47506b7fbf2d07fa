"""How a run ends, as a number."""

from __future__ import annotations

import signal

import pytest

from unisono.errors import ClosedError, StoppedError, WorkerDiedError
from unisono.launch.run_target import exit_code_of


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
