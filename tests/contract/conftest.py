"""The implementations that a contract suite runs against."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from faults import Door
from modes import FAMILY

from unisono.comm.outcome import Outcome, first_cause
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.threads import ThreadCommunicator
from unisono.devices import get_backend
from unisono.devices.cpu import CpuBackend
from unisono.launch.spawn import spawn
from unisono.protocols import Communicator
from unisono.tree import tree_map
from unisono.world import World, current_world, thread_worlds

HERE = Path(__file__).parent

Body = Callable[[Communicator], Any]

PATIENCE = timedelta(seconds=80)  # inside the test's own time limit, so that a hang is told by the law's message


@dataclass(frozen=True)
class Ranks:
    """One way for ranks to meet; `run` calls a function on each of them."""

    mode: str
    size: int

    def __str__(self) -> str:
        return self.mode if self.size == 1 else f"{self.mode}-{self.size}"

    def run(self, body: Body, timeout: timedelta = PATIENCE) -> list[Any]:
        """`body(comm)` on every rank: the results by rank, or the first cause raised.

        A rank leaves its world when it returns and aborts it when it raises, as workers and replicas do. Nobody may
        have waited for the time-out, which is a last resort.
        """
        began = time.monotonic()
        results = self._run(body, timeout)
        assert timeout < PATIENCE or time.monotonic() - began < PATIENCE.total_seconds() / 2
        return results

    def _run(self, body: Body, timeout: timedelta) -> list[Any]:
        if self.mode == "solo":
            return [body(ThreadCommunicator.group(1)[0])]
        if self.mode == "threads":
            return _run_threads(body, self.size, timeout)
        there, process_group = (_on_accelerator, "gloo") if self.mode == "accelerators" else (_there, None)
        return spawn(
            lambda index: there(body, current_world()),
            nprocs=self.size,
            cores=1,
            timeout=timeout,
            hang_timeout_s=PATIENCE.total_seconds(),
            backend=FAMILY,
            process_group=process_group,
        )


class Accelerator(CpuBackend):
    """Stands in for one: its work is marked, and watched by the communicator, as that of a GPU is."""

    def __init__(self) -> None:
        self._marks = 0

    def mark(self, device: torch.device, tensors: Any = ()) -> int:
        self._marks += 1
        return self._marks

    def is_reached(self, mark: int) -> bool:
        return mark < self._marks  # by the time of the next one


SOLO, THREADS_2, THREADS_4, PROCESSES_2, PROCESSES_3, ACCELERATORS_2 = (
    Ranks("solo", 1),
    Ranks("threads", 2),
    Ranks("threads", 4),
    Ranks("processes", 2),
    Ranks("processes", 3),
    Ranks("accelerators", 2),
)
IN_THE_PLACE_OF_GPUS = [pytest.param(ACCELERATORS_2, marks=pytest.mark.slow)] if FAMILY == "cpu" else []


def here(*ways: Ranks) -> list[Ranks]:
    """Those that the family has devices for."""
    count = get_backend(FAMILY).device_count()
    return [each for each in ways if FAMILY == "cpu" or each.size <= count]


@pytest.fixture(params=[*here(SOLO, THREADS_2, THREADS_4, PROCESSES_2), *IN_THE_PLACE_OF_GPUS], ids=str)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Every implementation."""
    return request.param


@pytest.fixture(params=[*here(THREADS_2, THREADS_4, PROCESSES_2), *IN_THE_PLACE_OF_GPUS], ids=str)
def peers(request: pytest.FixtureRequest) -> Ranks:
    """Every implementation in which a rank has peers, or the one of that name."""
    if isinstance(request.param, Ranks):
        return request.param
    mode, _, size = request.param.partition("-")
    if not here(Ranks(mode, int(size))) or (mode == "accelerators" and not IN_THE_PLACE_OF_GPUS):
        pytest.skip(f"there are no {size} {FAMILY} devices here")
    return Ranks(mode, int(size))


@pytest.fixture(params=here(THREADS_4, PROCESSES_3), ids=str)
def many_peers(request: pytest.FixtureRequest) -> Ranks:
    """Every implementation in which a rank has peers, and peers of peers."""
    return request.param


@pytest.fixture(params=here(SOLO, THREADS_4, PROCESSES_3), ids=str)
def rounding_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Every implementation, with sizes at which the order of a sum matters."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Both contracts are for every family; before marks are looked at."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.any_family)


@pytest.fixture(autouse=True, scope="module")
def _functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers need not import the test module, and pytest with it; nor this one, whose name others have as well."""
    modules = [request.node.obj, sys.modules[__name__]]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door.at(tmp_path / "door")


def _there(body: Body, world: World) -> Any:
    """`body(comm)`, whose tensors are made on the rank's device; what it returns, in main memory."""
    if FAMILY == "cpu":
        return body(world.comm)
    world.backend.activate(world.device)
    with world.device:
        result = body(world.comm)
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, result)


def _on_accelerator(body: Body, world: World) -> Any:
    """The same with a communicator that watches its device, in a group of gloo, as two ranks on one GPU have it."""
    seat: Any = world.comm
    store = dist.PrefixStore("accelerators", seat._reasons._store)  # type: ignore[attr-defined]
    comm = ProcessCommunicator(world.device, store, backend=Accelerator(), here=seat._own_here)
    assert comm._watch is not None
    object.__setattr__(world, "comm", comm)  # which the worker leaves or breaks at its end
    return _there(body, world)


def _run_threads(body: Body, size: int, timeout: timedelta) -> list[Any]:
    outcomes: dict[int, Outcome[Any]] = {}

    def replica(world: World) -> None:
        outcome = Outcome.capture(_there, body, world)
        if outcome.error is None:
            world.comm.leave()
        else:
            world.comm.abort(outcome.error)
        outcomes[world.rank] = outcome

    worlds = thread_worlds([get_backend(FAMILY).device(rank) for rank in range(size)], timeout=timeout)
    threads = [threading.Thread(target=replica, args=(world,), name=f"rank-{world.rank}") for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if failures:
        failures[first_cause(failures)].unwrap()
    return [outcomes[rank].unwrap() for rank in range(size)]
