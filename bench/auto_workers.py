"""num_workers="auto" against fixed numbers of loader workers, once it has had 10 s to choose.

    python bench/auto_workers.py [--blocks 4] [--fixed 0 1 2 4 8 16 24]

The slow dataset takes 5 ms for a sample, as one does that waits for a disk or a store; the cheap one next to nothing.
The step takes 10 ms. Each block times 60 batches of a loop that stays open, after 30 that may have been read ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from blocks import interleave, options, show
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader

DEVICES = ("cpu",)
STEP_S, CHOOSING_S = 0.01, 10.0
AHEAD, TIMED = 30, 60  # batches
AUTO, BEST = "auto", "the best fixed number"


class Samples(Dataset[torch.Tensor]):
    """Each costs so many seconds."""

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._cost_s:
            time.sleep(self._cost_s)
        return torch.full((8,), float(index))


def block_of(loader: DeviceLoader, settle_s: float = 0.0) -> Callable[[], float]:
    """Seconds per batch of the next block of a loop, which first runs for `settle_s`."""
    batches = iter(loader)

    def take(count: int) -> None:
        for _ in range(count):
            next(batches)
            time.sleep(STEP_S)

    end = time.perf_counter() + settle_s
    while time.perf_counter() < end:
        take(1)

    def run() -> float:
        take(AHEAD)
        start = time.perf_counter()
        take(TIMED)
        return (time.perf_counter() - start) / TIMED

    return run


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=4, fixed=[0, 1, 2, 4, 8, 16, 24])
    torch.set_num_threads(1)
    for case, cost_s in (("5 ms a sample", 0.005), ("a cheap dataset", 0.0)):
        data = Samples(cost_s)
        auto = DeviceLoader(DataLoader(data, 16), "cpu", num_workers="auto")
        variants = {AUTO: block_of(auto, CHOOSING_S)}
        for number in arguments.fixed:
            variants[f"{number} workers"] = block_of(DeviceLoader(DataLoader(data, 16, num_workers=number), "cpu"))
        costs = interleave(variants, arguments.blocks, warm_up=1)
        best = min([*costs][1:], key=lambda name: median(costs[name]))
        show(f"{case}, 16 a batch, a step of 10 ms", {**costs, BEST: costs[best]}, [(AUTO, BEST), (AUTO, "0 workers")])
        assert auto.tuner is not None
        print(f"auto has chosen {auto.tuner.describe()}; the best is {best}")


if __name__ == "__main__":
    main()
