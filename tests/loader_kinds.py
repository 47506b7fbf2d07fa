"""Kinds of data that people train on: samples that are numbered, made by this package's, torch's and other libraries'
loaders, for runs that are left and resumed on other numbers of ranks and loader workers.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from unisono import IndexedSampler, current_world

COUNT = 40
SHARDS = 8
BATCH = 2

Make = Callable[[str, int], Any]
"""A loader for a folder with samples, and a number of loader workers."""


class Kind(NamedTuple):
    """A loader of `COUNT` samples.

    Attributes:
        make: returns it, anew for each process.
        needs: the modules that it needs beside this package's own needs.
        write: puts its samples into a folder.
        keeps_order: whether the samples come in one order, whoever reads them.
        repeats: how many samples it may repeat in an epoch, to give each rank as many.
        tidy: removes what killed processes leave.
    """

    make: Make
    needs: tuple[str, ...] = ()
    write: Callable[[str], None] = lambda folder: None
    keeps_order: bool = False
    repeats: int = 0
    tidy: Callable[[], None] = lambda: None

    @property
    def lacks(self) -> list[str]:
        """The modules that are not installed here."""
        return [name for name in self.needs if importlib.util.find_spec(name.partition(".")[0]) is None]


def numbers_of(batch: Any) -> torch.Tensor:
    """The numbers of the samples of a batch, whatever kind of loader has made it."""
    if not isinstance(batch, torch.Tensor) and hasattr(batch, "keys"):
        batch = batch["ids"]
    batch = batch[0] if isinstance(batch, list | tuple) else batch
    return torch.as_tensor(batch, device=torch.default_generator.device).long()


def ids_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([int(sample["ids"]) for sample in samples])


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> int:
        return row


class TokenBudget:
    """A batch sampler: rows of like lengths together, as many as a budget of tokens allows, in a random order."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __iter__(self) -> Iterator[list[int]]:
        batches, batch, longest = list[list[int]](), list[int](), 0
        for row in sorted(torch.randperm(COUNT).tolist(), key=self.length_of):
            longest = max(longest, self.length_of(row))
            if batch and longest * (len(batch) + 1) > self.budget:
                batches.append(batch)
                batch, longest = [], self.length_of(row)
            batch.append(row)
        batches.append(batch)
        yield from (batches[place] for place in torch.randperm(len(batches)).tolist())

    @staticmethod
    def length_of(row: int) -> int:
        return 1 + row * 7 % 5


class Numbers(IterableDataset[int]):
    """The numbers of all shards, in an order of the epoch's. The whole stream, whoever asks."""

    def __init__(self, shards: range = range(SHARDS)) -> None:
        self.shards, self.epoch = shards, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> list[int]:
        found = []
        for shard in self.shards:
            rows = [*range(shard, COUNT, SHARDS)]
            random.Random(f"{shard} {self.epoch}").shuffle(rows)
            found += rows
        return found

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers()


class OfShards(Numbers):
    """Gives any rank its shards."""

    def shard(self, num_shards: int, index: int) -> Numbers:
        return type(self)(self.shards[index::num_shards])


