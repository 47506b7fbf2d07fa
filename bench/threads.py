"""Replicas in threads against worker processes: collectives, steps, calls and memory.

    python bench/threads.py [--blocks 6] [--megabytes 100]

- all_reduce between 2 and 4 threads, against as many processes in shared memory and over gloo, and against the memory's
  speed: the same threads copy their tensors, which moves the least number of bytes that an all_reduce must move.
- The time of a step of DataParallel against worker processes: the example's CNN, and a model of many small operations,
  whose threads mostly wait for the GIL.
- Memory per replica, against DistributedDataParallel: in steady state, and at the peak.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from blocks import interleave, options, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from unisono import DataParallel, DeviceLoader, all_reduce, barrier, optimizer_step, spawn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import build_loaders, build_model

DEVICES = ("cpu",)
REPEATS = 5
EPOCHS = 3
WIDTH = 2048  # of the model whose memory is measured: 6 layers, 101 MB


def devices(ranks: int) -> list[str]:
    return [f"cpu:{rank}" for rank in range(ranks)]


def seconds(body: Callable[[], Any]) -> float:
    """The median over a few repetitions that all ranks begin together."""
    found = []
    for repeat in range(REPEATS + 1):
        barrier()
        start = time.perf_counter()
        body()
        barrier()
        if repeat:  # the first one touches the memory
            found.append(time.perf_counter() - start)
    return median(found)


# Collectives.


def process_seconds(index: int, length: int) -> float:
    tensor = torch.ones(length)
    return seconds(lambda: dist.all_reduce(tensor))


def collectives(ranks: int, length: int, blocks: int) -> None:
    """The time of an all_reduce in threads, against that in processes, and that of a copy by the same threads."""
    replicas = DataParallel(nn.Identity(), devices(ranks))

    def reduce(*_: Any) -> float:
        tensor = torch.ones(length)
        return seconds(lambda: all_reduce(tensor))

    def copy(*_: Any) -> float:
        tensor, other = torch.ones(length), torch.empty(length)
        return seconds(lambda: other.copy_(tensor))

    def between_processes(process_group: Literal["gloo"] | None) -> float:
        options: dict[str, Any] = {"cores": 1, "backend": "cpu", "process_group": process_group}
        times: list[float] = spawn(process_seconds, args=(length,), nprocs=ranks, **options)
        return max(times)

    times = interleave(
        {
            "threads": lambda: max(replicas.run_on_replicas(reduce)),
            "processes, shared memory": lambda: between_processes(None),
            "processes, gloo": lambda: between_processes("gloo"),
            "a copy by each": lambda: max(replicas.run_on_replicas(copy)),
        },
        blocks,
    )
    show(f"all_reduce of {length // 250_000} MB, {ranks} ranks", times)


# Steps.


def build_small_operations() -> nn.Module:
    """30 layers of 16 features: nearly all of a step is Python and launch overhead."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(30) for layer in (nn.Linear(16, 16), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(16, 10))


def small_loader(ranks: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(640, 16), torch.randint(10, (640,)))
    return DataLoader(data, batch_size=16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], DataLoader[Any]]]] = {
    "the example's CNN": (build_model, lambda ranks: build_loaders(ranks)[0]),
    "many small operations": (build_small_operations, small_loader),
}


def epoch(model: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer) -> int:
    steps = 0
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer_step(optimizer)
        steps += 1
    return steps


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def process_seconds_per_step(index: int, ranks: int, name: str) -> float:
    build, load = MODELS[name]
    model, loader = build(), DeviceLoader(load(ranks))
    optimizer = sgd(model)
    epoch(model, loader, optimizer)  # warms up
    start = time.perf_counter()
    steps = sum(epoch(model, loader, optimizer) for _ in range(EPOCHS))
    return (time.perf_counter() - start) / steps


def steps(name: str, ranks: int, blocks: int) -> None:
    """The time of a step in threads, against that in processes."""
    build, load = MODELS[name]
    replicas, loader = DataParallel(build, devices(ranks)), load(ranks)

    def train(model: nn.Module, batches: Iterable[Any], device: torch.device, context: Any) -> int:
        return epoch(model, batches, context.getattr_or("optimizer", lambda: sgd(model)))

    def thread_seconds() -> float:
        replicas(train, loader)
        start = time.perf_counter()
        done = sum(replicas(train, loader)[0] for _ in range(EPOCHS))
        return (time.perf_counter() - start) / done

    times = interleave(
        {
            "threads": thread_seconds,
            "processes": lambda: spawn(
                process_seconds_per_step, args=(ranks, name), nprocs=ranks, cores=1, backend="cpu"
            )[0],
        },
        blocks,
    )
    show(f"a step, {name}, {ranks} ranks", times)


# Memory.


def build_wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def held_by(body: Callable[[], Any]) -> tuple[float, float]:
    """The increase of this process's memory after `body`, and its peak within it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = psutil.Process().memory_info().rss
    kept = body()
    after = psutil.Process().memory_info().rss
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    del kept
    return after - before, int(peak.split()[1]) * 1024 - before


def some_steps(model: nn.Module, step: Callable[[torch.optim.Optimizer], Any]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(4, WIDTH)).sum().backward()
        step(optimizer)
    return model


def in_threads(index: int, ranks: int) -> tuple[float, float]:
    def train() -> DataParallel:
        replicas = DataParallel(build_wide, devices(ranks))
        replicas.run_on_replicas(lambda model, *_: some_steps(model, optimizer_step) and None)
        return replicas

    after, peak = held_by(train)
    return after / ranks, peak / ranks


def in_ddp(index: int) -> tuple[float, float]:
    return held_by(lambda: some_steps(DistributedDataParallel(build_wide()), lambda optimizer: optimizer.step()))


def memory(ranks: int, blocks: int) -> None:
    """The ratio of bytes per replica to those of DDP, each measured in fresh processes."""
    options: dict[str, Any] = {"cores": 1, "backend": "cpu"}
    found: dict[str, list[tuple[float, float]]] = {"threads": [], "DistributedDataParallel": []}
    for _ in range(blocks):
        found["threads"].append(spawn(in_threads, args=(ranks,), nprocs=1, **options)[0])
        found["DistributedDataParallel"].append(spawn(in_ddp, nprocs=ranks, **options)[0])
    for place, what in enumerate(("after a step", "at most")):
        costs = {name: [value[place] / 2**20 for value in values] for name, values in found.items()}
        show(f"memory per replica, {what}, {ranks} ranks", costs, unit="MiB")


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=6, megabytes=100)
    for ranks in (2, 4):
        collectives(ranks, arguments.megabytes * 250_000, arguments.blocks)
    for name in MODELS:
        steps(name, 2, arguments.blocks)
    memory(2, max(2, arguments.blocks // 3))


if __name__ == "__main__":
    main()
