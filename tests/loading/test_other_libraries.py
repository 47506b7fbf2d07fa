"""webdataset's streams and torchdata's loaders: every sample once, and resumed."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from streams import Stream
from torch.utils.data import DataLoader

from unisono import DeviceLoader, rank
from unisono.errors import CollectiveMismatchError, StateError

webdataset: Any = pytest.importorskip("webdataset")

COUNT = 37
SHARDS = 6


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for number in range(shard, COUNT, SHARDS):
                tar.write({"__key__": f"{number:04}", "cls": str(number)})
    return f"{folder}/{{0..{SHARDS - 1}}}.tar"


def label(sample: dict[str, Any]) -> float:
    """A fraction, by which streams cannot be distinguished at a glance."""
    return float(sample["cls"])


def dataset_of(urls: str, shuffles: bool, **options: Any) -> Any:
    dataset = webdataset.WebDataset(urls, shardshuffle=SHARDS if shuffles else False, **options)
    return (dataset.shuffle(10) if shuffles else dataset).map(label)


def delivered(
    mode: Mode, urls: str, workers: int, shuffles: bool, already_sharded: bool | None = None, **options: Any
) -> list[float]:
    def body() -> list[float]:
        loader = DataLoader(dataset_of(urls, shuffles, **options), 4, num_workers=workers)
        iterator = iter(DeviceLoader(loader, already_sharded=already_sharded))
        return [sample for batch in iterator for sample in batch[: iterator.valid_samples].tolist()]

    return sorted(sample for each in mode.run(body) for sample in each)


def test_what_is_split_by_node_in_processes_is_cut_once(urls):
    assert delivered(PROCESSES_2, urls, 2, True, nodesplitter=webdataset.split_by_node) == list(range(COUNT))


def test_a_rank_without_a_shard_takes_nothing_from_the_others(urls):
    options = {"nodesplitter": webdataset.split_by_node, "empty_check": False}
    first = urls.replace(f"{{0..{SHARDS - 1}}}", "0")
    assert delivered(PROCESSES_2, first, 0, False, **options) == list(range(0, COUNT, SHARDS))


def test_what_has_no_nodesplitter_is_cut_by_loader_workers(urls):
    assert delivered(THREADS_2, urls, 2, True) == list(range(COUNT))


@pytest.mark.parametrize(("seed", "is_refused"), [(None, True), (1, False)])
def test_a_custom_shuffle_in_workers_resumes_only_with_a_fixed_seed(urls, seed, is_refused):
    def loader() -> DeviceLoader:
        dataset = webdataset.WebDataset(urls, shardshuffle=False).shuffle(10, seed=seed).map(label)
        return DeviceLoader(DataLoader(dataset, 4, num_workers=2))

    first, rest = loader(), loader()
    before = [sample for batch in itertools.islice(first, 4) for sample in batch.tolist()]
    rest.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="what was delivered") if is_refused else contextlib.nullcontext():
        before += [sample for batch in rest for sample in batch.tolist()]
        assert sorted(before) == list(range(COUNT))


def test_a_shuffle_of_ones_own_in_the_loops_process_is_refused(urls):
    assert delivered(THREADS_2, urls, 0, False) == list(range(COUNT))
    with pytest.raises(RuntimeError, match="read different streams"):
        delivered(THREADS_2, urls, 0, True)


def test_a_loader_of_its_own_with_stages_is_cut_once(urls):
    def body() -> list[float]:
        dataset = dataset_of(urls, False, nodesplitter=webdataset.split_by_node).map(lambda sample: (sample,))
        loader = webdataset.WebLoader(dataset, batch_size=4, num_workers=2)
        loader = DeviceLoader(loader.unbatched().batched(3))
        return [sample for (batch,) in loader for sample in batch[: loader.valid_samples].tolist()]

    assert sorted(itertools.chain(*PROCESSES_2.run(lambda: body()))) == list(range(COUNT))


def test_a_mixture_that_is_seeded_by_rank_is_refused():
    pytest.importorskip("torchdata.nodes")

    def loop_over() -> None:
        from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, MultiNodeWeightedSampler

        def numbers(first: int) -> Any:
            return IterableWrapper(range(first, first + 100))

        mixed = MultiNodeWeightedSampler({"a": numbers(0), "b": numbers(1000)}, {"a": 0.5, "b": 0.5}, seed=3)
        for _ in DeviceLoader(Loader(Mapper(Batcher(mixed, 8), torch.tensor))):
            pass

    with pytest.raises(CollectiveMismatchError, match="must read the same batches"):
        PROCESSES_2.run(loop_over)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(PROCESSES_2, 2, 2), (SOLO, 1, 3), (PROCESSES_2, 0, None)], marks=pytest.mark.slow),
        [(SOLO, 0, 2), (PROCESSES_2, 0, 2), (SOLO, 2, None)],
    ],
)
def test_shards_go_on_with_other_numbers_of_ranks_and_workers(urls, plan):
    kinds = [(own, splitter) for own in (False, True) for splitter in (None, "split_by_node", "single_node_only")]

    def left(kind: Any, workers: int, most: int | None, state: Any) -> tuple[list[float], Any]:
        own, splitter = kind
        dataset = dataset_of(urls, False, nodesplitter=splitter and getattr(webdataset, splitter))
        loader = DeviceLoader((webdataset.WebLoader if own else DataLoader)(dataset, batch_size=2, num_workers=workers))
        if state is not None:
            loader.load_state_dict(state)
        batches = itertools.islice(iterator := iter(loader), most)
        return [each for batch in batches for each in batch[: iterator.valid_samples].tolist()], loader.state_dict()

    found: dict[Any, list[float]] = {kind: [] for kind in kinds}
    states = dict.fromkeys(kinds)
    for mode, workers, most in plan:
        got = mode.run(lambda how=(workers, most): {kind: left(kind, *how, states[kind]) for kind in kinds})
        for kind in kinds:
            found[kind] += [sample for each in got for sample in each[kind][0]]
            states[kind] = got[0][kind][1]
    assert {kind: sorted(samples) for kind, samples in found.items()} == {kind: list(range(COUNT)) for kind in kinds}


stateful_dataloader: Any = pytest.importorskip("torchdata.stateful_dataloader")

COUNT = 24


def loader_of(dataset: Any, workers: int, size: int = 4, **options: Any) -> DeviceLoader:
    return DeviceLoader(stateful_dataloader.StatefulDataLoader(dataset, size, num_workers=workers, **options))


def samples_of(iterator: Any) -> list[int]:
    return [sample for batch in iterator for sample in batch[: iterator.valid_samples].tolist()]


def test_ranks_with_other_seeds_have_each_sample_once():
    def body() -> list[list[int]]:
        torch.manual_seed(rank())
        loaders = loader_of(range(COUNT), 2, shuffle=True), loader_of(Stream(COUNT), 2)
        return [samples_of(iter(loader)) for loader in loaders for _ in range(2)]

    for epoch in zip(*PROCESSES_2.run(body), strict=True):
        assert sorted(itertools.chain(*epoch)) == list(range(COUNT))


@pytest.mark.parametrize(("dataset", "workers"), [(range(COUNT), 2), (Stream(COUNT), 2), (Stream(COUNT), 0)])
def test_a_state_resumes_with_another_batch_size_and_in_the_same_process(dataset, workers):
    loader = loader_of(dataset, workers)
    iterator = iter(loader)
    first = [*next(iterator).tolist(), *next(iterator).tolist()]
    state = loader.state_dict()
    iterator.close()
    for resumed in (loader, loader_of(dataset, workers, 3)):
        resumed.load_state_dict(state)
        assert sorted(first + samples_of(iter(resumed))) == list(range(COUNT))
