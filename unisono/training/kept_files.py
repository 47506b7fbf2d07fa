"""Keeps the files of a run as they are while its script runs again (`unisono replay`).

*Threads:* any thread that opens a file calls the guard.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The audit events that are refused, and how many paths each has.
_WRITES = {"open": 1, "os.remove": 1, "os.rename": 2, "os.truncate": 1, "shutil.rmtree": 1}


@contextmanager
def files_kept(directory: str) -> Iterator[None]:
    """During the block, this process and its forks cannot change, rename or remove files that are in the directory now,
    or below: PermissionError names the file. Hidden ones, such as caches, may be changed; what native code writes is
    not seen, except for torch.save."""
    began, is_over = time.time(), False

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if is_over or event not in _WRITES or (event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            return
        for path in args[: _WRITES[event]]:
            if isinstance(path, str | bytes | os.PathLike) and _is_kept(path):
                raise PermissionError(
                    f"a replay overwrites no file of the run, and the script would change {os.fsdecode(path)}; start "
                    "it in another directory, which has links to what it reads: --cwd DIR"
                )

    def _is_kept(path: Any) -> bool:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return False
        is_old = found.st_size > 0 and found.st_ctime < began  # an empty one may be a lock
        real = os.path.realpath(os.fsdecode(path))
        return is_old and real.startswith(directory + os.sep) and not real.startswith(os.path.join(directory, "."))

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):  # C++ writes it
            guard("open", (f, "wb", os.O_WRONLY))
        plain_save(obj, f, *args, **kwargs)

    sys.addaudithook(guard)  # which stays
    plain_save, torch.save = torch.save, save
    try:
        yield
    finally:
        is_over, torch.save = True, plain_save
