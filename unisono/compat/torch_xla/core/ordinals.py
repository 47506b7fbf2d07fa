"""Which replica is calling: ordinals, masters, and what masters print."""

from __future__ import annotations

import sys
from typing import Any, TextIO, TypeVar

from unisono.compat.torch_xla.places import replication

D = TypeVar("D")


def xrt_world_size(defval: D | int = 1) -> D | int:
    """The number of replicas, processes or threads; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.world_size


def get_ordinal(defval: D | int = 0) -> D | int:
    """The replica's number among all; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.rank


def get_local_ordinal(defval: D | int = 0) -> D | int:
    """The replica's number on this machine; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.local_rank


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is replica 0, of this machine or (`local=False`) of all. Outside a replication, a script is the
    master."""
    return (get_local_ordinal() if local else get_ordinal()) == 0


def master_print(*args: Any, fd: TextIO | None = None, local: bool = True, flush: bool = False) -> None:
    """`print` on the master only.

    Args:
        fd: the stream; None is the current `sys.stdout`.
        local: as for `is_master_ordinal`.
    """
    if is_master_ordinal(local):
        print(*args, file=fd or sys.stdout, flush=flush)
