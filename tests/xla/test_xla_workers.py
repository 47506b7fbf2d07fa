"""Worker processes with an XLA device each: they reduce on the host, and no process group gets a tensor of theirs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unisono import all_gather_object, all_reduce, current_world, spawn
from unisono.comm.selection import innermost
from unisono.comm.xla import XlaCommunicator
from unisono.devices import xla
from unisono.errors import BrokenWorldError, CollectiveMismatchError


@pytest.fixture(autouse=True)
def _by_value(request):
    import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


def test_each_worker_has_a_device_to_itself_and_reduces_with_the_others():
    def work(index: int) -> tuple[str, list[float]]:
        world = current_world()
        return str(world.device), all_reduce(torch.full((2,), index + 1.0, device=world.device)).tolist()

    assert spawn(work, nprocs=3, backend="xla") == [("xla:0", [6.0, 6.0])] * 3


def test_workers_draw_different_masks():
    def draws(index: int) -> list[float]:
        return nn.functional.dropout(torch.ones(64, device=current_world().device), 0.5).tolist()

    first, second = spawn(draws, nprocs=2, backend="xla")
    assert first != second


def test_a_process_group_refuses_xla_tensors_and_takes_others():
    def calls(index: int) -> list[str]:
        own = torch.ones(2, device=current_world().device)
        told, gloo = [], dist.new_group(backend="gloo")
        for call in (
            lambda t, group=None: dist.all_reduce(t, group=group),
            lambda t, group=None: dist.broadcast(t, 0, group),
            lambda t, group=None: dist.all_gather([t, t], t, group),
        ):
            with pytest.raises(RuntimeError, match=r"takes dense tensors in main memory, got .* on xla:0; unisono"):
                call(own)
            with pytest.raises(TypeError, match="got an XLA tensor, which process groups do not reduce") as refusal:
                call(own, gloo)
            told.append(str(refusal.value).split("'s ")[1].split()[0])
        host = torch.ones(1)
        dist.all_reduce(host)
        assert host.item() == 2
        return told

    assert spawn(calls, nprocs=2, backend="xla") == [["allreduce", "broadcast", "allgather"]] * 2


def test_results_and_objects_come_to_other_processes_in_main_memory():
    def makes(index: int) -> tuple[nn.Module, torch.Tensor]:
        model = nn.Linear(2, 2).to(current_world().device)
        assert [each.device.type for each in all_gather_object(model.weight)] == ["cpu", "cpu"]
        return model, torch.full((2,), 1.0 + index, device=current_world().device, requires_grad=True)

    results = spawn(makes, nprocs=2, backend="xla")
    assert [each.tolist() for _, each in results] == [[1.0, 1.0], [2.0, 2.0]]
    assert all(tensor.is_cpu and tensor.requires_grad for _, tensor in results)
    assert all(each.is_cpu for model, _ in results for each in model.parameters())


def test_a_runtime_that_does_not_join_processes_is_detected_at_the_start():
    """On the CPU the runtimes of two processes know nothing of one another, and reduce nothing, in silence."""

    def pretending(index: int) -> None:
        xla.XlaBackend.process_transport = lambda self: "runtime"  # type: ignore[method-assign]
        from unisono.comm.selection import process_communicator

        world = current_world()
        process_communicator(world.backend, world.device, owns_group=False)

    with pytest.raises(BrokenWorldError, match="an all_reduce of ones over 2 XLA devices gave 1"):
        spawn(pretending, nprocs=2, backend="xla")


@pytest.mark.parametrize("other", ["all_reduce(float32[3], 'sum')", "barrier()"])
def test_joined_processes_compare_their_calls_before_the_runtime_is_asked(other):
    """As on a TPU, where a chip that is alone in a collective waits for ever."""

    def differs(index: int) -> None:
        world = current_world()
        comm = XlaCommunicator(innermost(world.comm), partial(world.backend.synchronize, world.device))
        if index and other == "barrier()":
            comm.barrier()
        comm.all_reduce(torch.ones(2 + index, device=world.device))

    with pytest.raises(CollectiveMismatchError) as mismatch:
        spawn(differs, nprocs=2, backend="xla")
    for action in (other, "all_reduce(float32[2], 'sum')"):
        assert f"called {action}" in str(mismatch.value)
