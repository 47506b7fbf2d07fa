"""DataParallel over a ParallelLoader of one's own: its arguments hold, and its state continues from call to call."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unisono import DataParallel, DeviceIterator, DeviceLoader, ParallelLoader

NETWORK = torch.nn.Linear(1, 1)


def source(batch: int = 3) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(23)), batch_size=batch, shuffle=True)


def order(epoch: int) -> list[int]:
    """The samples of an epoch, in order, as one device sees them."""
    loader = DeviceLoader(source())
    loader.set_epoch(epoch)
    return [sample for (batch,) in loader for sample in batch.tolist()]


def replicas(count: int) -> DataParallel:
    return DataParallel(NETWORK, [f"cpu:{index}" for index in range(count)])


def taken(steps: int | None = None):
    """A loop that takes so many batches, all by default: the rounds it saw, and its state."""

    def loop(model, loader: DeviceIterator, device, context):
        seen = []
        for (batch,) in loader:
            seen.append(batch[: loader.valid_samples].tolist())
            if len(seen) == steps:
                break
        return seen, loader.state_dict()

    return loop


def samples(results) -> list[int]:
    rounds = zip(*(seen for seen, _ in results), strict=True)
    return [sample for each in rounds for part in each for sample in part]


@pytest.mark.parametrize(("count", "others", "steps"), [(1, 2, 1), (2, 1, 2), (3, 2, 2)])
def test_a_pass_that_was_left_goes_on_over_another_number_of_devices(count, others, steps):
    loader = ParallelLoader(source(), replicas(count).devices)
    first = replicas(count)(taken(steps), loader)
    assert len({str(state) for _, state in first}) == 1, "all replicas stand at the same round"
    resumed = ParallelLoader(source(batch=2), replicas(others).devices)
    resumed.load_state_dict(first[0][1])
    rest = replicas(others)(taken(), resumed)
    assert samples(first) + samples(rest) == order(epoch=0)
    assert samples(replicas(others)(taken(), resumed)) == order(epoch=1)


def test_the_state_of_the_loader_that_was_given_is_that_of_the_call():
    loader = ParallelLoader(source(), ["cpu:0", "cpu:1"])
    assert loader.epoch == 0
    results = replicas(2)(taken(2), loader)
    assert loader.state_dict() == results[0][1]
    assert loader.state_dict()["offset"] == 12
    replicas(2)(taken(), loader)
    assert (loader.epoch, loader.state_dict()["offset"]) == (2, 0)


def test_the_arguments_of_the_loader_that_was_given_hold():
    loader = ParallelLoader(source(batch=6), ["cpu:0", "cpu:1"], split="global", tail="drop")
    results = replicas(2)(taken(), loader)
    assert [len(part) for seen, _ in results for part in seen] == [3, 3, 3] * 2


def test_a_loader_over_other_devices_is_refused():
    with pytest.raises(ValueError, match=r"over \['cpu:0'\], this DataParallel over \['cpu:0', 'cpu:1'\]"):
        replicas(2)(taken(), ParallelLoader(source(), ["cpu:0"]))


def test_arguments_beside_those_of_the_loader_are_refused():
    with pytest.raises(ValueError, match="fixed_batch_size and batch_dim are arguments of the ParallelLoader"):
        replicas(1)(taken(), ParallelLoader(source(), ["cpu:0"]), fixed_batch_size=True)
