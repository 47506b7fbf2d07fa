"""Which rank's part of a stream a dataset is, and how the part of any rank is made: by what libraries offer for it.

A pass over a stream that its dataset has cut keeps its parts to its end: whichever ranks continue it read the parts of
those that began it. So each part must be made again, for the rank and the number of ranks that it was cut for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unisono.loading.workers import use_worker_info


class Whole(IterableDataset[Any]):
    """The batches of a loader that has loader workers of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ByPlace:
    """A stage of a webdataset pipeline that keeps the shards of one rank, as its `split_by_node` does for its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __call__(self, shards: Iterable[Any]) -> Iterator[Any]:
        return islice(shards, self.rank, None, self.ranks)


def loader_behind(loader: Any) -> Any:
    """The DataLoader that makes the batches of a webdataset `WebLoader`; one over all its stages, if these change the
    batches. Any other loader itself."""
    stages = getattr(loader, "pipeline", None)
    if not is_of(loader, "webdataset") or not stages or not isinstance(stages[0], DataLoader):
        return loader
    is_plain = len(stages) == 1 and loader.repetitions == 1 and max(loader.nsamples, loader.length) <= 0
    return stages[0] if is_plain else DataLoader(Whole(loader), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def is_of(value: Any, library: str) -> bool:
    """Whether a class of the object comes from a library, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == library for kind in type(value).__mro__)


def cuts_by_node(dataset: Any, rank: int, ranks: int) -> bool:
    """Whether it is a webdataset pipeline that splits its shards by node, or a dataset of mosaicml-streaming, which has
    found the rank. It cannot be noticed otherwise: cut again, each rank would miss samples."""
    if isinstance(dataset, Whole):
        return cuts_by_node(dataset.loader.pipeline[0].dataset, rank, ranks)
    stages = getattr(dataset, "pipeline", ())
    if is_of(dataset, "webdataset") and isinstance(stages, list | tuple):
        webdataset: Any = import_module("webdataset")
        splits = any(stage is webdataset.split_by_node for stage in stages)
        return splits and webdataset.utils.pytorch_worker_info()[:2] == (rank, ranks)
    if not is_of(dataset, "streaming"):
        return False
    seen: Any = import_module("streaming.base.world").World.detect()
    return (seen.rank, seen.num_ranks) == (rank, ranks)


def continues_anywhere(dataset: Any, rank: int, ranks: int) -> bool:
    """Whether it is a dataset of mosaicml-streaming that has found the rank: told the epoch and the number of samples
    that all ranks have taken, it continues there, with any numbers of ranks and loader workers."""
    return is_of(dataset, "streaming") and hasattr(dataset, "next_epoch") and cuts_by_node(dataset, rank, ranks)


def is_sized_by_rank(dataset: Any, rank: int, ranks: int) -> bool:
    """Whether the length of a dataset of litdata or mosaicml-streaming is that of its rank's part."""
    if is_of(dataset, "litdata"):
        return bool(getattr(getattr(dataset, "distributed_env", None), "world_size", 1) == ranks)
    return is_of(dataset, "streaming") and cuts_by_node(dataset, rank, ranks)


def move(dataset: Any, epoch: int, offset: int, own: Any) -> Any:
    """Let the next pass over a dataset that `continues_anywhere` begin after `offset` samples of an epoch. `own` is
    what an earlier call for that epoch returned: what its order depends on."""
    own = own or dataset.state_dict(0, True)
    is_next = dataset.next_epoch == epoch
    if not is_next:
        dataset.next_epoch = epoch  # else it would take a state of an earlier one for an old one
    # Not without need: what it writes is shared by all ranks of a machine, and one may be reading.
    if offset or (not is_next and hasattr(dataset, "_resume_shm")):
        dataset.load_state_dict({**own, "epoch": epoch, "sample_in_epoch": offset})
    return own


def twin_of(dataset: Any) -> Any:
    """A shallow copy; Hugging Face's share all attributes."""
    twin = copy.copy(dataset)
    twin.__dict__ = {**dataset.__dict__}
    return twin


def part_of(dataset: Any, rank: int, ranks: int) -> Any:
    """The dataset as that rank of `ranks` reads it; None if it cannot be cut so."""
    if hasattr(dataset, "_distributed") and is_of(dataset, "datasets"):
        if dataset._distributed is None:
            if ranks == 1:
                return dataset
            by_node: Any = import_module("datasets.distributed")  # `shard` would leave ranks empty if files are few
            return by_node.split_dataset_by_node(dataset, rank, ranks)
        twin = twin_of(dataset)
        twin._distributed = type(dataset._distributed)(rank=rank, world_size=ranks)
        return twin
    if is_of(dataset, "webdataset") and isinstance(getattr(dataset, "pipeline", None), list):
        webdataset: Any = import_module("webdataset")
        twin, own = twin_of(dataset), ByPlace(rank, ranks)
        # The second one, its default, refuses several ranks, which would all read the whole.
        by_node = webdataset.split_by_node, webdataset.shardlists.single_node_only
        twin.pipeline = [own if any(stage is each for each in by_node) else stage for stage in dataset.pipeline]
        return twin
    if is_of(dataset, "litdata") and hasattr(dataset, "distributed_env"):
        twin = twin_of(dataset)
        env = dataset.distributed_env
        twin.distributed_env = type(env)(ranks, rank, env.num_nodes if env.world_size == ranks else 1)
        return twin
    if ranks == 1:
        return dataset
    # By name: under other names the numbers may mean something else.
    with suppress(Exception):
        if isinstance(part := dataset.shard(num_shards=ranks, index=rank), Iterable):
            return part
    return None


def why_not_cut(dataset: Any) -> str:
    """Why `part_of` is None for it, and the way out."""
    if isinstance(dataset, Whole):
        name = type(dataset.loader).__name__
        return f"the stages of a {name} after its loader workers cannot do so again: put them before, into the dataset"
    return (
        f"a {type(dataset).__name__} cannot make another rank's part again: give it a method shard(num_shards, index), "
        "which returns that part, or let it ask torch.utils.data.get_worker_info() for num_workers"
    )


def hide_workers() -> None:
    """Let a dataset in the only loader worker of its stream see none: Hugging Face's shuffle buffers would draw another
    order."""
    use_worker_info(None)
    with suppress(ImportError):  # what datasets does in a loader worker, whose parent's thread is not here
        import_module("fsspec.asyn").reset_lock()


def has_shuffle_buffer(examples: Any) -> bool:
    """Whether a streamed HuggingFace dataset shuffles in a buffer, whose contents its state does not include."""
    inner = [getattr(examples, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(examples, "ex_iterables", ())
    is_buffer = "BufferShuffled" in type(examples).__name__
    return is_buffer or any(has_shuffle_buffer(each) for each in inner if each is not None)
