"""Random numbers in loader workers: a sample's depend on seed, epoch and position alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from epochs import Numbers, dealt, ranks_of, take, worlds
from torch.utils.data import DataLoader, DistributedSampler, Sampler, StackDataset, Subset, get_worker_info

from unisono import DeviceLoader


class Augmented(Numbers):
    """Sample i with three random numbers, one of each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, (random.random(), float(numpy.random.rand()), torch.rand(()).item())


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def augmentations(loaders: list[DeviceLoader], most: int | None = None) -> dict[int, Any]:
    """The numbers of each sample that counts."""
    return {index: numbers for loader in loaders for each in take(loader, most) for index, numbers in each.counted}


def augmented(num_workers: int, kind: type[Augmented] = Augmented, **options: Any) -> DataLoader:
    return DataLoader(kind(22), batch_size=3, shuffle=True, num_workers=num_workers, collate_fn=list, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_sample_is_augmented_alike_by_any_loader_and_anew_each_epoch():
    alone = ranks_of(augmented(1), 1, seed=3)
    first, second = augmentations(alone), augmentations(alone)
    assert sorted(first) == sorted(second) == list(range(22))
    drawn = [number for epoch in (first, second) for numbers in epoch.values() for number in numbers]
    assert len(set(drawn)) == 2 * 22 * 3, "no two samples, epochs or generators have a number in common"
    for num_workers, count, options in ((3, 1, {}), (2, 2, {}), (1, 3, {"split": "global"}), (1, 4, {})):
        # those that persist, so that each epoch needs no new ones
        loaders = ranks_of(augmented(num_workers, persistent_workers=count < 4), count, seed=3, **options)
        assert augmentations(loaders) == first, (num_workers, count)
        if count < 4:
            assert augmentations(loaders) == second, (num_workers, count)
    assert augmentations(ranks_of(augmented(1), 1, seed=4)) != first


def test_a_sample_is_augmented_alike_after_a_resume():
    plain = augmentations(ranks_of(augmented(2), 1, seed=3))
    loaders = ranks_of(augmented(2), 2, seed=3)
    before = augmentations(loaders, most=2)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    (again,) = ranks_of(augmented(1), 1, seed=3)
    again.load_state_dict(states[0])
    after = augmentations([again])
    assert not set(before) & set(after)
    assert before | after == plain


def test_a_padded_sample_is_repeated_with_its_augmentation():
    for loader in ranks_of(augmented(1), 4, seed=3, tail="pad"):
        last = take(loader)[-1].batch
        assert len(last) == 3
        assert len({str(sample) for sample in last}) == len({index for index, _ in last})


def test_subsets_and_stacked_datasets_are_augmented_sample_by_sample_too():
    def load(count: int) -> dict[int, Any]:
        part = Subset(Subset(Augmented(30), range(22)), range(22))
        loader = DataLoader(StackDataset(part, part), batch_size=3, num_workers=1, collate_fn=list)
        found = {}
        for rank in ranks_of(loader, count, seed=3):
            for each in take(rank):
                found |= {str(one[0]): (one, other) for one, other in each.counted}
        return found

    assert load(1) == load(2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_dataset_that_fetches_many_is_augmented_alike_batch_by_batch():
    first = augmentations(ranks_of(augmented(1, AugmentedAtOnce), 1, seed=3))
    assert augmentations(ranks_of(augmented(3, AugmentedAtOnce), 1, seed=3)) == first
    assert len(set(first.values())) == 22


def test_the_ranks_of_a_loader_that_cuts_itself_draw_the_numbers_of_one():
    class Own(Sampler):
        num_replicas, rank = 1, 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(24))

        def __len__(self) -> int:
            return 24

    plain = DataLoader(Augmented(24), batch_size=2, sampler=Own(), num_workers=1, collate_fn=list)
    whole = augmentations(ranks_of(plain, 1))
    found: dict[int, Any] = {}
    for world in worlds(2):
        sampler = DistributedSampler(range(24), num_replicas=2, rank=world.rank, shuffle=False)
        loader = DataLoader(Augmented(24), batch_size=2, sampler=sampler, num_workers=1, collate_fn=list)
        found |= augmentations([DeviceLoader(loader, world=world)])
    assert found == whole
    assert len(set(whole.values())) == 24


class Streamed(Numbers):
    """Draws from a generator that worker_init_fn made of its worker's seed."""

    def __getitem__(self, index: int) -> float:
        return float(self.generator.random())


def own_generator(worker: int) -> None:
    info = get_worker_info()
    info.dataset.generator = random.Random(info.seed)


def test_worker_seeds_differ_by_rank_and_epoch_and_repeat_in_a_second_run():
    def load() -> list[float]:
        loader = DataLoader(Streamed(8), num_workers=2, worker_init_fn=own_generator, batch_size=1, collate_fn=list)
        return [
            number for rank in ranks_of(loader, 2) for _ in range(2) for each in take(rank) for number in each.batch
        ]

    drawn = load()
    assert len(set(drawn)) == 16
    assert load() == drawn


def test_in_the_parent_the_generators_belong_to_the_loop():
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    plain = [(random.random(), float(numpy.random.rand()), torch.rand(()).item()) for _ in range(4)]
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    loader = DataLoader(Augmented(4), batch_size=2, collate_fn=list)
    assert [numbers for each in dealt_lists(loader) for _, numbers in each] == plain


def dealt_lists(loader: DataLoader) -> list[list[Any]]:
    return [piece.batch for piece in dealt(loader, 1).pieces[0]]


class SeededByTorch(Numbers):
    """Makes a generator of its own from torch's seed, and draws nothing else."""

    def __getitem__(self, index: int) -> float:
        return random.Random(torch.initial_seed()).random()


def test_a_seed_that_is_asked_for_is_that_of_the_sample():
    def drawn(num_workers: int) -> list[float]:
        loader = DeviceLoader(DataLoader(SeededByTorch(24), 4, num_workers=num_workers))
        return [each for batch in loader for each in batch.tolist()]

    assert drawn(1) == drawn(2)
    assert len(set(drawn(1))) == 24
