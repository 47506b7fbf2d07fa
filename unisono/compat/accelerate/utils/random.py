"""`accelerate.utils.random`: seeds, and generators that are to have the same state on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unisono.compat.accelerate.state import joined_world
from unisono.compat.accelerate.utils.dataclasses import RNGType
from unisono.randomness import seed_all
from unisono.world import World


class Seed:
    """The `value` of a rank's last `set_seed`; None before the first one."""

    value: int | None = None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch (among threads, the replica's own), and the orders of DataLoaders
    that are prepared from now on.

    Args:
        seed: a non-negative integer.
        device_specific: add the rank to the seed, so that each rank draws different numbers.
        deterministic: also use torch's deterministic algorithms.
    """
    world = joined_world()
    world.state.part(Seed).value = seed
    seed += world.rank if device_specific else 0
    if world.world_size == 1 or world.is_of_processes:
        seed_all(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set a generator on all ranks to rank zero's state: torch's, the given one, or that of the devices."""
    world = joined_world()
    kind = RNGType(rng_type) if rng_type is not None else RNGType.TORCH
    if kind == RNGType.TORCH:
        torch.set_rng_state(_of_rank_zero(torch.get_rng_state(), world))
    elif kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng_type='generator' synchronises a generator, and none was given; pass generator=")
        generator.set_state(_of_rank_zero(generator.get_state(), world))
    else:
        state = world.backend.rng_state(world.device)
        world.backend.set_rng_state(_of_rank_zero(state, world), world.device)


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Like `synchronize_rng_state`, for several of them."""
    for each in rng_types:
        synchronize_rng_state(each, generator)


def _of_rank_zero(state: torch.Tensor, world: World) -> torch.Tensor:
    found: torch.Tensor = world.comm.broadcast_object(state)
    return found
