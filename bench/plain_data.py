"""What plain data costs against torch's DataLoader: many small values in a batch, cheap rows, images, a large shuffle.

    python bench/plain_data.py [--blocks 15] [--only strings]

Each block makes one pass with torch's DataLoader and one with a DeviceLoader over another DataLoader of the same
arguments. Ratios are ours / torch's: smaller is faster. JPEGs need Pillow; without it, a line says so.
"""

from __future__ import annotations

import argparse
import io
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from blocks import conditions, interleave, ratio_line
from overhead import Numbers, Rows
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unisono import DeviceLoader


class Case(NamedTuple):
    """A DataLoader's dataset and arguments, and the number of its batches."""

    dataset: Any
    batches: int
    arguments: dict[str, Any]


class Texts(Numbers):
    def __getitem__(self, index: int) -> Any:
        return f"text {index}"


class Tensors(Numbers):
    """Rows that a `collate_fn` leaves apart."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index])


class Images(Dataset[torch.Tensor]):
    """JPEGs of 256 x 256 noise, decoded, cut to 224 and made a tensor."""

    def __init__(self, count: int) -> None:
        self._image: Any = __import__("PIL.Image").Image
        pixels = torch.randint(256, (256, 256, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        stream = io.BytesIO()
        self._image.frombytes("RGB", (256, 256), pixels.numpy().tobytes()).save(stream, "JPEG")
        self._data, self._count = stream.getvalue(), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self._image.open(io.BytesIO(self._data)).convert("RGB").crop((16, 16, 240, 240))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(224, 224, 3).permute(2, 0, 1).float().div_(255)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def cases() -> dict[str, Callable[[], Case]]:
    many, kept = 10_000, {"num_workers": 1, "persistent_workers": True}
    rows = TensorDataset(torch.rand(16_000, 8), torch.randint(10, (16_000,)))
    return {
        "10,000 ints, 1 worker, a pass": lambda: Case(Numbers(many), 1, {"batch_size": many, "num_workers": 1}),
        "10,000 ints, 1 worker": lambda: Case(Numbers(8 * many), 8, {"batch_size": many, **kept}),
        "10,000 strings, 1 worker": lambda: Case(Texts(8 * many), 8, {"batch_size": many, **kept}),
        "10,000 strings, no worker": lambda: Case(Texts(8 * many), 8, {"batch_size": many}),
        "5,000 small tensors, no worker": lambda: Case(Tensors(20_000), 4, {"batch_size": 5000, "collate_fn": as_list}),
        "numbers, 32 a batch, no worker": lambda: Case(Numbers(16_000), 500, {"batch_size": 32, "shuffle": True}),
        "8 floats and a label, 32 a batch, no worker": lambda: Case(
            Rows(rows), 500, {"batch_size": 32, "shuffle": True}
        ),
        "the same as a TensorDataset": lambda: Case(rows, 500, {"batch_size": 32, "shuffle": True}),
        "JPEG, 224, 64 a batch, 2 workers": lambda: Case(
            Images(640), 10, {"batch_size": 64, "num_workers": 2, "persistent_workers": True}
        ),
    }


def seconds_of(loader: Any, batches: int) -> Callable[[], float]:
    """Seconds per batch of a pass, its start and end included."""

    def run() -> float:
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        assert count == batches
        return (time.perf_counter() - start) / batches

    return run


def large_shuffle(samples: int) -> None:
    """Time to the first batch of a shuffled epoch, and how much memory the process gains; each in a fresh process."""
    for name in ("torch", "unisono"):
        text = f"import plain_data; plain_data.first_batch({name!r}, {samples})"
        out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=sys.path[0])
        print(f"shuffle of {samples:,}: {name:<8} {out.stdout.strip()}")


def first_batch(name: str, samples: int) -> None:
    loader: Any = DataLoader(Numbers(samples), batch_size=32, shuffle=True)
    loader = loader if name == "torch" else DeviceLoader(loader, "cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    next(iter(loader))
    seconds = time.perf_counter() - start
    gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{seconds:.2f} s to the first batch, {gained:,.0f} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--only", default="", help="the cases whose names contain this text")
    parser.add_argument("--samples", type=int, default=10**8, help="of the large shuffle")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in cases().items():
        if arguments.only not in name:
            continue
        try:
            case = make()
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error}")
            continue
        bare = DataLoader(case.dataset, **case.arguments)
        ours = DeviceLoader(DataLoader(case.dataset, **case.arguments), "cpu")
        found = interleave(
            {"ours": seconds_of(ours, case.batches), "torch": seconds_of(bare, case.batches)}, arguments.blocks
        )
        print(ratio_line(name, found["ours"], found["torch"]), f"torch {median(found['torch']) * 1e3:.2f} ms a batch")
    if arguments.only in "shuffle":
        large_shuffle(arguments.samples)
    print(conditions())


if __name__ == "__main__":
    main()
