"""The random generators of a rank, in a checkpoint: Python's, NumPy's, torch's, and that of the device.

On threads, torch's is the replica's own; Python's and NumPy's belong to the process, and rank zero's are saved.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
import random
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.devices import CPU
from unisono.devices.randomness import numpy_state, seed_of, set_numpy_state
from unisono.world import World

logger = logging.getLogger(__name__)


def generator_states(world: World) -> dict[str, Any]:
    """The states of this rank's generators, as plain data."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy_state(numpy.random)
    # None means that the device draws from torch's generator, which is saved above.
    if world.backend.seeded_state(0, world.device) is not None:
        states["device"] = [world.device.type, world.backend.rng_state(world.device)]
    return states


def keep_device_generator(states: Mapping[str, Any], world: World) -> None:
    """Restore a lazy device's generator, as if nothing had been saved: each graph that runs changes its seed."""
    if world.backend.is_lazy and "device" in states:
        world.backend.set_rng_state(states["device"][1], world.device)


def restore_generators(saved: Sequence[Mapping[str, Any]], saved_by: int, world: World) -> None:
    """Continue this rank's generators from the saved state of the rank with the same number.

    On another number of ranks, or another kind of device, or if some ranks' states were not `saved_by` them, the run
    cannot be the same, as a log line says: the others are reseeded.
    """
    own = saved[world.rank] if world.rank < len(saved) else None
    # Derived from the saved state, so that each resumption continues alike.
    seed = seed_of("resumed", zlib.crc32(bytes((own or saved[0])["torch"].tolist())), world.rank)
    if world.is_of_processes or world.local_rank == 0:  # among threads these generators belong to the first
        _restore_process(own, seed)
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state() if own is None else own["torch"])
    kind, state = (own or {}).get("device", (None, None))
    is_same_kind = kind == world.device.type
    if not is_same_kind:
        state = world.backend.seeded_state(seed, world.device)
    if state is not None:
        world.backend.set_rng_state(state, world.device)
    if world.state.seeds_batches:
        return
    is_of_all = len(saved) == saved_by == world.world_size
    if world.rank == 0 and (not is_of_all or (not is_same_kind and (kind or state is not None))):
        logger.warning(
            "saved by %d ranks on %s%s, loaded by %d on %s: random numbers (dropout) will differ from here on; random "
            "generators that were not saved start with new seeds",
            *(saved_by, kind or CPU, f" ({len(saved)} of them are left)" * (len(saved) != saved_by)),
            *(world.world_size, world.device.type),
        )


def _restore_process(own: Mapping[str, Any] | None, seed: int) -> None:
    """Continue Python's and NumPy's generators, or seed them."""
    numpy = sys.modules.get("numpy")
    if own is None:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)
        return
    version, words, gauss = own["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if numpy is not None and "numpy" in own:
        set_numpy_state(numpy.random, own["numpy"])
