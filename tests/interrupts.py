"""Ctrl-C at a known moment: when the main thread sleeps in a wait; or at every moment, one after the other.

The interpreter looks for signals at the beginning of a function, after a call of C and where a loop jumps back.
"""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


def interrupt_main_thread() -> None:
    """Send SIGINT to the main thread, from another one, once it sleeps.

    A signal that comes just before the sleep is seen after it only; a person at a keyboard never hits that moment.
    """
    main = threading.main_thread()
    assert main.ident is not None
    stat = Path(f"/proc/self/task/{main.native_id}/stat")
    asleep = 0
    while asleep < 5:
        state = stat.read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        threading.Event().wait(0.004)  # without the interpreter's lock, so that it is not for that lock that it sleeps
    signal.pthread_kill(main.ident, signal.SIGINT)


def interrupting(at: int, files: tuple[str, ...], fn: Callable[[], Any]) -> bool:
    """Call `fn` and raise KeyboardInterrupt at the `at`-th moment at which it can come to this thread in those files.

    Returns:
        Whether it came so far.
    """
    if sys.version_info >= (3, 12):
        pytest.skip("from Python 3.12 on, the opcodes of a function are traced from its second call on")
    left = at
    latest: dict[FrameType, str] = {}  # the bytecode that each frame has run last

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "call" and frame.f_back in latest:
            latest[frame.f_back] = "a call of Python"
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, latest[frame] = latest.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= before.startswith(("RESUME", "CALL")) or "JUMP_BACKWARD" in before
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    tracing = sys.gettrace()
    gc.disable()  # what others have left would be finalized in between, and be interrupted
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
        gc.enable()
        latest.clear()
    return False
