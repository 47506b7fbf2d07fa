"""The family that these tests run on, `UNISONO_BACKEND` or the CPU, and the ways to run a body on its devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
from unisono.backends import resolve_devices

FAMILY = os.environ.get("UNISONO_BACKEND", "cpu")
RANKS = int(os.environ.get("CPU_NUM_DEVICES", "2"))
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
        return on_processes(lambda _: body())


def on_processes(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`xmp.spawn`, whose workers need not import the test modules."""
    modules = [sys.modules[name] for name in {fn.__module__, *_outer_modules(fn)}]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return xmp.spawn(fn, args, RANKS)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _outer_modules(fn: Callable[..., Any]) -> set[str]:
    """Where the functions that a closure holds are from."""
    held = [cell.cell_contents for cell in fn.__closure__ or ()]
    return {each.__module__ for each in held if callable(each) and hasattr(each, "__module__")}


ALONE, THREADS, PROCESSES = Way("alone", 1), Way("threads", RANKS), Way("processes", RANKS)


def mine(values: Any) -> torch.Tensor:
    """A tensor on the caller's device."""
    return torch.tensor(values).to(xm.xla_device())
