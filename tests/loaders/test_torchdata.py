"""torchdata's StatefulDataLoader: read as torch's own, in one order on all ranks, and resumed by our states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_2
from streams import Stream

from unisono import DeviceLoader, rank

stateful_dataloader: Any = pytest.importorskip("torchdata.stateful_dataloader")

COUNT = 24


def loader_of(dataset: Any, workers: int = 0, size: int = 4, **options: Any) -> DeviceLoader:
    return DeviceLoader(stateful_dataloader.StatefulDataLoader(dataset, size, num_workers=workers, **options))


def samples_of(iterator: Any) -> list[int]:
    return [sample for batch in iterator for sample in batch[: iterator.valid_samples].tolist()]


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize(("dataset", "shuffle"), [(range(COUNT), True), (Stream(COUNT), None)])
def test_ranks_with_other_seeds_have_each_sample_once(mode, dataset, shuffle):
    def body() -> list[list[int]]:
        torch.manual_seed(rank())
        loader = loader_of(dataset, 2, shuffle=shuffle)
        return [samples_of(iter(loader)) for _ in range(2)]

    for epoch in zip(*mode.run(body), strict=True):
        assert sorted(itertools.chain(*epoch)) == list(range(COUNT))


@pytest.mark.parametrize("dataset", [range(COUNT), Stream(COUNT)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [4, 3])
def test_a_state_is_resumed_with_another_batch_size_and_in_the_same_process(dataset, workers, size):
    loader = loader_of(dataset, workers)
    iterator = iter(loader)
    first = [*next(iterator).tolist(), *next(iterator).tolist()]
    state = loader.state_dict()
    iterator.close()
    for resumed in (loader, loader_of(dataset, workers, size)):
        resumed.load_state_dict(state)
        assert sorted(first + samples_of(iter(resumed))) == list(range(COUNT))
