"""The bytes that a loader holds, over an epoch with a loop that is slower than its source, against `prefetch_bytes`.

    python bench/prefetch_bytes.py [--batches 60] [--picture docs/images/prefetch_bytes.png]

The source records each batch when it creates it and when the last reference to it is dropped. The upper limit is the
bound itself, plus one batch in the reader, whose size is unknown before it is made, and one in the loop.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from blocks import conditions

from unisono import DeviceLoader

MIB = 1 << 20
LARGEST, SMALLEST = 8, 1  # MiB
STEP_BYTES = 24 * MIB  # hashed by each step: slower than filling a batch


class Case(NamedTuple):
    """How a loader is bounded: by bytes (in MiB), or only by the number of batches."""

    prefetch_mib: int | None
    prefetch: int = 8

    @property
    def most_mib(self) -> int:
        """The upper limit: the bound, or one larger batch, plus one batch each in the reader and in the loop."""
        if self.prefetch_mib is not None:
            return max(self.prefetch_mib, LARGEST) + 2 * LARGEST
        return (self.prefetch + max(self.prefetch // 2, 1) + 1) * LARGEST + 2 * LARGEST

    @property
    def title(self) -> str:
        if self.prefetch_mib is not None:
            return f"prefetch_bytes={self.prefetch_mib} MiB"
        return f"prefetch={self.prefetch}"


CASES = [Case(None), Case(None, 1), Case(48), Case(24), Case(12), Case(4)]
DRAWN = [Case(None), Case(48), Case(24), Case(12)]


class Books:
    """The batches of a source, of unequal sizes, and the bytes of those alive.

    Attributes:
        most: the most bytes alive while the loop had its n-th batch; 0: before it had one.
    """

    def __init__(self, batches: int) -> None:
        draw = random.Random(1)
        self._sizes = [draw.randint(SMALLEST * 16, LARGEST * 16) * MIB // 16 for _ in range(batches)]
        self.most = [0]
        self._alive = 0
        self._lock = threading.RLock()  # a batch may be freed while another is recorded

    def __iter__(self) -> Iterator[torch.Tensor]:
        for size in self._sizes:
            batch = torch.zeros(size, dtype=torch.uint8)
            weakref.finalize(batch, self._book, -size)
            self._book(size)
            yield batch
            del batch

    def turn_page(self) -> None:
        """The loop has the next batch."""
        with self._lock:
            self.most.append(self._alive)

    def _book(self, change: int) -> None:
        with self._lock:
            self._alive += change
            self.most[-1] = max(self.most[-1], self._alive)


def run(case: Case, batches: int) -> Books:
    """One epoch."""
    books = Books(batches)
    bound = None if case.prefetch_mib is None else case.prefetch_mib * MIB
    loader = DeviceLoader(
        books,
        "cpu",
        prefetch=case.prefetch,
        prefetch_bytes=bound,
        already_sharded=True,
    )
    step = bytes(STEP_BYTES)
    for batch in loader:
        books.turn_page()
        hashlib.sha256(step).digest()
        del batch
    return books


def draw(histories: dict[Case, Books], path: Path) -> None:
    """The most bytes alive while the loop had each batch; dashed, the upper limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, (case, books) in enumerate(histories.items()):
        color, batches = f"C{number}", len(books.most)
        axes.step(range(batches), [alive / MIB for alive in books.most], where="post", color=color, linewidth=1.2)
        height: float = case.most_mib
        if case.prefetch_mib is None:
            height = max(books.most) / MIB
        else:
            axes.axhline(height, color=color, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(batches + 0.5, height, case.title, color=color, va="center", fontsize=9)
    axes.set(xlabel="batch", ylabel="MiB alive", ylim=(0, None), xlim=(0, batches))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    histories = {case: run(case, arguments.batches) for case in CASES}
    print(f"batches of {SMALLEST} to {LARGEST} MiB, {arguments.batches} of them, a slow loop; {conditions()}")
    for case, books in histories.items():
        most = max(books.most)
        bound = case.most_mib
        print(f"{case.title:<28} alive at most {most / MIB:6.1f} MiB of {bound:4d}")
        assert most <= bound * MIB
    if arguments.picture is not None:
        draw({case: books for case, books in histories.items() if case in DRAWN}, arguments.picture)


if __name__ == "__main__":
    main()
