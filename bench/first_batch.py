"""The time to the first batch: at the beginning of an epoch, and when a run resumes late in one.

    python bench/first_batch.py [--blocks 8] [--device cuda] [--samples 500000 10000000]

Beginning: `next(iter(loader))` over batches that take milliseconds to make, for the loaders of bench/overhead.py.
Resuming, on the CPU: over a shuffled dataset of that many samples, from the state after 90 % of it, against starting at
0; and, for the smaller one, against torchdata's StatefulDataLoader and a DataLoader whose first batches are discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from blocks import interleave, options, show
from overhead import BATCH_SIZE, OURS, Numbers, loaders
from overlap import Hashes
from torch.utils.data import DataLoader

from unisono import DeviceLoader

DEVICES = ("cpu", "cuda", "mps", "xla")
AT = 0.9  # of an epoch


def first_of(loader: Iterable[Any]) -> Callable[[], float]:
    """Seconds until the first batch of an epoch, which is then read to its end."""

    def first() -> float:
        start = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        elapsed = time.perf_counter() - start
        for _ in iterator:
            pass
        return elapsed

    return first


def report_beginning(blocks: int, device: str) -> None:
    for workers in (0, 2):
        made = loaders(Hashes(8 * BATCH_SIZE, units=1, size=1 << 17), workers, device, keep_workers=False)
        times = interleave({name: first_of(loader) for name, loader in made.items()}, blocks)
        show(f"of an epoch, num_workers={workers}", times, [(OURS, theirs) for theirs in list(made)[2:]])


class Fast(Numbers):
    """Numbers that are fetched by the batch, so that a late position in the epoch is reached quickly."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def shuffled(samples: int, kind: Any = DataLoader, batch_size: int = BATCH_SIZE) -> Any:
    generator = torch.Generator().manual_seed(1)
    return kind(Fast(samples), batch_size, shuffle=True, generator=generator, collate_fn=torch.as_tensor)


def resuming_unisono(samples: int) -> dict[str, Callable[[], float]]:
    """The first batch from the state after 90 % of an epoch, and from 0."""
    large = DeviceLoader(shuffled(samples, batch_size=samples // 100), "cpu")
    beginning = large.state_dict()
    epoch = iter(large)
    for _ in range(round(100 * AT)):
        next(epoch)
    late = large.state_dict()
    expected = next(epoch)[:BATCH_SIZE]
    loader = DeviceLoader(shuffled(samples), "cpu")

    def from_state(state: dict[str, Any]) -> float:
        start = time.perf_counter()
        loader.load_state_dict(state)
        batch = next(iter(loader))
        elapsed = time.perf_counter() - start
        assert torch.equal(batch, expected) == (state is late)
        return elapsed

    return {OURS: lambda: from_state(late), "from 0": lambda: from_state(beginning)}


def resuming_torchdata(samples: int) -> Callable[[], float]:
    kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    loader = shuffled(samples, kind)
    epoch = iter(loader)
    for _ in range(round(samples * AT) // BATCH_SIZE):
        next(epoch)
    late = loader.state_dict()

    def first() -> float:
        again = shuffled(samples, kind)
        start = time.perf_counter()
        again.load_state_dict(late)
        next(iter(again))
        return time.perf_counter() - start

    return first


def skipping(samples: int) -> float:
    loader = shuffled(samples)
    start = time.perf_counter()
    next(islice(loader, round(samples * AT) // BATCH_SIZE, None))
    return time.perf_counter() - start


def report_resuming(sizes: list[int], blocks: int) -> None:
    for samples in sizes:
        variants = resuming_unisono(samples)
        if samples == min(sizes):
            variants["reading and discarding"] = partial(skipping, samples)
            if find_spec("torchdata"):
                variants["StatefulDataLoader"] = resuming_torchdata(samples)
        show(f"from 90 % of {samples:,} samples", interleave(variants, blocks))


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=8, samples=[500_000, 10_000_000])
    torch.set_num_threads(1)
    report_beginning(arguments.blocks, arguments.device)
    if arguments.device == "cpu":
        report_resuming(arguments.samples, arguments.blocks)


if __name__ == "__main__":
    main()