class OfWorkers(Numbers):
    """Asks which loader worker it is in."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from self.numbers()[info.id :: info.num_workers] if info else self.numbers()


class WithState(OfShards):
    """Says where it is, and continues there."""

    place = 0
    _given: int | None = None

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["place"]

    def __iter__(self) -> Iterator[int]:
        self.place, self._given = self._given or 0, None
        for number in self.numbers()[self.place :]:
            self.place += 1
            yield number


def own(dataset: type[Any], folder: str, workers: int) -> Any:
    return DataLoader(dataset(), BATCH, num_workers=workers)


def of_rows(folder: str, workers: int) -> Any:
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def of_computed_indices(folder: str, workers: int) -> Any:
    return DataLoader(Rows(), BATCH, sampler=IndexedSampler(Rows()), num_workers=workers)


def in_buckets(folder: str, workers: int) -> Any:
    return DataLoader(Rows(), batch_sampler=TokenBudget(5), num_workers=workers)


def stateful(is_stream: bool, folder: str, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if is_stream:
        return StatefulDataLoader(OfShards(), BATCH, num_workers=workers)
    return StatefulDataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def hugging_face_map(folder: str, workers: int) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"ids": list(range(COUNT))}).with_format("torch")
    return DataLoader(rows, BATCH, shuffle=True, num_workers=workers)


def hugging_face(how: str, folder: str, workers: int) -> Any:
    import datasets

    stream = datasets.Dataset.from_dict({"ids": list(range(COUNT))}).to_iterable_dataset(num_shards=SHARDS)
    if how == "shuffled":
        stream = stream.shuffle(seed=1, buffer_size=5)
    elif how == "split by node":
        from datasets.distributed import split_dataset_by_node

        stream = split_dataset_by_node(stream, current_world().rank, current_world().world_size)
    else:
        stream = stream.map(lambda sample: sample)
    return DataLoader(stream, BATCH, collate_fn=ids_of, num_workers=workers)


def webdataset(has_own: bool, splits: bool, folder: str, workers: int) -> Any:
    import webdataset

    kind = webdataset.WebLoader if has_own else DataLoader
    urls = f"{folder}/{{0..{SHARDS - 1}}}.tar"
    options = {"nodesplitter": webdataset.split_by_node} if splits else {}
    stream = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False, **options)
    return kind(stream.map(lambda sample: int(sample["cls"])), batch_size=BATCH, num_workers=workers)


def write_tars(folder: str) -> None:
    import webdataset

    for shard in range(SHARDS):
        with webdataset.TarWriter(f"{folder}/{shard}.tar") as tar:
            for number in range(shard, COUNT, SHARDS):
                tar.write({"__key__": f"{number:04}", "cls": str(number)})


def litdata(has_own: bool, folder: str, workers: int) -> Any:
    import litdata

    kind = litdata.StreamingDataLoader if has_own else DataLoader
    stream = litdata.StreamingDataset(folder, shuffle=True, drop_last=False)
    return kind(stream, batch_size=BATCH, collate_fn=ids_of, num_workers=workers)


def write_chunks(folder: str) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(folder, chunk_size=5)
    for number in range(COUNT):
        writer[number] = {"ids": torch.tensor(number)}
    writer.done()
    writer.merge()


def mosaic(has_own: bool, folder: str, workers: int) -> Any:
    import streaming

    kind = streaming.StreamingDataLoader if has_own else DataLoader
    stream = streaming.StreamingDataset(local=folder, batch_size=BATCH, shuffle=True, num_canonical_nodes=2)
    return kind(stream, batch_size=BATCH, collate_fn=ids_of, num_workers=workers)


def write_mds(folder: str) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=folder, columns={"ids": "int"}, size_limit=200, exist_ok=True) as writer:
        for number in range(COUNT):
            writer.write({"ids": number})


def tidy_mosaic() -> None:
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()


def grain_pipeline(folder: str, workers: int) -> Any:
    import grain

    return grain.MapDataset.range(COUNT).shuffle(seed=3).batch(BATCH).to_iter_dataset()


def grain_loader(folder: str, workers: int) -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(COUNT, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(
        data_source=range(COUNT), sampler=sampler, operations=[grain.transforms.Batch(BATCH)], worker_count=0
    )


def torchdata_nodes(folder: str, workers: int) -> Any:
    from torchdata import nodes

    rows = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(COUNT)))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(rows, BATCH), torch.tensor))


def replay_buffer(folder: str, workers: int) -> Any:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(COUNT),
        sampler=SamplerWithoutReplacement(),
        batch_size=BATCH,
        generator=torch.Generator(torch.default_generator.device).manual_seed(3),  # on all ranks alike
    )
    buffer.extend(TensorDict({"ids": torch.arange(COUNT)}, [COUNT]))
    return buffer


def spdl(folder: str, workers: int) -> Any:
    from spdl.dataloader import DataLoader as Pipeline

    return Pipeline(range(COUNT), batch_size=BATCH, aggregator=torch.tensor, num_threads=2, output_order="input")


_WEB, _HF, _LIT, _MDS = ("webdataset",), ("datasets",), ("litdata",), ("streaming",)
KINDS = {
    "rows": Kind(of_rows, keeps_order=True),
    "computed indices": Kind(of_computed_indices, keeps_order=True),
    "token budget": Kind(in_buckets, keeps_order=True),
    "stream by stride": Kind(partial(own, Numbers)),
    "stream of shards": Kind(partial(own, OfShards)),
    "stream by workers": Kind(partial(own, OfWorkers)),
    "stream with a state": Kind(partial(own, WithState)),
    "StatefulDataLoader": Kind(partial(stateful, False), ("torchdata",), keeps_order=True),
    "StatefulDataLoader of a stream": Kind(partial(stateful, True), ("torchdata",)),
    "Hugging Face rows": Kind(hugging_face_map, _HF, keeps_order=True),
    "Hugging Face stream": Kind(partial(hugging_face, ""), _HF),
    "Hugging Face shuffled": Kind(partial(hugging_face, "shuffled"), _HF),
    "Hugging Face split by node": Kind(partial(hugging_face, "split by node"), _HF),
    "webdataset": Kind(partial(webdataset, False, False), _WEB, write_tars),
    "webdataset split by node": Kind(partial(webdataset, False, True), _WEB, write_tars),
    "WebLoader": Kind(partial(webdataset, True, True), _WEB, write_tars),
    "litdata": Kind(partial(litdata, False), _LIT, write_chunks),
    "litdata's loader": Kind(partial(litdata, True), _LIT, write_chunks),
    "mosaicml-streaming": Kind(partial(mosaic, False), _MDS, write_mds, repeats=2, tidy=tidy_mosaic),
    "mosaicml-streaming's loader": Kind(partial(mosaic, True), _MDS, write_mds, repeats=2, tidy=tidy_mosaic),
    "grain": Kind(grain_pipeline, ("grain",), keeps_order=True),
    "grain's loader": Kind(grain_loader, ("grain",), keeps_order=True),
    "torchdata.nodes": Kind(torchdata_nodes, ("torchdata.nodes",), keeps_order=True),
    "torchrl's buffer": Kind(replay_buffer, ("torchrl.data",)),
    "spdl": Kind(spdl, ("spdl.dataloader",), keeps_order=True),
}
TESTED_HERE = {*_WEB, *_HF, "torchdata"}
"""The modules that all tests have; those of tests/libraries have more."""
