"""Counts the collectives that this process's groups have begun, from any caller: also DistributedDataParallel's
reducer, in C++.

*Threads:* `num_begun` is for any. It asks no group: the script may create or destroy one at that moment, and torch
would crash. It asks the *backends* of groups, whose numbers are safe to read as long as they are referenced.

Invariants:

1. The count only grows: what a forgotten group has begun still counts.
2. Only a thread that ends a group drops the last reference to its backends; the lock keeps it from readers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.comm.shared_memory.process_group import SharedMemoryGroup
from unisono.torch_private import GET_BACKEND, sequence_number


class _Counter(NamedTuple):
    read: Callable[[], int]
    types: frozenset[str]  # of the devices whose tensors are sent by it


_lock = threading.RLock()
_counters: dict[str, list[_Counter]] = {}  # by the names of groups
_forgotten = 0


def count_group(group: Any) -> None:
    """Count what `group` begins; its creation, where its ranks meet, counts as one. Nothing for a group without this
    rank."""
    global _forgotten
    is_member = isinstance(group, dist.ProcessGroup)
    counters = _counters_of(group) if is_member else []
    with _lock:
        _forgotten += 1
        if is_member:
            _counters[group.group_name] = counters


def forget_group(group: Any = None) -> None:
    """Release `group`, or all groups, before it ends."""
    global _forgotten
    with _lock:
        names = list(_counters) if group in (None, dist.group.WORLD) else [getattr(group, "group_name", "")]
        ended = [counter for name in names for counter in _counters.pop(name, ())]
        _forgotten += sum(map(_number, ended))
        del ended  # before a reader gets the lock


def num_begun(device_type: str | None = None) -> int:
    """How many collectives have begun; in groups that still exist, only those for that type of device."""
    with _lock:
        found = [each for counters in _counters.values() for each in counters]
        number = sum(_number(each) for each in found if device_type is None or device_type in each.types)
        del found
        return _forgotten + number


@lru_cache
def types_in(config: str) -> frozenset[str]:
    """The device types in a configuration such as "cpu:gloo,cuda:nccl"."""
    return frozenset(pair.partition(":")[0] for pair in config.split(","))


def _counters_of(group: Any) -> list[_Counter]:
    types = types_in(dist.get_backend_config(group))
    if isinstance(group, SharedMemoryGroup):
        here = group.here
        return [_Counter(lambda: here.turn, types)]
    found: dict[Any, set[str]] = {}  # a backend for several types is one object
    for name in types:
        with contextlib.suppress(RuntimeError):  # this torch has no such devices
            found.setdefault(getattr(group, GET_BACKEND)(torch.device(name)), set()).add(name)
    return [_Counter(partial(sequence_number, backend), frozenset(names)) for backend, names in found.items()]


def _number(counter: _Counter) -> int:
    try:
        return int(counter.read())
    except RuntimeError:  # this backend does not count
        return 0
