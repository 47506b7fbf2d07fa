"""What plain data costs against torch's DataLoader: many small values in a batch, images, a large shuffle.

    python bench/plain_data.py [--blocks 10] [--samples 10000000]

Each block makes one pass with torch's DataLoader and one with a DeviceLoader over another DataLoader of the same
arguments. Each case has a process of its own: thousands of small tensors leave a heap in pieces, in which the next case
finds no room for its batches. JPEGs need Pillow; without it, a line says so.
"""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from blocks import interleave, options, show
from overhead import Numbers
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader

DEVICES = ("cpu",)
OURS, THEIRS = "unisono", "a bare DataLoader"


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


class Arrays(Numbers):
    """Images of 3 x 64 x 64 that are in memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._held = torch.rand(64, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def __getitem__(self, index: int) -> Any:
        return self._held[index % 64]


class Tokens(Dataset[Any]):
    """Sequences of 1,024 tokens of a file, and the same moved by one."""

    def __init__(self, length: int) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - for as long as the dataset
        numpy.arange(length * 1024 + 1, dtype=numpy.uint16).tofile(self._file.name)
        self._tokens = numpy.memmap(self._file.name, numpy.uint16, "r")

    def __len__(self) -> int:
        return len(self._tokens) // 1024

    def __getitem__(self, index: int) -> Any:
        tokens = torch.from_numpy(self._tokens[index * 1024 : index * 1024 + 1025].astype(numpy.int64))
        return tokens[:-1], tokens[1:]


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
    return {
        "10,000 ints, 1 worker, a pass": lambda: Case(Numbers(many), 1, {"batch_size": many, "num_workers": 1}),
        "10,000 ints, 1 worker": lambda: Case(Numbers(8 * many), 8, {"batch_size": many, **kept}),
        "10,000 strings, 1 worker": lambda: Case(Texts(8 * many), 8, {"batch_size": many, **kept}),
        "10,000 strings, no worker": lambda: Case(Texts(8 * many), 8, {"batch_size": many}),
        "5,000 small tensors, no worker": lambda: Case(Tensors(20_000), 4, {"batch_size": 5000, "collate_fn": as_list}),
        "images 3 x 64 x 64, 64 a batch, no worker": lambda: Case(Arrays(2560), 40, {"batch_size": 64}),
        "tokens, 8 x 1,024, 2 workers": lambda: Case(
            Tokens(2400), 300, {"batch_size": 8, "shuffle": True, "num_workers": 2, "persistent_workers": True}
        ),
        "JPEG, 224, 64 a batch, 2 workers": lambda: Case(
            Images(640), 10, {"batch_size": 64, "num_workers": 2, "persistent_workers": True}
        ),
    }


def seconds_of(loader: Any, batches: int, clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Seconds per batch of a pass, its start and end included."""

    def run() -> float:
        start = clock()
        count = sum(1 for _ in loader)
        assert count == batches
        return (clock() - start) / batches

    return run


def first_batch(name: str, samples: int) -> None:
    """In a process of its own: seconds to the first batch of a shuffled epoch, and MiB that the process gains."""
    loader: Any = DataLoader(Numbers(samples), batch_size=32, shuffle=True)
    loader = loader if name == THEIRS else DeviceLoader(loader, "cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    next(iter(loader))
    seconds = time.perf_counter() - start
    print(seconds, max(1, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def large_shuffle(samples: int, blocks: int) -> None:
    found: dict[str, list[list[float]]] = {OURS: [], THEIRS: []}
    for name in [*found] * blocks:
        text = f"import plain_data; plain_data.first_batch({name!r}, {samples})"
        out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=sys.path[0])
        found[name].append([float(each) for each in out.stdout.split()])
    for place, (what, unit) in enumerate((("seconds", "s"), ("memory", "MiB"))):
        costs = {name: [each[place] for each in values] for name, values in found.items()}
        show(f"the first batch of {samples:,} shuffled samples, {what}", costs, unit=unit)


def compare(name: str, blocks: int) -> None:
    """In a process of its own: one case."""
    torch.set_num_threads(1)
    try:
        case = cases()[name]()
    except ModuleNotFoundError as error:
        print(f"{name}: left out, {error}")
        return
    bare = DataLoader(case.dataset, **case.arguments)
    ours = DeviceLoader(DataLoader(case.dataset, **case.arguments), "cpu")
    clocks = {name: time.perf_counter}
    if case.arguments.get("num_workers"):
        clocks[f"{name}, CPU of the parent"] = time.process_time
    for what, clock in clocks.items():
        variants = {OURS: seconds_of(ours, case.batches, clock), THEIRS: seconds_of(bare, case.batches, clock)}
        show(what, interleave(variants, blocks))


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=10, samples=10**7)
    for name in cases():
        text = f"import plain_data; plain_data.compare({name!r}, {arguments.blocks})"
        subprocess.run([sys.executable, "-c", text], check=True, cwd=sys.path[0])
    large_shuffle(arguments.samples, max(1, arguments.blocks // 4))


if __name__ == "__main__":
    main()
