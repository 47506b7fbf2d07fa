"""The arguments that both loaders take, and the rule that follows from them.

*Threads:* any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypedDict

from torch.utils.data import IterableDataset

from unisono.batches.virtual_ranks import Virtual, VirtualRanks, virtual_of
from unisono.loading.indexed import is_sharded
from unisono.loading.registry import Sources
from unisono.loading.sharding import Rule, Split, Tail
from unisono.world import World

NO_COPY = (
    "a {0} has threads and loader workers, and cannot be copied or pickled: create one where it is needed, for example "
    "in the spawned function, from the same DataLoader; its state_dict() can be sent anywhere"
)


class Dealt(ABC):
    """A loader whose batches are dealt out among the ranks already."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""


class LoaderOptions(TypedDict, total=False):
    """The arguments that both loaders take by name; the docstring of `ParallelLoader` describes each."""

    batch_dim: int
    fixed_batch_size: bool
    prefetch: int
    split: Split
    tail: Tail | None
    seed: int | None
    already_sharded: bool | None
    virtual_ranks: int | Virtual | None
    num_workers: Literal["auto"] | None
    sources: Sources | None


def check_num_workers(given: Any) -> None:
    """ValueError if it is neither "auto" nor None."""
    if given not in (None, "auto"):
        raise ValueError(
            f"num_workers={given!r}: pass 'auto', or leave it out; a number belongs to the DataLoader, and 'auto' "
            "begins with it"
        )


def make_rule(world: World, lanes: int, loader: Iterable[Any], options: LoaderOptions) -> Rule:
    """The rule for distributing the rounds of a loader in a world."""
    ranks, split = world.world_size, options.get("split", "rank")
    is_fixed = bool(options.get("fixed_batch_size", False))
    given = options.get("already_sharded")
    is_cut = given or is_sharded(loader, world.rank, ranks)
    if is_cut and ranks > 1 and split == "global":
        size = getattr(loader, "batch_size", None)
        raise ValueError(
            f"split='global', or split_batches=True, makes a batch of the loader{f', of {size},' if size else ''} the "
            f"global batch, which {ranks} ranks divide; but the loader gives each rank its own part, and whole batches "
            "of it; leave the sharding to this loader (shuffle=True in place of a DistributedSampler), or, if that is "
            "the batch size of a rank, prepare DeviceLoader(loader)"
        )
    drops = getattr(getattr(loader, "batch_sampler", None), "drop_last", False)
    tail = options.get("tail") or ("drop" if drops and not is_cut else "split")
    if (given_ranks := options.get("virtual_ranks")) is not None:
        carried, virtual = VirtualRanks.carried_by(world.rank, ranks, given_ranks), virtual_of(given_ranks)
        count = virtual.count
        if lanes > 1:
            raise ValueError(f"virtual_ranks={count}: a process has one device for all that it carries, not {lanes}")
        if isinstance(dataset := getattr(loader, "dataset", None), IterableDataset):
            raise ValueError(
                f"virtual_ranks={count} deals out batches by their samples' indices, and a stream has none: "
                f"{type(dataset).__name__} is an IterableDataset; use a map-style dataset, with __len__ and __getitem__"
            )
        if is_cut:
            raise ValueError(
                f"virtual_ranks={count} deals out the batches of all ranks, and this loader gives each rank its own "
                "part; leave the sharding to this loader (shuffle=True in place of a DistributedSampler)"
            )
        rule = Rule(count, carried.own, split, tail, is_fixed, is_compared=given is None, virtual=carried)
        return replace(rule, witness_every=virtual.witness_every)
    if is_cut and ranks > 1:
        return Rule(1, (0,), split, tail, is_fixed, is_cut=True, shards=ranks, shard=world.rank)
    kept = (world.rank,) if ranks > 1 else tuple(range(lanes))
    return Rule(ranks * lanes, kept, split, tail, is_fixed, bool(is_cut), is_compared=given is None)
