"""Which rows of a loop's batches count for a metric, if only the number of rows identifies the batches.

The first rows of a batch are its samples; the rows after them repeat others and do not count.

*Threads:* as `deliveries.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from unisono.tree import leaves

_KEPT = 4096  # batches of which no metric was gathered

_Batch = tuple[int, int]  # its numbers of samples and of rows


class Rows(NamedTuple):
    """The rows that count among those of several consecutive batches.

    Attributes:
        counted: the places of these rows.
        batches: the number of batches.
        end: the number of the last of these batches; 0 if it is not known.
        is_new: whether no metric was gathered of them.
        is_ambiguous: whether they may be others, of which different rows count.
    """

    counted: list[int]
    batches: int
    end: int
    is_new: bool
    is_ambiguous: bool = False


class LoopRows:
    """The rows of one loop, batch by batch.

    Attributes:
        num_batches: the number of batches.
        is_gathered: whether a metric was gathered of some batch.
        is_sized: whether the number of rows of every batch is known; else no number of rows identifies batches.
    """

    def __init__(self) -> None:
        self._runs: list[list[Any]] = []  # a batch, and how many equal ones came together: an epoch has only a few
        self._pending: deque[_Batch] = deque(maxlen=_KEPT)  # the last ones, of which no metric was gathered
        self.num_batches = self._num_rows = 0
        self.is_gathered = False
        self.is_sized = True

    def count(self, samples: int, repeated: int, is_sized: bool = True) -> None:
        """Register a delivered batch: its number of samples, and of the rows after them, which do not count."""
        self.is_sized = self.is_sized and is_sized
        batch = samples, samples + repeated
        if not self._runs or self._runs[-1][0] != batch:
            self._runs.append([batch, 0])
        run = self._runs[-1]
        run[1] += 1
        self._pending.append(run[0])  # the same object: thousands of them would leave the processor's cache
        self.num_batches += 1
        self._num_rows += batch[1]

    def fitting(self, rows: int, may_be_part: bool) -> Rows | None:
        """The rows that count of batches with `rows` rows: of the whole loop; of consecutive ones of which no metric
        was gathered, the latest that fit; or of the last one. None if none fit.

        Args:
            may_be_part: whether they may be less than the whole loop.
        """
        if not self.is_sized:
            return None
        if self._runs and self._num_rows == rows:
            whole = [batch for batch, times in self._runs for _ in range(times)]
            return Rows(_places_that_count(whole), self.num_batches, self.num_batches, not self.is_gathered)
        found = list(_windows(self._pending, rows)) if may_be_part else []
        if found:
            counted = [_places_that_count(batches) for _, batches in found]
            end = found[0][0] + self.num_batches - len(self._pending) if len(found) == 1 else 0
            return Rows(counted[-1], len(found[-1][1]), end, True, any(each != counted[0] for each in counted))
        last = self._runs[-1][0] if self._runs else (0, 0)
        if may_be_part and last[1] == rows:
            return Rows(list(range(last[0])), 1, 0, False)
        return None

    def gather(self, end: int) -> None:
        """Note that a metric was gathered of the batches up to number `end`."""
        self.is_gathered = True
        while len(self._pending) > self.num_batches - end:
            self._pending.popleft()

    def recent(self) -> list[int]:
        """The numbers of rows of the last three batches, the latest last."""
        return [size for (_, size), times in self._runs[-3:] for _ in range(min(times, 3))][-3:]


def _windows(batches: Sequence[_Batch], rows: int) -> Iterator[tuple[int, list[_Batch]]]:
    """The stretches of consecutive batches that have `rows` rows together, each with the number of its last batch."""
    found: deque[_Batch] = deque()
    total = 0
    for number, batch in enumerate(batches, 1):
        found.append(batch)
        total += batch[1]
        while total > rows:
            total -= found.popleft()[1]
        if found and total == rows:
            yield number, list(found)


def _places_that_count(batches: Sequence[_Batch]) -> list[int]:
    """The places of the rows that count in the concatenated batches."""
    places: list[int] = []
    start = 0
    for samples, rows in batches:
        places += range(start, start + samples)
        start += rows
    return places


def num_rows(values: Any) -> int:
    """Return how many rows the tensors have, each the same; TypeError or ValueError else."""
    rows = set()
    for leaf in leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            what = "a tensor of no dimension" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise TypeError(f"values hold {what}, which has no samples; gather it with gather(), or leave it out")
        rows.add(len(leaf))
    if not rows:
        raise TypeError(f"values={values!r} hold no tensor; pass one, or a nesting of them")
    if len(rows) > 1:
        raise ValueError(f"values have {sorted(rows)} rows; each tensor must have one row for each sample")
    return rows.pop()
