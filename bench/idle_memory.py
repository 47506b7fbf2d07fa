"""Memory of N idle workers that have passed a barrier: `unisono.spawn` against torch's own ways.

    python bench/idle_memory.py [--blocks 2] [--workers 8]

PSS divides shared memory among the processes that share it, so the sum over the workers is their use of the machine.
Helper processes, the zygote or torchrun's agent, are included. Not of the first group of a process, but of later ones.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch.distributed as dist
from blocks import interleave, options, show
from peers import WAYS

DEVICES = ("cpu",)


def idle(rank: int, directory: str) -> None:
    """Report by a named pipe, and wait by another one until the caller has measured."""
    dist.barrier()
    with (Path(directory) / "arrivals").open("wb", buffering=0) as file:
        file.write(b".")
    with (Path(directory) / "exit").open("rb", buffering=0) as file:
        file.read(1)


def mib_of(name: str, count: int) -> float:
    process = psutil.Process()
    others = process.children(recursive=True) if name != "unisono.spawn" else []  # our zygote
    with TemporaryDirectory() as directory:
        pipes = [f"{directory}/arrivals", f"{directory}/exit"]
        for each in pipes:
            os.mkfifo(each)
        arrivals, leave = (os.open(each, os.O_RDWR) for each in pipes)
        group = threading.Thread(target=WAYS[name], args=(idle, count, directory))
        group.start()
        for _ in range(count):
            assert os.read(arrivals, 1) == b"."
        used = sum(each.memory_full_info().pss for each in process.children(recursive=True) if each not in others)
        os.write(leave, count * b".")
        group.join()
        for file in (arrivals, leave):
            os.close(file)
        return used / 2**20


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=2, workers=8)
    variants = {name: partial(mib_of, name, arguments.workers) for name in WAYS}
    show(f"{arguments.workers} idle workers", interleave(variants, arguments.blocks), unit="MiB")


if __name__ == "__main__":
    main()
