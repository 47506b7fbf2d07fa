"""A shuffled DataLoader that is read again and again."""

from __future__ import annotations

from typing import Any

from epochs import Numbers
from torch.utils.data import DataLoader

from unisono import DeviceLoader

COUNT = 12


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Numbers(COUNT), batch_size=2, shuffle=True, **options)


def taken(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


def plain(epoch: int) -> list[int]:
    """What a loop over that epoch gives one device."""
    loader = DeviceLoader(shuffled())
    loader.set_epoch(epoch)
    return taken(loader)


def loop_of(model: Any, batches: Any, *_: Any) -> list[int]:
    return taken(batches)
