"""gloo's greetings, which it writes to standard output from C++ when ranks have connected, before torch 2.13."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def suppress_greetings() -> Iterator[None]:
    """Keep gloo's greetings out of standard output, and with them what other threads print at that moment."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        yield
        return
    with contextlib.ExitStack() as stack, open(os.devnull, "wb") as nowhere:
        with contextlib.suppress(OSError):  # standard output may be closed
            stdout = os.dup(1)
            stack.callback(os.close, stdout)
            stack.callback(os.dup2, stdout, 1)
            os.dup2(nowhere.fileno(), 1)
        yield
