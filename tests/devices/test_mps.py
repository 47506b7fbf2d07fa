"""Several processes on the family of Apple's GPU, whose tensors no process group takes: it stands in, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from faults import PATIENCE_S
from modes import FAMILY, PROCESSES_2
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader
from twin import Case, State, assert_all_are, plain_run, run

from unisono import Accelerator, DeviceLoader, gather_report
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.selection import innermost, process_communicator
from unisono.comm.through_host import ThroughHostCommunicator
from unisono.devices.mps import MpsBackend
from unisono.launch.reports import beating
from unisono.loading import loader_plan
from unisono.report.timeline import Timeline
from unisono.strategies import DDP
from unisono.world import World, current_world, use_world

pytestmark = pytest.mark.skipif(FAMILY != "cpu", reason="a family stands in, on the CPU")

CASE = Case(23, 3, accumulate=2)


class StandIn(MpsBackend):
    """The family, on memory that is here."""

    moves_in_background = False

    def device_count(self) -> int:
        return 1

    def device(self, index: int) -> torch.device:
        return torch.device("cpu", index)

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        return batch, None

    def synchronize(self, device: torch.device) -> None:
        pass


@contextmanager
def on_stand_in() -> Iterator[World]:
    """The rank's world, on that family."""
    world, family = current_world(), StandIn()
    seat: Any = innermost(world.comm)
    store = dist.PrefixStore("stand-in", seat._reasons._store)  # type: ignore[attr-defined]
    comm = process_communicator(family, world.device, store, owns_group=False)
    with use_world(replace(world, backend=family, comm=comm)) as found:
        yield found


def test_ranks_meeting_in_main_memory_train_as_one_without_torchs_ddp() -> None:
    def body() -> tuple[State, type, type]:
        with on_stand_in() as world, patch.object(DistributedDataParallel, "__init__", side_effect=AssertionError):
            return run(CASE, strategy="ddp"), type(world.comm), type(innermost(world.comm))

    ranks = PROCESSES_2.run(body)
    assert_all_are([state for state, *_ in ranks], plain_run(CASE, 2))
    assert [kinds for _, *kinds in ranks] == [[ThroughHostCommunicator, ProcessCommunicator]] * 2


class OneThread(StandIn):
    """Notes which threads use it."""

    moves_in_background = True
    to_device = MpsBackend.to_device

    def memory(self, device: torch.device) -> int:
        return 0

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[str, set[str]] = {}

    def __getattribute__(self, name: str) -> Any:
        if name in USES:
            self.users.setdefault(name, set()).add(threading.current_thread().name)
        return super().__getattribute__(name)


USES = ("activate", "to_device", "wait_ready", "synchronize", "memory", "peak_memory")
USES += ("mark_step", "mark", "is_reached")


class Pulses:
    def __init__(self) -> None:
        self.has_two = threading.Event()
        self.seen: list[Any] = []

    def send(self, kind: Any, pulse: bytes) -> None:
        self.seen.append(pulse)
        if len(self.seen) > 1:
            self.has_two.set()


def batch(_: Any) -> tuple[torch.Tensor, PackedSequence]:
    """Of float64, and slow enough for the loop to have it read by another thread."""
    return torch.randn(500, 500, dtype=torch.float64), pack_sequence([torch.ones(2, dtype=torch.float64)])


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"num_workers": 1, "collate_fn": batch}], ids=["0", "workers"])
def test_only_the_loops_thread_uses_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    family, pulses = OneThread(), Pulses()
    monkeypatch.setattr(loader_plan, "resolve_devices", lambda devices: [(family, family.device(0))])
    world = replace(current_world(), backend=family, device=family.device(0), timeline=Timeline())
    source: Any = DataLoader(range(16), 2, **options) if "num_workers" in options else map(batch, range(8))
    with use_world(world), beating(world, pulses, 0.001):  # type: ignore[arg-type]
        loader = DeviceLoader(source, prefetch=options.get("prefetch", 2))
        network = torch.nn.Linear(500, 1)
        for inputs, packed in (batches := iter(loader)):
            assert inputs.dtype == packed.data.dtype == torch.float32  # the family has no float64
            network(inputs).square().mean().backward()
            batches.is_last()
        gather_report()
        assert pulses.has_two.wait(PATIENCE_S)
    assert {name for users in family.users.values() for name in users} == {threading.current_thread().name}
    assert family.users.keys() >= {"to_device", "wait_ready", "memory"}


def test_what_only_an_engine_of_torch_can_do_is_refused_with_the_way_out() -> None:
    def body() -> None:
        words = r"does not work with cpu:\d: process groups do not support MPS tensors; use strategy='ddp'"
        with on_stand_in():
            for strategy in ("fsdp", "zero1", DDP(comm_hook="fp16")):
                with pytest.raises(ValueError, match=words):
                    Accelerator(strategy=strategy)

    PROCESSES_2.run(body)
