"""What snapshots cost, and what they save.

    python bench/snapshots.py

- The time of a step with `snapshot_every=1`, against one without, for the networks of steps.py.
- The time of a snapshot, against that of a mere copy of as many bytes, for states of 1 MB to 1 GB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from blocks import interleave, options, show
from steps import Job, small_cnn, small_transformer
from torch import nn
from torch.nn import functional as F

from unisono import Accelerator, spawn

DEVICES = ("cpu",)
RANKS = 2
NETWORKS: dict[str, tuple[Callable[[], Job], int]] = {"CNN": (small_cnn, 8), "transformer": (small_transformer, 3)}
SIZES = (1, 10, 100, 1000)


def step_time(network: str, every: int | None) -> float:
    """Seconds of a step, on the slower rank, after a first epoch."""
    make, epochs = NETWORKS[network]

    def train(rank: int) -> float:
        job = make()
        accelerator = Accelerator(seed=0, snapshot_every=every)
        model, optimizer, loader = accelerator.prepare(*job.parts(), job.loader(RANKS))
        began = 0.0
        for epoch in range(epochs + 1):
            if epoch == 1:
                began = time.perf_counter()
            for inputs, targets in loader:
                optimizer.zero_grad()
                outputs = model(inputs)
                accelerator.backward(F.cross_entropy(outputs.flatten(0, -2), targets.flatten()))
                optimizer.step()
        return (time.perf_counter() - began) / epochs / job.steps()

    return max(map(float, spawn(train, nprocs=RANKS, backend="cpu", cores=1)))


def size_times(rank: int, megabytes: int) -> tuple[float, float]:
    """The seconds of a snapshot of that state on one rank, and of a copy of as many bytes; medians."""
    accelerator = Accelerator(seed=0, snapshot_every=1)
    model = nn.Linear(1000, megabytes * 250, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    snapshots = accelerator._states._snapshots
    assert snapshots is not None
    source, target = model.weight.detach(), torch.empty_like(model.weight)
    times: dict[str, list[float]] = {"snapshot": [], "copy": []}
    for _ in range(9):
        for name, call in (("snapshot", snapshots.take), ("copy", partial(target.copy_, source))):
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return median(times["snapshot"][3:]), median(times["copy"][3:])


def main() -> None:
    given = options(__doc__, DEVICES, 8)
    for name in NETWORKS:
        runs = {f"snapshot_every={every}": partial(step_time, name, every) for every in (1, None)}
        show(f"a step of the {name}", interleave(runs, given.blocks))
    print("\na snapshot / a copy of as many bytes, one rank")
    for megabytes in SIZES:
        [(ours_s, copy_s)] = spawn(size_times, (megabytes,), nprocs=1, backend="cpu", cores=1)
        print(f"{megabytes:5} MB   {ours_s / copy_s:.2f}   {ours_s * 1e3:.2f} / {copy_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
