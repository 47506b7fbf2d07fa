# ruff: noqa: F403 - the names of these modules are this module's
"""`torch_xla.core.xla_model`, the `xm` of PyTorch/XLA scripts, on any device family.

Each name means the same in a plain script, in a thread of a `DataParallel` and in a worker of `spawn`. Here: where
replicas meet, to exchange values, to run something on some of them, to save; and a counter of rates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from unisono import all_gather_object, current_world
from unisono.building_blocks import HOST, check_type, name_ranks, tree_map
from unisono.compat.left_out import left_out
from unisono.compat.placement import copy_to
from unisono.compat.torch_xla.core.collectives import *
from unisono.compat.torch_xla.core.collectives import fetch_gradients as _fetch_gradients  # noqa: F401 - scripts call it
from unisono.compat.torch_xla.core.devices import *
from unisono.compat.torch_xla.core.devices import get_ordinal, is_master_ordinal
from unisono.compat.torch_xla.core.steps import *
from unisono.compat.torch_xla.core.steps import execute_recorded
from unisono.errors import CollectiveMismatchError

R = TypeVar("R")

__getattr__ = left_out(__name__)


def rendezvous(tag: str, payload: bytes | str = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Return when all replicas have called it, with each one's payload, by ordinal.

    Args:
        payload: bytes; for other values there is `mesh_reduce`.
        replicas: the ordinals that meet, including the caller's; empty means all. The other replicas meet in groups of
            their own, at the same time: every replica must call it.

    Raises:
        TypeError, ValueError: the payload is neither bytes nor a string; `replicas` is no such group.
        CollectiveMismatchError: replicas that wait for one another have given different tags or replicas.
    """
    check_type(payload, "payload", "pass bytes, or use mesh_reduce", bytes, bytearray, str)
    world = current_world()
    own = sorted(replicas) or list(range(world.world_size))
    if len(set(own)) < len(own) or not {world.rank} <= set(own) <= set(range(world.world_size)):
        raise ValueError(
            f"replicas={list(replicas)} must name ordinals from 0 to {world.world_size - 1}, each once, with the "
            f"caller's, {world.rank}"
        )
    return _exchange_in_group(tag, own, payload.encode() if isinstance(payload, str) else bytes(payload))


def _exchange_in_group(tag: str, own: list[int], value: Any) -> list[Any]:
    """The values of this replica's group. All replicas see the same calls, so all raise or none does."""
    calls = all_gather_object((tag, own, value), current_world())
    for rank, (each_tag, group, _) in enumerate(calls):
        for member in group:
            other_tag, others, _ = calls[member]
            if (other_tag, others) != (each_tag, group):
                raise CollectiveMismatchError(
                    f"rank {rank} waits in rendezvous {each_tag!r} for {name_ranks(group)}, but rank {member} in "
                    f"{other_tag!r} for {name_ranks(others)}; all of a group must name the same tag and replicas"
                )
    return [calls[rank][2] for rank in own]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], R]) -> R:
    """`reduce_fn` of the list of all replicas' data, by ordinal, on every replica; also if there is only one.

    The data is anything that can be pickled; its tensors arrive in main memory. Tags and errors are those of
    `rendezvous`.
    """
    execute_recorded()
    return reduce_fn(_exchange_in_group(tag, list(range(current_world().world_size)), _in_main_memory(data)))


def _in_main_memory(data: Any) -> Any:
    """The data with its tensors in main memory, without graphs, in containers of the same types. Tensors over the same
    elements keep sharing them: tied weights are stored once in a file, too."""
    images: dict[object, torch.Tensor] = {}

    def image_of(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copy_to(leaf, HOST)
        if not isinstance(leaf, torch.Tensor) or (leaf.is_cpu and leaf.is_leaf):
            return leaf
        place: object = id(leaf)
        if not (leaf.is_cpu or leaf.is_sparse):
            storage = StorageWeakRef(leaf.untyped_storage())
            place = (storage, leaf.storage_offset(), leaf.dtype, tuple(leaf.shape), leaf.stride())
        if place not in images:
            images[place] = leaf.detach().cpu()
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(images[place], leaf.requires_grad)
        return images[place].detach().requires_grad_(leaf.requires_grad and leaf.is_leaf)

    return tree_map(image_of, data)


def do_on_ordinals(target: Callable[..., R], data: Sequence[Any] = (), ordinals: Collection[int] = (0,)) -> R | None:
    """`target(*data)` on these replicas, with tensors in main memory; None on the others, which wait for them. Every
    replica must call it."""
    execute_recorded()
    result = target(*_in_main_memory(list(data))) if get_ordinal() in ordinals else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def save(
    data: Any, file_or_path: str | os.PathLike[str] | IO[bytes], master_only: bool = True, global_master: bool = False
) -> None:
    """`torch.save` of the data in main memory, by the master of each machine, or by that of all (`global_master`), or
    by every replica (`master_only=False`), each to its own file. All replicas must call it, and it returns once
    written.

    Containers keep their types, and tied weights stay tied.
    """
    execute_recorded()
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(_in_main_memory(data), file_or_path)
    rendezvous("torch_xla.core.xla_model.save")


class RateTracker:
    """Counts, and computes the rate per second.

    Args:
        smooth_factor: from 0 to 1, the weight of the last rate in the next; None uses the environment variable
            RATE_TRACKER_SMOOTHING, or 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        if smooth_factor is None:
            smooth_factor = float(os.environ.get("RATE_TRACKER_SMOOTHING", "0.4"))
        self._smooth_factor = smooth_factor
        self._began = self._last_time = time.monotonic()
        self._total = self._last_total = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Add to the count."""
        self._total += count

    def rate(self) -> float:
        """The rate per second since the last call, smoothed by earlier rates; 0 if no time has passed."""
        now = time.monotonic()
        passed = now - self._last_time
        if passed <= 0:
            return 0.0
        rate = (self._total - self._last_total) / passed
        if self._rate is not None:
            rate += self._smooth_factor * (self._rate - rate)
        self._last_time, self._last_total, self._rate = now, self._total, rate
        return rate

    def global_rate(self) -> float:
        """The rate per second since the beginning."""
        passed = time.monotonic() - self._began
        return self._total / passed if passed > 0 else 0.0
