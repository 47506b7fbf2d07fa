"""How soon the caller of `spawn` is notified of a failure, while the other ranks are in a collective.

    python bench/failures.py [--blocks 3] [--workers 2]

Rank 1 raises, or is killed; the time ends where the caller has the exception, for torchrun where its process ends.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from blocks import interleave, options, show
from peers import WAYS, Work, latest, stamp

DEVICES = ("cpu",)


def by_raise(rank: int, directory: str) -> None:
    fail(rank, directory, is_killed=False)


def by_sigkill(rank: int, directory: str) -> None:
    fail(rank, directory, is_killed=True)


def fail(rank: int, directory: str, is_killed: bool) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        stamp(directory, "failed")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("as planned")
    dist.all_reduce(torch.ones(1))


def seconds_of(name: str, work: Work, count: int) -> float:
    with TemporaryDirectory() as directory:
        with suppress(Exception):
            WAYS[name](work, count, directory)
        return time.monotonic() - latest(directory, "failed")


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=3, workers=2)
    for what, work in (("a raise", by_raise), ("SIGKILL", by_sigkill)):
        variants = {name: partial(seconds_of, name, work, arguments.workers) for name in WAYS}
        show(what, interleave(variants, arguments.blocks))


if __name__ == "__main__":
    main()
