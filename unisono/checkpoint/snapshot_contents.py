"""What is in a snapshot, in the form of a checkpoint's contents; and a snapshot as a checkpoint on disk.

*Threads:* any.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from unisono.checkpoint.contents import Contents
from unisono.checkpoint.directory import STATE, Manifest, Place, commit, find, next_place, read_manifest
from unisono.checkpoint.folders import folder_at, write_file
from unisono.checkpoint.objects import joined_state
from unisono.checkpoint.serialization import as_plain
from unisono.checkpoint.snapshot_memory import (
    Content,
    Snapshot,
    describe_missing,
    find_parts,
    read_part,
    read_snapshots,
)
from unisono.errors import DamagedCheckpointError, NoCheckpointError

MEMORY = "memory"
"""Where a state comes from that was not on disk."""
_TOGETHER_S = 60.0  # more than clocks of machines differ, and less than two runs


def packed(parts: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any]) -> Content:
    """The parts of `divided_states`, and the rest."""
    keys: list[Any] = []
    tensors: list[torch.Tensor] = []
    values: dict[tuple[str, Any], Any] = {}
    for name, part in parts.items():
        for key, value in part["values"].items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                keys.append((name, key, None))
                tensors.append(value)
            else:
                values[name, key] = value
        for key, (shape, offsets, cut) in part["cuts"].items():
            keys.append((name, key, (shape, offsets)))
            tensors.append(cut)
    names = {name: part.get("names") for name, part in parts.items()}
    groups = {name: part.get("groups") for name, part in parts.items()}
    return Content((names, keys), tensors, {**rest, "groups": groups, "values": values})


def _parts_of(content: Content) -> dict[str, dict[str, Any]]:
    """The parts again."""
    (names, keys), tensors, rest = content
    parts: dict[str, dict[str, Any]] = {
        name: {"names": names[name]} if groups is None else {"groups": groups}
        for name, groups in rest["groups"].items()
    }
    for part in parts.values():
        part["values"], part["cuts"] = {}, {}
    for (name, key), value in rest["values"].items():
        parts[name]["values"][key] = value
    for (name, key, cut), tensor in zip(keys, tensors, strict=True):
        if cut is None:
            parts[name]["values"][key] = tensor
        else:
            parts[name]["cuts"][key] = (*cut, tensor)
    return parts


def contents_of(taken: Sequence[tuple[Snapshot, Content]]) -> Contents:
    """A snapshot in the form of a checkpoint's contents, with the own states of the ranks whose parts are there. Parts
    without keys have nothing else."""
    snapshot, rests = taken[0][0], [content.rest for _, content in taken]
    whole = [content for _, content in taken if content.keys is not None]
    parts, first = [_parts_of(content) for content in whole], whole[0].rest
    states = {name: joined_state([each[name] for each in parts]) for name in parts[0]}
    return Contents(
        path=MEMORY,
        manifest=Manifest(snapshot.step, None, snapshot.world_size, first["kinds"], snapshot.created),
        kinds=first["kinds"],
        states={**states, **first["others"]},
        ranks=[each["own"] for each in rests],
        held=None,
        kept=[each["kept"] for each in rests] if first["kept"] else None,
    )


def rescue(path: str, left: int = 0) -> None:
    """Save the newest snapshot of a failed run as a checkpoint, where the script's `load_state` looks for one, unless
    that place has a newer one, or another machine has saved that step; say so on stderr, or why not.

    Args:
        path: that of this machine's memory.
        left: how many checkpoint numbers are left to other machines, which may be saving, too.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    for taken in read_snapshots(file):
        home, contents = taken[0][1].rest["home"], contents_of(taken)
        if home is None or not home.is_numbered or home.place.startswith("memory:"):  # which ends with this process
            return
        root, limit = folder_at(home.place), home.limit
        try:
            _, newest = find(root, read_manifest)
            step, created = contents.manifest.step, contents.manifest.created
            if newest.created > created or (newest.step == step and created - newest.created < _TOGETHER_S):
                return
        except (NoCheckpointError, DamagedCheckpointError):
            pass
        place = next_place(root, limit, left)
        save_contents(place, contents)
        print(f"saved step {contents.manifest.step} from memory, as {place.folder}", file=sys.stderr)
        return
    for parts in find_parts(file)[:1]:
        if read_part(file, parts[0]).rest["home"] is not None:
            print(f"{describe_missing([part.snapshot for part in parts])}; nothing was saved", file=sys.stderr)


def save_contents(place: Place, contents: Contents) -> None:
    """Write contents between two steps as a checkpoint. Raises as `commit`; TypeError if a state is not plain data."""
    state = {
        "kinds": dict(contents.kinds),
        "held": None,
        "is_divided": False,
        "kept": contents.kept,
        "states": contents.states,
        "ranks": contents.ranks,
    }
    plain, mark = as_plain(state, "a snapshot", lambda tensor: tensor.clone()), f"save-{uuid4().hex[:12]}"
    file = partial(write_file, place.folder.draft(mark) / STATE, plain)
    commit(place, lambda: {STATE: file()}, contents.manifest, mark)
