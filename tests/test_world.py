"""Which world is current, and what a world tells."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from faults import Rank
from modes import default_group

from unisono.comm.outcome import this_process
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.threads import ThreadCommunicator
from unisono.devices import get_backend
from unisono.devices.cuda import CudaBackend
from unisono.report.timeline import Timeline
from unisono.world import current_world, set_process_world, solo_world, thread_worlds, use_world


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_process_has_the_world_of_one_always_the_same():
    world = current_world()
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (0, 1, 0, 1, 0)
    assert isinstance(world.comm, ThreadCommunicator)
    assert current_world() is world
    assert Rank(current_world).result() is world


def test_the_nearest_world_wins_thread_then_process_then_group_then_solo(tmp_path):
    alone, of_process, outer = current_world(), solo_world(), solo_world()
    with default_group(tmp_path / "store"):
        assert current_world() is not alone
        set_process_world(of_process)
        try:
            with use_world(outer):
                with pytest.raises(LookupError), use_world(solo_world()) as inner:
                    assert current_world() is inner
                    raise LookupError
                assert current_world() is outer
                assert Rank(current_world).result() is of_process
            assert current_world() is of_process
        finally:
            set_process_world(None)
    assert current_world() is alone


@pytest.mark.parametrize("announced", ["1", "0", "", "many"])
def test_a_world_size_that_announces_no_peers_is_no_error(monkeypatch, announced):
    monkeypatch.setenv("WORLD_SIZE", announced)
    assert current_world().world_size == 1


def test_an_announced_world_is_no_error_for_who_has_one(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with use_world(solo_world()) as mine:
        assert current_world() is mine
    with default_group(tmp_path / "store"):
        assert current_world().world_size == 1


@pytest.mark.parametrize("backend", ["gloo", *([] if torch.cuda.is_available() else [None]), "cpu:gloo"])
def test_an_initialised_group_is_adopted(tmp_path, backend):
    with default_group(tmp_path / "store", backend):
        world = current_world()
        assert isinstance(world.comm, ProcessCommunicator)
        assert (world.rank, world.world_size, world.backend.name) == (0, 1, "cpu")
        assert world.comm.all_reduce(torch.ones(2), "mean").tolist() == [1, 1]
        assert current_world() is world
        assert Rank(current_world).result() is world
        world.comm.leave()
        assert dist.is_initialized(), "it stays its owner's"


def test_a_group_that_is_initialised_again_is_adopted_anew(tmp_path):
    with default_group(tmp_path / "first"):
        first = current_world()
    with default_group(tmp_path / "second"):
        second = current_world()
        assert second is not first
        second.comm.barrier()


def test_an_adopted_group_is_not_kept_alive(tmp_path):
    with default_group(tmp_path / "store"):
        current_world()
        watched = weakref.ref(dist.group.WORLD)
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("node", ["GROUP_RANK", "NODE_RANK"], ids=["torchrun", "Ray Train"])
def test_an_adopted_world_takes_its_place_from_the_launcher_s_variables(monkeypatch, tmp_path, node):
    variables = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", node: "2", "TORCHELASTIC_RESTART_COUNT": "5"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with default_group(tmp_path / "store"):
        world = current_world()
    assert (world.local_rank, world.local_world_size, world.node_rank, world.restart_count) == (3, 4, 2, 5)
    assert world.device == torch.device("cpu", 3)


def activations_of_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let there be so many, of which none is used: the list of those that are activated."""
    activated: list[torch.device] = []
    monkeypatch.setenv("UNISONO_BACKEND", "cuda")
    monkeypatch.setattr(CudaBackend, "device_count", lambda self: 8)
    monkeypatch.setattr(torch.accelerator, "set_device_index", activated.append)
    return activated


def test_an_adopted_world_has_the_device_that_its_group_is_bound_to(monkeypatch, tmp_path):
    activated = activations_of_eight_gpus(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with default_group(tmp_path / "store", "cpu:gloo,cuda:fake"):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 6)
        world = current_world()
        assert activated == [world.device] == [torch.device("cuda", 6)]
        world.comm.barrier()


@pytest.mark.parametrize(("chosen", "index"), [(0, 1), (5, 5)], ids=["its place on the second machine", "set_device"])
def test_an_adopted_world_without_a_stated_place_takes_a_local_device(monkeypatch, chosen, index):
    activated = activations_of_eight_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # no event is left on a device
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen)
    dist.init_process_group("fake", store=dist.HashStore(), rank=9, world_size=16)
    try:
        world = current_world()
        assert activated == [world.device] == [torch.device("cuda", index)]
    finally:
        dist.destroy_process_group()


def test_a_world_says_where_it_is():
    world = dataclasses.replace(solo_world(get_backend("cpu")), rank=1, world_size=4, restart_count=2)
    assert str(world) == f"rank 1 of 4, cpu:0, {this_process()}, restart 2"


def test_thread_worlds_know_their_places_and_meet_one_another():
    devices, timelines = [torch.device("cpu", index) for index in range(3)], [Timeline() for _ in range(3)]
    worlds = thread_worlds(devices, timelines)
    assert [world.rank for world in worlds] == [world.local_rank for world in worlds] == [0, 1, 2]
    assert [world.device for world in worlds] == devices
    assert [world.timeline for world in worlds] == timelines
    assert all((world.world_size, world.local_world_size, world.comm.size) == (3, 3, 3) for world in worlds)
    with ThreadPoolExecutor(3) as pool:
        sums = pool.map(lambda world: world.comm.all_reduce(torch.tensor(float(world.rank))).item(), worlds)
        assert list(sums) == [3, 3, 3]
