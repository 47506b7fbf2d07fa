"""What is in a checkpoint, read by one process, whichever ranks have written it.

*Threads:* any.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.backends import CPU
from unisono.checkpoint.directory import find
from unisono.checkpoint.folders import Folder, Location
from unisono.checkpoint.manifest import SHARDS, STATE, Manifest, verify
from unisono.checkpoint.objects import DIVIDED, part_name
from unisono.errors import DamagedCheckpointError
from unisono.parallel.strategies.shard_files import read_shards
from unisono.parallel.strategies.states import by_parameter

HELD = "held gradients"  # cannot be an object's name, since it has a space


@dataclass
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path, manifest: the checkpoint's.
        kinds: of each object, its kind and class.
        states: of each object, in plain form, on the host.
        ranks: of each rank that has saved: "states" of its loaders, "generators", "extra".
        held: each rank's gradients of an unfinished step; None between steps.
    """

    path: Location
    manifest: Manifest
    kinds: Mapping[str, Sequence[str]]
    states: dict[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    held: Sequence[Mapping[str, torch.Tensor]] | None


def read_contents(folder: Folder) -> Contents:
    """Read the checkpoint at that place, or the latest one in that folder; all of it is verified. Raises as
    `directory.find`."""
    with tempfile.TemporaryDirectory(prefix="unisono-checkpoint-") as directory:
        found, (local, manifest) = find(folder, lambda each: verify(each, Path(directory) / each.name))
        try:
            saved = torch.load(local / STATE, map_location=CPU, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise DamagedCheckpointError(f"{found}: {STATE} holds data that is not plain: {error}") from error
        contents = Contents(
            found.location, manifest, saved["kinds"], saved["states"], saved["ranks"], saved.get("held")
        )
        if "values" in saved:
            _join_parts(contents, read_shards(local / SHARDS), saved["values"])
    return contents


def _join_parts(contents: Contents, parts: dict[str, torch.Tensor], values: Sequence[Mapping[str, Any]]) -> None:
    """Merge what all ranks have written into the plain states."""
    held: list[dict[str, torch.Tensor]] = [{} for _ in contents.ranks]
    keys: dict[str, dict[Any, Any]] = {name: {} for name, (kind, _) in contents.kinds.items() if kind in DIVIDED}
    for name in [each for each in parts if each.startswith(f"{HELD}/")]:
        _, rank, rest = name.split("/", 2)
        held[int(rank)][rest] = parts.pop(name)
    for full, each in parts.items():
        # With its slash, so that model_1 does not take what belongs to model_10.
        name = next(name for name in keys if full.startswith(part_name(name, "")))
        keys[name][_parse_key(full[len(name) + 1 :], contents.kinds[name][0])] = each
    for own in values:
        for name, more in own.items():
            keys[name].update(more)
    for name, (kind, _) in contents.kinds.items():
        if kind == "model":
            # So far this is the list of names, in the model's order.
            contents.states[name] = {key: keys[name][key] for key in contents.states[name]}
        elif kind == "optimizer":
            contents.states[name]["state"] = by_parameter(dict(sorted(keys[name].items())))
    contents.held = held if any(held) else None


def _parse_key(text: str, kind: str) -> Any:
    if kind == "model":
        return text
    number, _, name = text.partition("/")
    return int(number), name
