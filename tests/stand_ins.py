"""Loader workers over a stream that stand in for processes: each has its own copies, generators and worker info.

A process costs some forty milliseconds, and who reads which samples of a stream is decided by what runs in it, wherever
that is. So all combinations of ranks, workers and datasets are tried here, and a few with processes.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from unisono.loading.part_reader import Made, PartReader
from unisono.loading.workers import use_worker_info

_one_at_a_time = threading.Lock()  # the generators and the worker info are the process's


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Streams are read by stand-ins in the block, or in the function that it decorates, where processes were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.loading.streams.WorkerPool", StandIns)
        patch.setattr("unisono.loading.part_reader.answer_as_one_rank", lambda: None)  # it would be for this process
        yield


class StandIns:
    """Takes the place of a `WorkerPool`: the workers take turns, and those that have ended are left out."""

    def __init__(self, loader: DataLoader, reader: PartReader, start: Callable[[int], None]) -> None:
        self._count = loader.num_workers
        self._is_persistent = loader.persistent_workers
        self._parts = reader, start
        self._workers: list[_Worker] = []

    @property
    def is_idle(self) -> bool:
        return bool(self._workers) and self._is_persistent

    def serve(self, seed: int, number: int | None = None) -> Iterator[Made]:
        number = number or self._count
        if not self._workers or not self._is_persistent:
            self._workers = [_Worker(*self._parts, worker, number, seed) for worker in range(number)]
        return _in_turn([worker.batches() for worker in self._workers])


class _Worker:
    """What a process would have of its own, and what it does there."""

    def __init__(self, reader: PartReader, start: Callable[[int], None], worker: int, count: int, seed: int) -> None:
        self._reader, start = copy.deepcopy((reader, start), {id(reader.cell): reader.cell})  # that one is shared
        self._context = contextvars.copy_context()
        self._info: Any = WorkerInfo(id=worker, num_workers=count, seed=seed + worker, dataset=self._reader)
        with _one_at_a_time, _put_back():
            _seed_as_torch_does(seed + worker)
            self._generators = _generators()
        self._inside(start, worker)

    def batches(self) -> Iterator[Made]:
        iterator = self._inside(self._made)
        while (made := self._inside(next, iterator, None)) is not None:
            yield made

    def _made(self) -> Iterator[Made]:
        info = get_worker_info()
        return self._reader.made(int(self._reader.cell[0]), info.worker, info)

    def _inside(self, do: Callable[..., Any], *arguments: Any) -> Any:
        with _one_at_a_time, _put_back():
            use_worker_info(self._info)
            _set_generators(self._generators)
            try:
                return self._context.run(do, *arguments)
            finally:
                self._info, self._generators = get_worker_info(), _generators()


def _in_turn(workers: list[Iterator[Made]]) -> Iterator[Made]:
    while workers:
        for worker in list(workers):
            made = next(worker, None)
            if made is None:
                workers.remove(worker)
            else:
                yield made


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    info, generators = get_worker_info(), _generators()
    try:
        yield
    finally:
        use_worker_info(info)
        _set_generators(generators)


def _generators() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed_as_torch_does(seed: int) -> None:
    """In each worker differently."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` notes the stack, for devices: it takes 0.5 ms
    numpy.random.seed(seed & 0xFFFFFFFF)
