"""gloo's message on standard output when ranks have connected: before torch 2.13, a line from each in the user's
output.

*Threads:* others may print meanwhile; their output appears when the block ends. The descriptor is the whole process's.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

import torch

_STDOUT = 1
_GREETS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
_GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. [^\n]*\n")


@contextlib.contextmanager
def suppress_greetings() -> Iterator[None]:
    """Keep gloo's greetings, and nothing else, out of standard output."""
    if not _GREETS:
        yield
        return
    try:
        stdout = os.dup(_STDOUT)
    except OSError:  # standard output is closed
        yield
        return
    with tempfile.TemporaryFile() as kept:
        # gloo writes from C++, so the descriptor is replaced; replacing `sys.stdout` would not be enough.
        os.dup2(kept.fileno(), _STDOUT)
        try:
            yield
        finally:
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            kept.seek(0)
            _write(_GREETING.sub(b"", kept.read()))


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        while text:
            text = text[os.write(_STDOUT, text) :]
