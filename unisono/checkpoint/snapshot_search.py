"""The newest snapshot that the machines of a run have together, on rank zero.

Each machine's memory has the parts of its own ranks. If all ranks have the same state, the parts of one machine are the
whole, and other machines send only each rank's own: places in loaders, random generators. A state that is divided among
all ranks needs all parts.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from unisono.checkpoint.snapshot_memory import Content, Snapshot, describe_missing, find_parts, read_part
from unisono.comm.operations import HOST
from unisono.training.strategies.states import broadcast_entries
from unisono.world import World

logger = logging.getLogger(__name__)

OWN = ("own", "kept")
"""What a part has in its rest that belongs to its rank alone."""

_Places = Mapping[Snapshot, int]
"""The parts of one snapshot, each with the rank that reads it."""


def gather_snapshot(
    file: int, attempts: Container[int], world: World, up_to: int | None = None
) -> list[tuple[Snapshot, Content]] | None:
    """The newest complete snapshot of these attempts, not of a later step than `up_to`: its parts on rank zero, and []
    on other ranks; None on all if there is none. A rank whose own state alone was sent has no keys in its part. A
    collective, if there are several machines."""
    is_one = world.local_world_size == world.world_size
    here = find_parts(file, attempts) if is_one or world.local_rank == 0 else []
    held = {part.snapshot: part for parts in here for part in parts if up_to is None or part.snapshot.step <= up_to}
    places, whole = _newest([[*held]] if is_one else world.comm.all_gather_object([*held]))
    if not whole:
        if places and world.rank == 0 and up_to is None:
            taken_instead = "the newest checkpoint on disk is taken, if there is one"
            logger.warning("%s; %s", describe_missing([*places]), taken_instead)
        return None
    taken = []
    for snapshot, root in places.items():
        content = read_part(file, held[snapshot]) if world.rank == root else Content(None, [], {})
        if snapshot not in whole:
            content = Content(None, [], {name: content.rest.get(name) for name in OWN})
        if root:
            content = _sent(content, root, world)
        if world.rank == 0:
            taken.append((snapshot, content))
    return taken


def _newest(found: Sequence[Iterable[Snapshot]]) -> tuple[_Places, Sequence[Snapshot]]:
    """From what each rank has found: the parts of the newest complete snapshot, by rank, and those that make the whole
    state. If there is none, the parts of the newest one, and none."""
    snapshots: dict[tuple[int, int], dict[Snapshot, int]] = {}
    for snapshot, root in sorted((each, root) for root, parts in enumerate(found) for each in parts):
        snapshots.setdefault(snapshot[:2], {}).setdefault(snapshot, root)
    newest_first = [snapshots[key] for key in sorted(snapshots, reverse=True)]
    complete = [(places, whole) for places in newest_first if (whole := _whole_in(places))]
    if not complete:
        return (newest_first or [{}])[0], []
    # Where a rank was killed as it copied, the one before has the random generators of all ranks.
    attempt = complete[0][1][0].attempt
    of_all = [each for each in complete if len(each[0]) == each[1][0].world_size and each[1][0].attempt == attempt]
    return (of_all or complete)[0]


def _whole_in(places: _Places) -> list[Snapshot]:
    """Parts that are the whole state, those of one machine if they suffice; [] if some are missing."""
    for root in sorted({*places.values()}):
        parts = [part for part in places if places[part] == root]
        if len(parts) == parts[0].needed:
            return parts
    parts = [*places]
    return parts if len(parts) == parts[0].world_size else []


def _sent(content: Content, root: int, world: World) -> Content:
    """The content of that rank, on rank zero. A collective."""
    # Pickled, a view would be the whole memory; scalars are.
    entries = {number: each if each.ndim else each.clone() for number, each in enumerate(content.tensors)}
    found = {}
    for key, each in broadcast_entries({"rest": (content.keys, content.rest), **entries}, world, root):
        if world.rank == 0:
            found[key] = each.to(HOST) if isinstance(each, torch.Tensor) else each
    keys, rest = found.pop("rest", (None, {}))
    return Content(keys, [*found.values()], rest)
