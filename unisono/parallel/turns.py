"""What ranks do in turns, or in parts: one of them first, each with its elements, one of them giving a sign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from unisono.parallel.collectives import all_reduce, barrier
from unisono.world import World


@contextmanager
def first_alone(is_first: bool, world: World) -> Iterator[None]:
    """A block that some ranks run first, and the others when these have left it. Where it fails on a first rank, the
    others learn of it as soon as that rank ends."""
    if not is_first:
        barrier(world)
    yield
    if is_first:
        barrier(world)


class Trigger:
    """A flag that any rank sets and all of them read.

    Args:
        world: the rank's.
    """

    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False

    def set(self) -> None:
        """On this rank."""
        self._is_set = True

    def check(self) -> bool:
        """Whether some rank has set it since the last check, which resets it. A collective."""
        flag = torch.tensor(int(self._is_set), device=self._world.device)
        self._is_set = False
        return bool(all_reduce(flag, "max", self._world))


def split_between(inputs: Any, world: World, apply_padding: bool = False) -> Any:
    """As `Accelerator.split_between_processes`."""
    if isinstance(inputs, Mapping):
        lengths = {key: len(each) for key, each in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"inputs have different lengths, {lengths}; pass one element of each for each sample")
        return {key: split_between(each, world, apply_padding) for key, each in inputs.items()}
    if not (isinstance(inputs, list | tuple | torch.Tensor) or hasattr(inputs, "select")) or (
        isinstance(inputs, torch.Tensor) and not inputs.ndim
    ):
        raise TypeError(
            f"inputs={inputs!r:.100} are a {type(inputs).__name__}, which has no parts; pass a list, a tuple, a tensor "
            "with a dimension, a datasets.Dataset, or a dict of these"
        )
    each, more = divmod(len(inputs), world.world_size)
    start = world.rank * each + min(world.rank, more)
    stop = start + each + (world.rank < more)
    missing = each + bool(more) - (stop - start) if apply_padding else 0
    places = [*range(start, stop), *[len(inputs) - 1] * missing]
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(places, dtype=torch.long, device=inputs.device)] if missing else inputs[start:stop]
    if isinstance(inputs, list | tuple):
        part = [inputs[place] for place in places]
        return part if isinstance(inputs, list) else tuple(part)
    return inputs.select(places)
