"""What type checkers see of the public names: mypy and pyright read this file in `make check`, and have to agree.

It is never run. A line that has to be refused says so to both; each of them reports a remark that is not needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import (
    Accelerator,
    Accuracy,
    Checkpointer,
    DataParallel,
    DeviceIterator,
    DeviceLoader,
    Mean,
    ProcessContext,
    Report,
    Tracker,
    World,
    spawn,
)
from unisono.errors import StoppedError, UnisonoError, WorkerHungError
from unisono.strategies import FSDP

assert_type(unisono.rank(), int)
assert_type(unisono.world_size(), int)
assert_type(unisono.is_rank_zero(), bool)
assert_type(unisono.all_reduce(torch.ones(1)), torch.Tensor)
assert_type(unisono.all_gather_object("text"), list[Any])
assert_type(unisono.available_devices(), list[str])
assert_type(unisono.current_world(), World)
assert_type(unisono.gather_report(), Report | None)
assert_type(unisono.should_stop(), bool)


def train(rank: int) -> float:
    return 0.0


assert_type(spawn(train, nprocs=2), list[float])
assert_type(spawn(print, nprocs=2, join=False, backend="cpu"), ProcessContext)

accelerator = Accelerator(mixed_precision="bf16", strategy=FSDP())
assert_type(accelerator.num_processes, int)
assert_type(accelerator.device, torch.device)
assert_type(accelerator.sync_gradients, bool)
assert_type(accelerator.clip_grad_norm_(nn.Linear(1, 1), 1.0), torch.Tensor | None)
assert_type(accelerator.autocast(), AbstractContextManager[Any])
assert_type(accelerator.trackers, list[Tracker])

network = nn.Linear(1, 1)
optimizer = torch.optim.SGD(network.parameters())
network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(TensorDataset(torch.ones(3))))
assert_type(network, nn.Linear)
assert_type(optimizer, torch.optim.SGD)
assert_type(accelerator.prepare(network), nn.Linear)
assert_type(accelerator.prepare([network]), Any)

# A loader may keep its name, and has the names of what it becomes, and those of the DataLoader.
assert_type(loader.epoch, int)
assert_type(loader.valid_samples, int | Any)
assert_type(loader.batch_size, int | None)
loader.set_epoch(3)
alone = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3))))
assert_type(alone.epoch, int)
_, evaluated = accelerator.prepare(network, DataLoader(TensorDataset(torch.ones(3))))
assert_type(evaluated.epoch, int)
assert_type(accelerator.prepare(DeviceLoader([1])), DeviceLoader)
assert_type(accelerator.prepare(Mean()), Mean)
assert_type(accelerator.prepare(network, Accuracy()), tuple[nn.Linear, Accuracy])
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
network, optimizer, loader, schedule = accelerator.prepare(network, optimizer, loader, schedule)
assert_type(loader.epoch, int)
assert_type(schedule, torch.optim.lr_scheduler.StepLR)
network, optimizer, trained, tested, schedule = accelerator.prepare(network, optimizer, loader, evaluated, schedule)
assert_type(trained.epoch, int)
assert_type(tested.epoch, int)
assert_type(schedule, torch.optim.lr_scheduler.StepLR)
rows = [len(inputs) for (inputs,) in loader]


def loop(model: nn.Module, loader: DeviceIterator, device: torch.device, context: unisono.ReplicaContext) -> float:
    return 0.0


batches: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(3)))
assert_type(DataParallel(nn.Linear(1, 1))(loop, batches), list[float])
assert_type(DeviceLoader(batches).epoch, int)
assert_type(DeviceLoader(batches).valid_samples, int | Any)

with Checkpointer("runs", model=nn.Linear(1, 1)) as checkpointer:
    assert_type(checkpointer.step(), bool)

failure: UnisonoError = WorkerHungError("", ranks=[1], stacks={1: ""})
stop: SystemExit = StoppedError([])

unisono.allreduce()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
accelerator.backwards()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
Accelerator(mixed_precision="fp8")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
Accelerator(precision="bf16")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
spawn(print, nproc=2)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
