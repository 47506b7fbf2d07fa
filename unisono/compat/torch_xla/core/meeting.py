"""Where replicas meet: to exchange values, to run something on some of them, to save."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, TypeVar

import torch

from unisono.arguments import check_type
from unisono.comm.operations import name_ranks
from unisono.compat.torch_xla.core.host import to_host
from unisono.compat.torch_xla.core.ordinals import get_ordinal, is_master_ordinal
from unisono.compat.torch_xla.core.steps import cut
from unisono.errors import CollectiveMismatchError
from unisono.parallel.collectives import all_gather_object
from unisono.world import World, current_world

R = TypeVar("R")


def rendezvous(tag: str, payload: bytes | str = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Return when all replicas have called it, with each one's payload, by ordinal.

    Args:
        tag: its name, the same for all; it may be reused.
        payload: bytes; for other values there is `mesh_reduce`.
        replicas: the ordinals that meet, including the caller's; empty means all. The other replicas meet in groups of
            their own, at the same time: every replica must call it.

    Raises:
        TypeError: the payload is neither bytes nor a string.
        ValueError: `replicas` repeats an ordinal, or has one that does not exist, or lacks the caller's.
        CollectiveMismatchError: replicas that wait for one another have given different tags or replicas.
        BrokenWorldError: a peer failed or departed.
    """
    check_type(payload, "payload", "pass bytes, or use mesh_reduce", bytes, bytearray, str)
    world = current_world()
    own = _checked_replicas(replicas, world)
    found = all_gather_object((tag, own, payload.encode() if isinstance(payload, str) else bytes(payload)), world)
    _check_groups([(each_tag, group) for each_tag, group, _ in found])
    return [found[rank][2] for rank in own]


def _checked_replicas(replicas: Sequence[int], world: World) -> list[int]:
    every = list(range(world.world_size))
    own = sorted(replicas) or every
    if len(set(own)) < len(own) or not set(own) <= set(every):
        raise ValueError(f"replicas={list(replicas)} must name ordinals from 0 to {every[-1]}, each once")
    if world.rank not in own:
        raise ValueError(f"replicas={list(replicas)} lacks the caller, {world.rank}; pass the group that it is in")
    return own


def _check_groups(calls: Sequence[tuple[str, list[int]]]) -> None:
    """Check the groups. All replicas see the same calls, so all raise or none does."""
    for rank, (tag, group) in enumerate(calls):
        for member in group:
            if calls[member] != (tag, group):
                other_tag, others = calls[member]
                raise CollectiveMismatchError(
                    f"rank {rank} waits in rendezvous {tag!r} for {name_ranks(group)}, but rank {member} in "
                    f"{other_tag!r} for {name_ranks(others)}; all of a group must name the same tag and replicas"
                )


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], R]) -> R:
    """`reduce_fn` of all replicas' data, by ordinal, on every replica; also if there is only one.

    Args:
        tag: its name, the same for all.
        data: anything that can be pickled; its tensors arrive in main memory.
        reduce_fn: called with the list of all replicas' data.

    Raises:
        CollectiveMismatchError: the replicas have given different tags.
        BrokenWorldError: a peer failed or departed.
    """
    world = current_world()
    cut()
    found = all_gather_object((tag, to_host(data)), world)
    everyone = list(range(world.world_size))
    _check_groups([(each_tag, everyone) for each_tag, _ in found])
    return reduce_fn([value for _, value in found])


def do_on_ordinals(target: Callable[..., R], data: Sequence[Any] = (), ordinals: Collection[int] = (0,)) -> R | None:
    """`target(*data)` on these replicas, with tensors in main memory; None on the others, which wait for them.

    Every replica must call it.

    Raises:
        BrokenWorldError: on the others, if `target` has raised.
    """
    cut()
    result = target(*to_host(list(data))) if get_ordinal() in ordinals else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def save(
    data: Any, file_or_path: str | os.PathLike[str] | IO[bytes], master_only: bool = True, global_master: bool = False
) -> None:
    """`torch.save` of the data in main memory, by the master; all replicas must call it, and it returns once written.

    Containers keep their types, and tied weights stay tied.

    Args:
        master_only: False lets every replica write, each to its own file.
        global_master: one master of all machines writes, rather than one on each machine.
    """
    cut()
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(to_host(data), file_or_path)
    rendezvous("torch_xla.core.xla_model.save")
