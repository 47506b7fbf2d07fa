"""Whether the ranks' streams are the same: compared when a loader begins its first loop, before anything is cut.

A stream that the dataset has cut by rank would be cut again, and samples would be lost. Where each rank reads all of
the stream, `lockstep.py` compares what they read. Where the dataset cuts itself by loader workers, each of these reads
other samples in any case. So the ranks compare what their datasets are made of, without reading them. If that differs,
which may mean nothing (a path, a cache), each rank reads what a single one would read first, and they compare that. A
dataset that knows its rank, and begins differently, has cut itself.

*Threads:* the loop's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

from unisono.comm.operations import WAY_OUT
from unisono.errors import CollectiveMismatchError
from unisono.loading.sharding import glimpse, mark_of
from unisono.tree import PLAIN, is_array
from unisono.world import World

_MOST = 4096  # objects that are looked at
_SHOWN = 32  # elements of a list, from all of it; characters at both ends of a text
_RANK = ("rank", "global_rank", "process_index")
_RANKS = ("world_size", "num_replicas", "num_ranks", "num_processes")


class Make(NamedTuple):
    """What a dataset is made of: a mark of it, and whether an object in it knows the rank and the number of ranks."""

    mark: int
    knows_rank: bool


def has_parts(dataset: Any, world: World, look: Callable[[bool], int | None]) -> bool:
    """Compare the ranks' datasets; return whether each of them is its rank's part. CollectiveMismatchError, on
    all ranks, if they differ and do not know it. A collective, of one exchange where they are made alike.
    `look(know_ranks)` returns a mark of what a single rank would read first: 0 if that is random, None if reading
    it would have a consequence."""
    makes: list[Make] = world.comm.all_gather_object(make_of(dataset, world.rank, world.world_size))
    if len({each.mark for each in makes}) == 1:
        return False
    know_ranks = all(each.knows_rank for each in makes)
    seen = None
    with suppress(Exception):  # it is the loop's to raise, at its place
        seen = look(know_ranks)
    looks = world.comm.all_gather_object(seen)
    is_random = 0 in looks  # what a rank has read, it does not read again
    if None in looks or (is_random and not know_ranks) or (not is_random and len(set(looks)) == 1):
        return False
    if not know_ranks or is_random:
        raise CollectiveMismatchError(
            f"the ranks' datasets, of class {type(dataset).__name__}, begin with different samples, so cutting them "
            f"again would lose some and repeat others; {WAY_OUT}"
        )
    return True


def make_of(dataset: Any, rank: int, ranks: int) -> Make:
    """Describe a dataset by the plain values, arrays and lists that are found in it, without calling its code."""
    own = [each for each in vars(type(dataset)).values() if isinstance(each, FunctionType)]
    parts, seen, waiting, knows_rank = list[Any](), dict[int, Any](), deque([dataset, *own]), False
    while waiting and len(seen) < _MOST:
        node = waiting.popleft()
        if isinstance(node, (*PLAIN, range, slice, type)):
            parts.append((len(node), node[:_SHOWN], node[-_SHOWN:]) if isinstance(node, str | bytes) else repr(node))
        elif id(node) not in seen:
            seen[id(node)] = node  # kept, since a new object might get the number of one that is gone
            held = _held_by(node)
            parts.append((type(node).__qualname__, glimpse(node, of_all=True) if is_array(node) else [*held]))
            waiting.extend(held.values())
            knows_rank = knows_rank or place_in(held) == (rank, ranks)
    return Make(mark_of(parts), knows_rank)


def place_in(held: Mapping[Any, Any]) -> tuple[int, int] | None:
    """The rank and the number of ranks among an object's attributes, by their usual names; None if it lacks one."""
    named = {name.lstrip("_"): value for name, value in held.items() if isinstance(name, str) and type(value) is int}
    ranks = [named[name] for name in _RANK if name in named]
    sizes = [named[name] for name in _RANKS if name in named]
    return (ranks[0], sizes[0]) if ranks and sizes else None


def _held_by(node: Any) -> dict[Any, Any]:
    """What an object holds, by name or number; of a long list some elements and its length."""
    if isinstance(node, tuple) or type(node) in (list, deque):
        places = [*range(0, len(node), max(len(node) // _SHOWN, 1)), len(node) - 1] if node else []
        return {**{place: node[place] for place in places}, "length": len(node)}
    if isinstance(node, dict):
        return {**dict(islice(dict.items(node), _SHOWN)), "length": len(node)}
    if isinstance(node, MethodType):
        return {"function": node.__func__, "object": node.__self__}
    if isinstance(node, GeneratorType):
        return dict(node.gi_frame.f_locals) if node.gi_frame else {}
    return dict(enumerate(_used_by(node))) if isinstance(node, FunctionType) else dict(getattr(node, "__dict__", {}))


def _used_by(function: FunctionType) -> Iterator[Any]:
    """What a function uses besides its arguments: its name and defaults, variables around it, and plain global ones."""
    yield from (function.__qualname__, function.__defaults__)
    for cell in function.__closure__ or ():
        if cell != type(cell)():  # not an empty one
            yield cell.cell_contents
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), PLAIN):
            yield value
