"""The cost of checks per step: `check_replicas`, `should_stop` and compared collectives against a step without them.

    python bench/checked.py [--blocks 8] [--steps 20] [--workers 2]

N worker processes train a small convolutional network on batches in memory. All variants run in the same workers and
alternate every few steps. Ratios are with / without: nearer to 1 is cheaper.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from blocks import interleave, options, show
from torch import nn
from torch.nn import functional as F

from unisono import current_world, optimizer_step, spawn
from unisono.comm.operations import Call
from unisono.comm.processes import ProcessCommunicator
from unisono.training.agreement import check_replicas
from unisono.training.stopping import should_stop
from unisono.world import World

DEVICES = ("cpu",)
PLAIN = "no check"
Step = Callable[[], None]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def training_step(world: World, after: Callable[[nn.Module], object] = lambda model: None) -> Step:
    """One step of a separate network, in that world, with a check at its end."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.rand(32, 1, 28, 28), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer_step(optimizer, world=world)
        after(model)

    return step


def build_variants(world: World) -> dict[str, Step]:
    by_message = ProcessCommunicator(world.device, owns_group=False)
    unchecked = replace(world, comm=_Unchecked(world.device, owns_group=False))
    variants = {PLAIN: training_step(unchecked), "compared in shared memory": training_step(world)}
    for every in (1, 10, 100):
        name = f"check_replicas(model, every={every})"
        variants[name] = training_step(
            unchecked,
            lambda model, every=every: check_replicas(model, every, world=unchecked),  # type: ignore[misc]
        )
    variants["should_stop()"] = training_step(unchecked, lambda model: should_stop(world=unchecked))
    variants["compared by a message"] = training_step(replace(world, comm=by_message))
    return variants


class _Unchecked(ProcessCommunicator):
    """The calls of ranks are not compared."""

    def _enter(self, call: Call) -> None:
        self.num_calls += 1


def block_of(world: World, step: Step, steps: int) -> Callable[[], float]:
    """Seconds per step, over some steps that all ranks begin and end together."""

    def block() -> float:
        world.comm.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        world.comm.barrier()
        return (time.perf_counter() - start) / steps

    return block


def measure(index: int, blocks: int, steps: int) -> Mapping[str, list[float]]:
    """Seconds per step of each variant, block by block."""
    world = current_world()
    torch.set_num_threads(1)
    logging.getLogger("unisono").setLevel(logging.ERROR)  # batches from no loader are intended here
    variants = {name: block_of(world, step, steps) for name, step in build_variants(world).items()}
    return interleave(variants, blocks)


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=8, steps=20, workers=2)
    times = spawn(measure, args=(arguments.blocks, arguments.steps), nprocs=arguments.workers)[0]
    count = sum(parameter.numel() for parameter in build_model().parameters())
    pairs = [(name, PLAIN) for name in times if name != PLAIN]
    show(f"a step of {count:,} parameters, {arguments.workers} processes", times, pairs)


if __name__ == "__main__":
    main()
