"""How long a whole command takes whose ranks only meet: `unisono run`, and from `unisono warm`, against torchrun.

    python bench/commands.py [--blocks 5] [--ranks 2]

The script imports torch, initialises its group and passes one barrier. From the command to its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from blocks import interleave, options, show

DEVICES = ("cpu",)

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
UNISONO = str(Path(sys.executable).with_name("unisono"))


def seconds_of(command: list[str], environ: dict[str, str]) -> float:
    began = time.monotonic()
    subprocess.run(command, env=environ, capture_output=True, check=True)
    return time.monotonic() - began


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=5, ranks=2)
    ranks = str(arguments.ranks)
    with TemporaryDirectory() as directory:
        script = Path(directory, "train.py")
        script.write_text(SCRIPT)
        warm = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}  # the process of this benchmark alone
        fresh = {**warm, "TMPDIR": "/var/tmp"}
        ours = [UNISONO, "run", "-n", ranks, "--backend", "cpu", str(script)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([UNISONO, "warm"], env=warm, check=True)
        try:
            variants = {
                "unisono run": partial(seconds_of, ours, fresh),
                "unisono run, warm": partial(seconds_of, ours, warm),
                "torchrun": partial(seconds_of, [*torchrun, str(script)], fresh),
            }
            times = interleave(variants, arguments.blocks)
        finally:
            subprocess.run([UNISONO, "warm", "--stop"], env=warm, check=True)
        show(f"{ranks} ranks", times, [("unisono run", "torchrun"), ("unisono run, warm", "torchrun")])


if __name__ == "__main__":
    main()
