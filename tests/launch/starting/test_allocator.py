"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono import spawn

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")

BLOCKS, BYTES = 16, 4 << 20


def faults(index):
    """Page faults of a step that fills and frees blocks, once their places in the heap have settled."""
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(BYTES // 4) for _ in range(BLOCKS)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_step_in_a_worker_reuses_the_memory_of_the_last():
    assert max(spawn(faults, nprocs=2, backend="cpu")) < BLOCKS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
@pytest.mark.slow
def test_who_tunes_the_allocator_is_left_alone(name: str, value: str) -> None:
    """In an interpreter of its own: the C library reads them when a program begins."""
    text = (
        "from unisono.launch.starting.allocator import keep_freed_memory\nkeep_freed_memory()\n"
        "from test_allocator import faults\nprint(faults(0))"
    )
    environment = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    found = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert int(found.stdout) >= BLOCKS * BYTES // resource.getpagesize()
