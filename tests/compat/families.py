"""The family that these tests run on, `UNISONO_BACKEND` or the CPU, and the ways to run a body on its devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from modes import by_value
from torch import nn

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
from unisono.devices import get_backend, resolve_devices

FAMILY = os.environ.get("UNISONO_BACKEND", "cpu")
RANKS = 2 if FAMILY == "cpu" else min(int(os.environ.get("CPU_NUM_DEVICES", "2")), get_backend(FAMILY).device_count())
DEVICES = [f"{FAMILY}:{rank}" for rank in range(RANKS)]

for backend, device in reversed(resolve_devices(DEVICES)):
    backend.activate(device)  # a runtime's settings, which it puts into the environment, are no test's doing


@dataclass(frozen=True)
class Way:
    """One way to run on `ranks` ranks."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return self.name

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """`body()` on every rank: the results by ordinal, or the first cause raised."""
        if self.name == "alone":
            return [body()]
        if self.name == "threads":
            return dp.DataParallel(nn.Identity(), DEVICES)(lambda *_: body(), [])
        with by_value(body, on_processes):
            return xmp.spawn(lambda _: body(), nprocs=RANKS)


def on_processes(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`xmp.spawn`, whose workers need not import the test modules."""
    with by_value(fn, on_processes):
        return xmp.spawn(fn, args, RANKS)


ALONE, THREADS, PROCESSES = Way("alone", 1), Way("threads", RANKS), Way("processes", RANKS)


def mine(values: Any) -> torch.Tensor:
    """A tensor on the caller's device."""
    return torch.tensor(values).to(xm.xla_device())
