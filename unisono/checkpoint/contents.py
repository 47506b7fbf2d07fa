"""What is in a checkpoint, read by one process, whichever ranks wrote it; and one of its objects as a file for plain
torch or for safetensors.

*Threads:* any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from unisono.checkpoint.directory import SHARD, STATE, Manifest, find, read_manifest, verify
from unisono.checkpoint.folders import Folder, Location, replace_file, write_file
from unisono.checkpoint.objects import joined_state
from unisono.devices import CPU
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

Format = Literal["torch", "safetensors"]


@dataclass
class Contents:
    """The contents of a checkpoint: of each object its kind and class, and its state in plain form, on the host; of
    each rank, except those of a lost machine, "states" of its loaders, "generators", "extra"; what its models keep
    besides their parameters, and its gradients of an unfinished step, if any."""

    path: Location
    manifest: Manifest
    kinds: Mapping[str, Sequence[str]]
    states: dict[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    held: Sequence[Mapping[str, torch.Tensor]] | None
    kept: Sequence[Mapping[str, Any]] | None


def read_contents(folder: Folder) -> Contents:
    """Read and verify the checkpoint at that place, or the latest one in that folder. Raises as `directory.find`."""
    with ExitStack() as copies:
        found, (local, manifest) = find(folder, lambda each: verify(each, copies))
        saved = _load(local / STATE)
        try:
            states, held, kinds, ranks = saved["states"], saved["held"], saved["kinds"], saved["ranks"]
            if saved["is_divided"]:
                parts = [_load(local / SHARD.format(rank)) for rank in range(manifest.world_size)]
                for name in parts[0]["states"]:
                    states[name] = joined_state([each["states"][name] for each in parts])
                held = [each["held"] for each in parts] if any(each["held"] for each in parts) else None
            kept = saved.get("kept")  # not in those of older versions
            {name: (kind, of) for name, (kind, of) in kinds.items()}, {**states}, [{**each} for each in ranks]
        except DamagedCheckpointError:
            raise
        except Exception as error:  # forged
            raise DamagedCheckpointError(f"{found} has a {STATE} that holds something else: {error!r}") from error
    return Contents(found.location, manifest, kinds, states, ranks, held, kept)


def read_newest(folder: Folder, in_memory: Contents | None, within: int) -> Contents:
    """The contents in memory, unless the checkpoint that `read_contents` would read is newer, and was not saved within
    that many steps: in an iteration whose other lines may not have run. Raises as `read_contents`."""
    if in_memory is not None:
        try:
            _, manifest = find(folder, read_manifest)
        except (NoCheckpointError, DamagedCheckpointError):
            return in_memory
        is_newer = manifest.created <= in_memory.manifest.created
        if is_newer or 0 <= manifest.step - in_memory.manifest.step <= within:
            return in_memory
    return read_contents(folder)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location=CPU, weights_only=True)
    except Exception as error:  # anything, if it was forged
        raise DamagedCheckpointError(f"{path} holds data that is not plain: {error}") from error


def export(folder: Folder, out: Path, name: str | None = None, file_format: Format = "torch") -> tuple[Location, str]:
    """Write the complete state of one object, on the CPU, as `torch.save(object.state_dict(), out)` does; return the
    checkpoint, and the object's name.

    Args:
        folder: a checkpoint, or a directory of numbered ones, where the latest is used.
        name: None uses the only model.
        file_format: "safetensors" supports tensors only.

    Raises:
        CheckpointError: as for loading; or there is no such object, or it contains more than tensors.
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    contents = read_contents(folder)
    models = [each for each, (kind, _) in contents.kinds.items() if kind == "model"]
    if name is None and len(models) == 1:
        name = models[0]
    if name not in contents.states:
        what = f"holds {len(models)} models" if name is None else f"has no {name!r} with one state"
        raise CheckpointError(f"{contents.path} {what}; name the object that you mean: {', '.join(contents.states)}")
    write_state(contents.states[name], out, file_format, name)
    return contents.path, name


def write_state(state: Any, out: Path, file_format: Format, name: str) -> None:
    """Write a state on the CPU as one file, complete or not at all; `name` is for errors, those of `export`."""
    if file_format == "safetensors":
        save = import_module("safetensors.torch").save
        if not isinstance(state, Mapping) or not all(isinstance(each, torch.Tensor) for each in state.values()):
            raise CheckpointError(f"{name} has more than tensors, and safetensors files hold tensors only; use torch's")
        uses = Counter(each.untyped_storage().data_ptr() for each in state.values())
        # safetensors refuses tensors that share memory.
        apart = {k: each.clone() if uses[each.untyped_storage().data_ptr()] > 1 else each for k, each in state.items()}
        state = save({key: each.contiguous() for key, each in apart.items()}, metadata={"format": "pt"})
    replace_file(out, lambda new: write_file(new, state))
