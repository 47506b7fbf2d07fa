"""The last collectives that Python code has begun on torch's own groups, so that ranks that wait can be compared.

Gloo and NCCL pair whatever arrives, or wait. Nothing is compared before data moves, since that would cost a message; so
each rank remembers its last calls, and the launcher compares the calls of one group and number once ranks stand still.
What torch calls in C++ (DistributedDataParallel's reducer, DTensor) is not noted.

*Threads:* any may begin a collective; `last_calls` is for any other.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.comm.shared_memory.process_group import SharedMemoryGroup
from unisono.comm.stacks import Frame

_KEPT = 16  # calls; a rank that does not wait for the results of its calls may be that far ahead of its peers

# Methods of a group: what users call them, and the argument whose size is the same on all ranks, if there is one.
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", None),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", None),
    "gather": ("gather", None),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", None),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", None),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all_single", None),
    "all_to_all_single": ("all_to_all_single", None),
    "barrier": ("barrier", None),
}
_HAVE_ROOTS = ("broadcast", "reduce", "gather", "scatter")


class NotedCall(NamedTuple):
    """A call that a rank has begun. Those of one group and number are the same on all its ranks, or a mistake."""

    group: str
    number: int
    action: str
    place: str


class _Begun(NamedTuple):
    group: str
    number: int
    name: str
    dtype: torch.dtype | None
    size: int | None
    options: Any
    code: CodeType
    line: int


_begun: deque[_Begun] = deque(maxlen=_KEPT)
_numbers: dict[str, int] = {}  # of calls so far, by the names of groups


@functools.cache
def note_calls() -> None:
    """Note, from now on, what this process calls on groups of torch."""
    for method, (name, argument) in _METHODS.items():
        if (original := getattr(dist.ProcessGroup, method, None)) is not None:
            setattr(dist.ProcessGroup, method, _noting_calls(original, name, argument))


def last_calls() -> tuple[NotedCall, ...]:
    """The calls that were begun last, the oldest first."""
    return tuple(map(_described, tuple(_begun)))


def forget_calls(group: Any) -> None:
    """Forget what was called on a group that ends, None for all: the next one may have its name."""
    name = None if group in (None, dist.group.WORLD) else getattr(group, "group_name", "")
    for each in [each for each in tuple(_begun) if name in (None, each.group)]:
        _begun.remove(each)
    for each_name in [*_numbers] if name is None else [name]:
        _numbers.pop(each_name, None)


def find_mismatch(calls: dict[int, tuple[NotedCall, ...]]) -> tuple[dict[int, str], dict[int, str]]:
    """The actions, and the places in the program, of ranks whose same-numbered call of one group differs; of the first
    such call. Empty if there is none."""
    same: dict[tuple[str, int], dict[int, NotedCall]] = {}
    for rank, noted in calls.items():
        for call in noted:
            same.setdefault((call.group, call.number), {})[rank] = call
    for _, by_rank in sorted(same.items(), key=lambda item: item[0][1]):
        if len({call.action for call in by_rank.values()}) > 1:
            actions = {rank: call.action for rank, call in by_rank.items()}
            return actions, {rank: call.place for rank, call in by_rank.items()}
    return {}, {}


def _noting_calls(original: Callable[..., Any], name: str, argument: int | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not (key := _name_of(group)):
            return original(group, *args, **kwargs)
        _numbers[key] = number = _numbers.get(key, 0) + 1
        tensor = _first_tensor(args[:2])
        sized = None if argument is None else _first_tensor(args[argument : argument + 1])
        dtype, size = getattr(tensor, "dtype", None), None if sized is None else sized.numel()
        options = kwargs.get("opts", args[-1] if args else None)
        frame = sys._getframe(1)
        while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        _begun.append(_Begun(key, number, name, dtype, size, options, frame.f_code, frame.f_lineno))
        return original(group, *args, **kwargs)

    return call


def _name_of(group: dist.ProcessGroup) -> str:
    """The group's name; empty for one in shared memory, which compares calls itself, and for a part of another."""
    if isinstance(group, SharedMemoryGroup):
        return ""
    try:
        return group.group_name
    except RuntimeError:
        return ""


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of an argument, or of the lists in it; on some ranks, some of these are empty."""
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _first_tensor(each)) is not None), None)
    return value if isinstance(value, torch.Tensor) else None


def _described(begun: _Begun) -> NotedCall:
    parts = []
    if begun.dtype is not None:
        size = f" of {begun.size} elements" if begun.size is not None else ""
        parts.append(f"{str(begun.dtype).removeprefix('torch.')}{size}")
    if begun.name in _HAVE_ROOTS and (root := getattr(begun.options, "rootRank", None)) is not None:
        parts.append(f"root {root}")
    place = Frame(begun.code.co_filename, begun.line, begun.code.co_name)
    action = f"called {begun.name}({', '.join(parts)})"
    return NotedCall(begun.group, begun.number, action, f"{begun.name}() in {place}")
