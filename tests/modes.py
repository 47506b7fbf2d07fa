"""The three ways in which a function runs on every rank: alone, on a DataParallel's threads, in worker processes.

And the family of devices on which: `pytest --backend xla` runs what goes through here on that one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from unisono import DataParallel, DeviceIterator, DeviceLoader, current_world, spawn, warm
from unisono.devices import get_backend
from unisono.tree import tree_map

FAMILY = os.environ.get("UNISONO_BACKEND", "cpu")  # `pytest --backend` has put it there, for workers, too
PRELOADED = ("torch._dynamo", "unisono.accelerator", "torch.distributed.optim", "pytest", "modes")
PATIENCE = timedelta(seconds=90)  # well inside the test's own time limit
HOST = torch.device("cpu")  # where a body makes what lies in main memory, as data sets do


def devices(count: int) -> list[str]:
    """The family's first devices; where there are fewer, the test is skipped."""
    if FAMILY != "cpu" and count > get_backend(FAMILY).device_count():
        import pytest  # here: workers import this module, or what does

        pytest.skip(f"there are no {count} {FAMILY} devices here", allow_module_level=True)
    return [f"{FAMILY}:{index}" for index in range(count)]


@dataclass(frozen=True)
class Mode:
    """One way to run on `ranks` ranks."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return self.name if self.ranks == 1 else f"{self.name}-{self.ranks}"

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """`body()` on every rank, in its world: the results by rank, or the first cause raised."""
        if self.name == "solo":
            return [_there(body)]
        if self.name == "threads":
            return self._replicas()(lambda *_: _there(body), [])
        preload()
        devices(self.ranks)
        with by_value(body):
            return spawn(lambda _: _there(body), nprocs=self.ranks, cores=1, backend=FAMILY, timeout=PATIENCE)

    def told(self, body: Callable[[], Any], error: type[Exception] = Exception) -> list[str]:
        """What each rank is told by an error of this type in `body`."""
        with by_value(body):
            return self.run(lambda: told(body, error))

    def loop(self, body: Callable[[DeviceIterator | DeviceLoader], Any], loader: Iterable[Any]) -> list[Any]:
        """`body(device_loader)` on every rank, over the loader as that mode deals it."""
        if self.name == "threads":
            return self._replicas()(lambda model, device_loader, *_: _there(lambda: body(device_loader)), loader)
        return self.run(lambda: body(DeviceLoader(loader)))

    def _replicas(self) -> DataParallel:
        return DataParallel(nn.Identity(), devices(self.ranks))


def told(call: Callable[[], Any], error: type[Exception] = Exception) -> str:
    """What it raises, with its notes and its cause; and what it returns, where it should not."""
    try:
        return f"returned {call()}"
    except error as raised:
        cause, shown = (
            raised.__cause__,
            "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", ())]),
        )
        return shown + (f" <- {type(cause).__name__}: {cause}" if cause else "")


SOLO = Mode("solo", 1)
THREADS_2, THREADS_3, THREADS_4 = (Mode("threads", ranks) for ranks in (2, 3, 4))
PROCESSES_2 = Mode("processes", 2)


def on(ranks: int, body: Callable[[], Any]) -> Any:
    """What `body` returns on rank zero, in a world of so many ranks."""
    return (SOLO if ranks == 1 else Mode("processes", ranks)).run(body)[0]


def each_of(modes: Iterable[Mode]) -> Any:
    """A fixture: a test that takes it runs in each of these."""
    import pytest  # as above

    return pytest.fixture(params=modes, ids=str)(lambda request: request.param)


def preload() -> None:
    """Let the zygote import what most bodies need, and the first optimizer: else each worker does."""
    warm(preload=PRELOADED)


def fitting(*modes: Mode, workers: bool = False) -> list[Mode]:
    """Those modes that the family has the devices for; on the CPU all. Elsewhere threads stand for one rank, too.

    Args:
        workers: whether processes come along elsewhere, too, where starting them takes seconds.
    """
    if FAMILY == "cpu":
        return list(modes)
    count = get_backend(FAMILY).device_count()
    found = [mode for mode in modes if mode.ranks <= count and (workers or mode.name != "processes")]
    return [mode for mode in found if mode.name != "solo" or len(found) == 1]


def scaling(*modes: Mode, workers: bool = False) -> list[Mode]:
    """The same for tests that take any number of ranks: elsewhere, threads are on all devices of the family at once."""
    if FAMILY == "cpu":
        return list(modes)
    every = Mode("threads", get_backend(FAMILY).device_count())
    if every.ranks == 1 and SOLO not in modes:
        return []
    return fitting(*dict.fromkeys(every if mode.name == "threads" else mode for mode in modes), workers=workers)


def in_main_memory(values: Any) -> Any:
    """Copies of what lies on devices, wherever it is in nested containers."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, values)


def _there(body: Callable[[], Any]) -> Any:
    """`body()`, whose tensors and modules are made on the rank's device; what it returns, in main memory."""
    if FAMILY == "cpu":
        return body()
    with current_world().device:
        result = body()
    return result if current_world().is_of_processes else in_main_memory(result)  # what is sent arrives there


@contextlib.contextmanager
def hearing(logger: str) -> Iterator[list[str]]:
    """What this logger says in the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


@contextlib.contextmanager
def by_value(*functions: Callable[..., Any]) -> Iterator[None]:
    """Workers need not import the test modules of these functions, and pytest with them."""
    known = cloudpickle.list_registry_pickle_by_value()
    names = {getattr(each, "func", each).__module__ for each in functions}  # also of a partial
    modules = [sys.modules[name] for name in (names | {__name__}) - known]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def default_group(path: Path, backend: str | None = "gloo") -> Iterator[dist.Store]:
    """The store of a default process group of one, which the test may destroy."""
    made = dist.FileStore(str(path), 1)
    dist.init_process_group(backend, store=made, rank=0, world_size=1)
    try:
        yield made
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
