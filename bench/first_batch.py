"""The time to the first batch: at the beginning of an epoch, and when a run resumes late in one.

    python bench/first_batch.py [--blocks 15] [--samples 10000000] [--peer-samples 500000]

Beginning: `next(iter(loader))` over batches that take milliseconds to make, for the loaders of bench/overhead.py.
Resuming: over a shuffled dataset of that many samples, from the state after 90 % of it, minus the time from 0; for
torchdata's StatefulDataLoader, and for a DataLoader whose first batches are read and discarded, over fewer samples.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import islice
from statistics import median, quantiles
from typing import Any

import torch
from blocks import conditions, interleave, ratio_line
from overhead import BATCH_SIZE, OURS, Numbers, loaders
from overlap import Hashes
from torch.utils.data import DataLoader

from unisono import DeviceLoader

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


def report_beginning(blocks: int) -> None:
    for workers in (0, 2):
        made = loaders(Hashes(8 * BATCH_SIZE, units=1, size=1 << 17), workers, keep_workers=False)
        times = interleave({name: first_of(loader) for name, loader in made.items()}, blocks)
        print(f"\nfirst batch of an epoch; num_workers={workers}; {conditions()}")
        print("median ms: " + ", ".join(f"{name} {median(t) * 1e3:.1f}" for name, t in times.items()))
        for theirs in list(made)[2:]:
            print(ratio_line(f"{OURS} / {theirs}", times[OURS], times[theirs]), flush=True)


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

    return {"from 0": lambda: from_state(beginning), "from 90 %": lambda: from_state(late)}


def resuming_torchdata(samples: int) -> dict[str, Callable[[], float]]:
    kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    loader = shuffled(samples, kind)
    epoch = iter(loader)
    for _ in range(round(samples * AT) // BATCH_SIZE):
        next(epoch)
    late = loader.state_dict()

    def first(state: dict[str, Any] | None) -> float:
        again = shuffled(samples, kind)
        start = time.perf_counter()
        if state is not None:
            again.load_state_dict(state)
        next(iter(again))
        return time.perf_counter() - start

    return {"from 0": lambda: first(None), "from 90 %": lambda: first(late)}


def resuming_by_skipping(samples: int) -> dict[str, Callable[[], float]]:
    def first(skipped: int) -> float:
        loader = shuffled(samples)
        start = time.perf_counter()
        next(islice(loader, skipped, None))
        return time.perf_counter() - start

    return {"from 0": lambda: first(0), "from 90 %": lambda: first(round(samples * AT) // BATCH_SIZE)}


def report_going_on(samples: int, peer_samples: int, blocks: int) -> None:
    cases = [(OURS, resuming_unisono, samples), (OURS, resuming_unisono, peer_samples)]
    cases.append(("DataLoader, read and dropped", resuming_by_skipping, peer_samples))
    try:
        import_module("torchdata.stateful_dataloader")
        cases.append(("StatefulDataLoader", resuming_torchdata, peer_samples))
    except ModuleNotFoundError:
        pass
    variants: dict[str, Callable[[], float]] = {}
    for name, make, size in cases:
        variants |= {f"{name}, {size:,}: {place}": first for place, first in make(size).items()}
    times = interleave(variants, blocks)
    print(f"\nfirst batch from {AT:.0%} of an epoch, and what that costs more than from 0; {conditions()}")
    for name, _, size in cases:
        start, late = (times[f"{name}, {size:,}: {place}"] for place in ("from 0", "from 90 %"))
        more = [(b - a) * 1e3 for a, b in zip(start, late, strict=True)]
        low, _, high = quantiles(more, n=4)
        head = f"{name}, {size:,} samples"
        medians = f"median {median(late) * 1e3:7.1f} ms, from 0 {median(start) * 1e3:6.1f}, more {median(more):7.1f}"
        print(f"{head:<46} {medians} (quartiles {low:.1f} .. {high:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--peer-samples", type=int, default=500_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report_beginning(arguments.blocks)
    if not os.environ.get("PJRT_DEVICE"):
        report_going_on(arguments.samples, arguments.peer_samples, arguments.blocks)


if __name__ == "__main__":
    main()
