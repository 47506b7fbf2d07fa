"""Several processes on the family of Apple's GPU, whose tensors no process group takes: it stands in, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from modes import FAMILY, PROCESSES_2
from torch.nn.parallel import DistributedDataParallel
from twin import Case, State, assert_all_are, plain_run, run

from unisono import Accelerator
from unisono.backends.mps import MpsBackend
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.selection import innermost, process_communicator
from unisono.comm.through_host import ThroughHostCommunicator
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
    store = dist.PrefixStore("stand-in", seat._store)  # type: ignore[attr-defined]
    comm = process_communicator(family, world.device, store, owns_group=False)
    with use_world(replace(world, backend=family, comm=comm)) as found:
        yield found


def test_ranks_meet_in_main_memory_and_train_as_one_without_an_engine_of_torch() -> None:
    def body() -> tuple[State, type, type]:
        with on_stand_in() as world, patch.object(DistributedDataParallel, "__init__", side_effect=AssertionError):
            return run(CASE, strategy="ddp"), type(world.comm), type(innermost(world.comm))

    ranks = PROCESSES_2.run(body)
    assert_all_are([state for state, *_ in ranks], plain_run(CASE, 2))
    assert [kinds for _, *kinds in ranks] == [[ThroughHostCommunicator, ProcessCommunicator]] * 2


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", DDP(comm_hook="fp16")], ids=str)
def test_what_only_an_engine_of_torch_can_do_is_refused_with_the_way_out(strategy: Any) -> None:
    def body() -> None:
        with on_stand_in():
            Accelerator(strategy=strategy)

    words = r"does not work with cpu:\d: process groups do not support MPS tensors; use strategy='ddp'"
    with pytest.raises(ValueError, match=words):
        PROCESSES_2.run(body)
