"""Ctrl-C at a known moment: when the main thread sleeps in a wait."""

from __future__ import annotations

import signal
import threading
from pathlib import Path


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
