"""What a prepared step costs the host: time against the plain step.

    python bench/host_cost.py [--blocks 30] [--device cuda] [--parameters 300]

A model of tiny layers, so that the step is nearly all host: on an accelerator this time is what the device waits for.
One rank is compared with plain torch; two ranks with torch's DDP, in the same workers and over the same process group;
and Accelerate's with DDP, where it can be imported. Each block runs a few steps of each variant, in turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from blocks import interleave, options, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono import Accelerator, current_world, spawn
from unisono.devices import get_backend

DEVICES = ("cpu", "cuda", "mps")
STEPS = 8  # of a block
OURS, DDP, ACCELERATE, PLAIN = "unisono", "DDP", "accelerate", "plain torch"

Step = Callable[[], None]


def network(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(parameters // 2)])


def parts(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(parameters).to(current_world().device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step_of(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, backward: Callable[..., Any]) -> Step:
    inputs = torch.ones(2, 4, device=current_world().device)

    def step() -> None:
        backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(parameters: int) -> Step:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*parts(parameters))
    return step_of(model, optimizer, accelerator.backward)


def plain(parameters: int) -> Step:
    model, optimizer = parts(parameters)
    return step_of(model, optimizer, torch.Tensor.backward)


def ddp(parameters: int) -> Step:
    model, optimizer = parts(parameters)
    return step_of(DistributedDataParallel(model), optimizer, torch.Tensor.backward)


def accelerates(parameters: int) -> Step:
    accelerator = import_module("accelerate").Accelerator(cpu=current_world().device.type == "cpu")
    model, optimizer = accelerator.prepare(*parts(parameters))
    return step_of(model, optimizer, accelerator.backward)


def timed(step: Step) -> Callable[[], float]:
    world = current_world()

    def block() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        world.backend.synchronize(world.device)
        return (time.perf_counter() - start) / STEPS

    return block


def compare(parameters: int, blocks: int) -> dict[str, list[float]]:
    """The same steps on each rank."""
    torch.set_num_threads(1)
    logging.getLogger("unisono").setLevel(logging.ERROR)  # batches from no loader are intended here
    is_alone = current_world().world_size == 1
    variants = {OURS: ours(parameters), **({PLAIN: plain(parameters)} if is_alone else {DDP: ddp(parameters)})}
    if not is_alone and find_spec("accelerate"):
        variants[ACCELERATE] = accelerates(parameters)
    return interleave({name: timed(step) for name, step in variants.items()}, blocks, warm_up=3)


def in_worker(_: int, parameters: int, blocks: int) -> dict[str, list[float]]:
    return compare(parameters, blocks)


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=30, parameters=300)
    show(f"1 rank, {arguments.parameters} parameters", compare(arguments.parameters, arguments.blocks))
    if arguments.device == "cpu" or get_backend(arguments.device).device_count() > 1:
        times = spawn(in_worker, (arguments.parameters, arguments.blocks), nprocs=2)[0]
        show(f"2 ranks, {arguments.parameters} parameters", times)


if __name__ == "__main__":
    main()
