"""`accelerate.data_loader`: prepared loaders, which are `unisono.DeviceLoader`s."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from unisono import DeviceIterator, DeviceLoader, Virtual, World
from unisono.compat.accelerate.state import joined_world
from unisono.compat.accelerate.utils.other import Seed
from unisono.compat.left_out import left_out

DataLoaderShard = DataLoaderDispatcher = DeviceLoader

__getattr__ = left_out(__name__)


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    *ignored: Any,
    data_seed: int | None = None,
    world: World | None = None,
    virtual_ranks: int | Virtual | None = None,
    **options: Any,
) -> DeviceLoader:
    """This rank's part of the loader, each sample once, in an order that does not depend on the number of ranks.
    ValueError if `process_index` and `num_processes` are given and are not those of the rank's world.

    Args:
        data_seed: the seed of the order; None uses that of the loader's generator, or else that of `set_seed`.
        virtual_ranks: as for the Accelerator.
        ignored, options: how batches are dealt and moved, which does not affect their contents.
    """
    if isinstance(dataloader, DeviceLoader):
        return dataloader
    world = world or joined_world()
    asked = (process_index, num_processes)
    if asked != (None, None) and asked != (world.rank, world.world_size):
        raise ValueError(f"process {process_index} of {num_processes} is not rank {world.rank}; leave both out")
    if not put_on_device:
        device = torch.get_default_device()
    seed = data_seed
    if seed is None and not _has_generator(dataloader):
        seed = world.state.part(Seed).value
    return DeviceLoader(
        dataloader,
        device,
        split="global" if split_batches else "rank",
        seed=seed,
        world=world,
        virtual_ranks=virtual_ranks,
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader, with loops that begin after that many batches."""
    return Later(dataloader, num_batches)


class Later:
    """A loader whose loops load and drop the first batches; its attributes are the loader's."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __iter__(self) -> DeviceIterator | Iterator[Any]:
        batches: DeviceIterator | Iterator[Any] = iter(self._loader)
        for _ in islice(batches, self._num_batches):
            pass
        return batches

    def __len__(self) -> int:
        return max(len(self._loader) - self._num_batches, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class SeedableRandomSampler(RandomSampler):
    """torch's RandomSampler: a prepared loader's order is a function of its seed and the epoch anyway."""

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.generator is None and data_seed is not None:
            self.generator = torch.Generator().manual_seed(data_seed)


def _has_generator(loader: Any) -> bool:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    return getattr(sampler, "generator", None) is not None or (
        isinstance(loader, DataLoader) and loader.generator is not None
    )
