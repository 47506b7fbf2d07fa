"""Iterable datasets that are cut in each way, and what each rank is given of them.

The oracles deal lists: a stream that is cut by stride is one list, of which part p of P takes `[p::P]`. Where many
ranks, workers and datasets are combined, stand-ins take the place of loader workers that are processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from modes import SOLO, Mode
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono import DeviceLoader

COUNT = 23
SIZE = 3
DEVICE_OPTIONS = ("tail", "split", "already_sharded", "fixed_batch_size")


class Stream(IterableDataset):
    """The numbers 0 .. count - 1, whoever asks. `reads` notes what was read in this process."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.reads.append(number)
            yield number


class CutsItself(Stream):
    """Asks for its place among the loader workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, row = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.count, row)


class Sharded(Stream):
    """Gives shards, as HuggingFace's datasets do."""

    def __init__(self, count: int = COUNT, first: int = 0, row: int = 1) -> None:
        super().__init__(count)
        self.first, self.row = first, row

    def shard(self, num_shards: int, index: int) -> Sharded:
        return type(self)(self.count, index, num_shards)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.count, self.row)


class Got(NamedTuple):
    """One rank's pass: what it was given in each step, how many of that count, and the state at the end."""

    batches: list[list[Any]]
    valid: list[int]
    state: dict[str, Any]

    @property
    def counted(self) -> list[Any]:
        return [sample for batch, valid in zip(self.batches, self.valid, strict=True) for sample in batch[:valid]]


def loop(loader: DeviceLoader, most: int | None = None) -> Got:
    """What is left of the pass, or the next `most` batches of it."""
    iterator = iter(loader)
    batches, valid = [], []
    for batch in iterator:
        batches.append((batch[0] if isinstance(batch, list) else batch).tolist())  # without labels
        valid.append(iterator.valid_samples)
        if len(batches) == most:
            break
    return Got(batches, valid, loader.state_dict())


def loader_of(dataset: Any, workers: int = 0, size: int | None = SIZE, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=size, num_workers=workers, **options)


def passes(
    mode: Mode, make: Callable[[], Any], *plan: int | None, workers: int = 0, state: Any = None, **options: Any
) -> list[list[Got]]:
    """For each rank one pass for each place of the plan, which says how many batches it takes; None takes all."""

    def body() -> list[Got]:
        device_options = {name: options[name] for name in DEVICE_OPTIONS if name in options}
        more = {name: value for name, value in options.items() if name not in device_options}
        loader = DeviceLoader(loader_of(make(), workers, **more), **device_options)
        if state is not None:
            loader.load_state_dict(state)
        return [loop(loader, most) for most in plan]

    return mode.run(body)


def refused(mode: Mode, *arguments: Any, **options: Any) -> list[Exception]:
    """What each rank's loop ends with."""

    def loop_over() -> Exception | None:
        try:
            passes(SOLO, *arguments, **options)
        except Exception as error:
            return type(error)(*error.args)  # the error itself holds all that it saw
        return None

    return [error for error in mode.run(loop_over) if error is not None]


def all_of(found: Sequence[Sequence[Got]], place: int = 0) -> list[Any]:
    return sorted(sample for each in found for sample in each[place].counted)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


class ByEpoch(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (self.epoch * 1000 + number for number in range(self.count))
