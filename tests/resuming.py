"""Loops that are left and resumed, and the order that they should have."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from epochs import Numbers
from torch.utils.data import DataLoader, RandomSampler

from unisono import DeviceLoader
from unisono.devices.randomness import seed_of

SAMPLES = 23


def order(samples: int, seed: int, epoch: int) -> list[int]:
    """The shuffled order of an epoch, as torch's own sampler draws it."""
    if not samples:
        return []
    return list(RandomSampler(range(samples), generator=torch.Generator().manual_seed(seed_of(seed, epoch))))


def shuffled(samples: int = SAMPLES, batch_size: int | None = 2, **options: Any) -> DataLoader:
    return DataLoader(Numbers(samples), batch_size=batch_size, shuffle=samples > 0, **options)


def common_state(loaders: list[DeviceLoader]) -> dict[str, Any]:
    """The state of all ranks, which is one and the same, as it comes back from a file."""
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return json.loads(json.dumps(states[0]))


def resumed(loaders: list[DeviceLoader], state: dict[str, Any]) -> list[DeviceLoader]:
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


STATE = {"version": 1, "epoch": 0, "seed": 5, "length": SAMPLES, "order": "RandomSampler", "offset": 6}


def take_items(loader: DeviceLoader, most: int | None = None) -> list[int]:
    iterator = iter(loader)
    return [item for item in itertools.islice(iterator, most) if iterator.valid_samples != 0]
