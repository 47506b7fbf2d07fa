"""Streams of Hugging Face's datasets go on by their own states, on any numbers of ranks and loader workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO
from streams import through_json
from torch.utils.data import DataLoader

from unisono import DeviceLoader, current_world, rank

datasets: Any = pytest.importorskip("datasets")

COUNT = 37


def shards_of(first: int, last: int, count: int) -> Any:
    return datasets.Dataset.from_dict({"ids": list(range(first, last))}).to_iterable_dataset(num_shards=count)


def split_by_the_user(count: int) -> Any:
    from datasets.distributed import split_dataset_by_node  # which `datasets` itself does not import

    world = current_world()
    return split_dataset_by_node(shards_of(0, COUNT, count), rank(), world.world_size)


STREAMS: dict[str, Callable[[], Any]] = {
    "as many shards": lambda: shards_of(0, COUNT, 6),
    "uneven shards": lambda: shards_of(0, COUNT, 5),
    "in batches": lambda: shards_of(0, COUNT, 8).map(lambda samples: samples, batched=True, batch_size=3),
    "shuffled": lambda: shards_of(0, COUNT, 8).shuffle(seed=1, buffer_size=5),
    "concatenated": lambda: datasets.concatenate_datasets([shards_of(0, 19, 2), shards_of(19, COUNT, 2)]),
    "split by the user": lambda: split_by_the_user(6),
}


def ids_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([int(sample["ids"]) for sample in samples])


def left(make: Callable[[], Any], workers: int, most: int | None, state: Any, epoch: int = 0) -> tuple[list[int], Any]:
    """What one rank is delivered from a state on, in so many batches, and the state after them."""
    loader = DeviceLoader(DataLoader(make(), 2, collate_fn=ids_of, num_workers=workers))
    if state is None:
        loader.set_epoch(epoch)
    else:
        loader.load_state_dict(state)
    iterator = iter(loader)
    batches = itertools.islice(iterator, most)
    return [each for batch in batches for each in batch[: iterator.valid_samples].tolist()], loader.state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(PROCESSES_2, 2, 2), (SOLO, 1, 3), (PROCESSES_2, 0, None)], marks=pytest.mark.slow),
        [(SOLO, 0, 3), (PROCESSES_2, 0, 2), (SOLO, 2, None)],
    ],
)
def test_the_second_epoch_goes_on_with_any_numbers_of_ranks_and_workers(plan):
    found: dict[str, list[int]] = {name: [] for name in STREAMS}
    states = dict.fromkeys(STREAMS)
    for mode, workers, most in plan:

        def body(workers: int = workers, most: int | None = most) -> dict[str, tuple[list[int], Any]]:
            return {name: left(make, workers, most, states[name], 1) for name, make in STREAMS.items()}

        got = mode.run(body)
        for name in STREAMS:
            found[name] += [sample for each in got for sample in each[name][0]]
            states[name] = through_json(got[0][name][1])
    assert {name: sorted(samples) for name, samples in found.items()} == {name: list(range(COUNT)) for name in STREAMS}


def test_what_cannot_continue_from_its_own_state_is_read_again_and_says_so(caplog):
    class Broken(datasets.IterableDataset):
        def load_state_dict(self, state: Any) -> None:
            raise IndexError("list index out of range")

    def broken() -> Any:
        stream = shards_of(0, COUNT, 2)
        stream.__class__ = Broken
        return stream

    taken, state = left(broken, 0, 4, None)
    with caplog.at_level(logging.WARNING):
        rest, _ = left(broken, 0, None, state)
    assert taken + rest == list(range(COUNT))
    assert (
        "cannot continue from its own state (IndexError('list index out of range')): what precedes is read"
        in caplog.text
    )


def test_each_rank_learns_the_states_of_the_others():
    def body() -> list[bool]:
        _, state = left(lambda: shards_of(0, 200, 4), 0, 40, None)
        ((_, _, parts),) = state["layers"]
        return [part[3] is not None for part in parts]

    assert PROCESSES_2.run(lambda: body()) == [[True, True]] * 2
