"""Whether loading and computing overlap: the time of an epoch over that of the slower of the two alone.

    python bench/overlap.py [--blocks 6] [--batches 20]

The source hashes a buffer for each batch, and so does the step: real work, one thread each, without the GIL. Each block
times both alone, concurrently in two bare threads, in a DataLoader's loop with no loader workers, one after the other,
and in DeviceLoader's loop. 1 is a perfect overlap: the slower of the two alone, and once per epoch the other, since
nothing is computed while the first batch is loaded. A machine without a second free core shows nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable

import torch
from blocks import interleave, options, show
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader

DEVICES = ("cpu",)
UNIT = 16 << 20  # bytes; about 10 ms

_BUFFER = bytes(UNIT)

ALONE = ("source alone", "step alone")
PERFECT = "a perfect overlap"
BARE_THREADS, DATALOADER, OURS = "two bare threads", "DataLoader", "DeviceLoader"


def hash_units(units: int, size: int = UNIT) -> None:
    buffer = memoryview(_BUFFER)[:size]
    for _ in range(units):
        hashlib.sha256(buffer).digest()


class Hashes(Dataset[torch.Tensor]):
    """Each item costs `units` of work over that many bytes."""

    def __init__(self, length: int, units: int, size: int = UNIT) -> None:
        self._length = length
        self._work = units, size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        hash_units(*self._work)
        return torch.full((8,), float(index))


def measure(source_units: int, step_units: int, batches: int, blocks: int) -> dict[str, list[float]]:
    """Seconds per batch of each variant, block by block."""
    dataset = Hashes(batches, source_units)
    plain = DataLoader(dataset, batch_size=None)
    ours = DeviceLoader(DataLoader(dataset, batch_size=None), "cpu")

    def repeat(units: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(batches):
                hash_units(units)

        return run

    def side_by_side() -> None:
        source = threading.Thread(target=repeat(source_units))
        source.start()
        repeat(step_units)()
        source.join()

    def loop(loader: Iterable[torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                hash_units(step_units)

        return run

    def timed(body: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            body()
            return (time.perf_counter() - start) / batches

        return run

    bodies = [repeat(source_units), repeat(step_units), side_by_side, loop(plain), loop(ours)]
    names = [*ALONE, BARE_THREADS, DATALOADER, OURS]
    return interleave({name: timed(body) for name, body in zip(names, bodies, strict=True)}, blocks)


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=6, batches=20)
    torch.set_num_threads(1)
    for source_units, step_units in ((1, 1), (2, 1), (1, 2)):
        times = measure(source_units, step_units, arguments.batches, arguments.blocks)
        alone = zip(*(times[name] for name in ALONE), strict=True)
        times[PERFECT] = [max(pair) + min(pair) / arguments.batches for pair in alone]
        pairs = [(name, PERFECT) for name in (OURS, BARE_THREADS, DATALOADER)]
        show(f"source : step = {source_units} : {step_units}", times, pairs)


if __name__ == "__main__":
    main()
