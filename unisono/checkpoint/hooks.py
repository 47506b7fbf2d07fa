"""Functions that run before an Accelerator's state is saved or loaded: they add files to a checkpoint, and take models
out of it.

A checkpoint is whole or absent, with the files of its hooks: they are written into a directory of its folder (for a
store, a temporary one), from which the save moves them. Which models are taken out is rank zero's choice: scripts often
act on that rank only.

*Threads:* the rank's own; `take_files` runs in the thread that writes the checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.checkpoint.agreement import agree_on
from unisono.checkpoint.directory import COMPLETE, Place, check_place, new_mark
from unisono.checkpoint.files import Checksum, checksum_of, make_directories, sync
from unisono.checkpoint.folders import LocalFolder
from unisono.parallel.strategies.states import model_state
from unisono.world import World

Hooks = OrderedDict[int, Callable[..., None]]
"""By the ids of their handles, in the order in which they were registered."""


def add_hook(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook; the handle's `remove` takes it out again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def run_save_hooks(
    hooks: Hooks, models: Sequence[nn.Module], modules: Sequence[nn.Module], place: Place, world: World
) -> tuple[list[nn.Module], Path]:
    """Call the hooks of a save, with the prepared models; `modules` are those of the user. A collective. Returns the
    models that are not to be saved, and the directory with the files of the hooks. ValueError if a hook has changed a
    state."""
    directory: Path = agree_on(lambda: _new_directory(place), world)
    states = [model_state(each, world) for each in modules]
    try:
        kept = _call_save_hooks(hooks, models, states, directory)
    except BaseException:
        if world.rank == 0:
            remove_files(directory)
        raise
    return _models_left_out(models, kept, world), directory


def _new_directory(place: Place) -> Path:
    check_place(place)
    is_local = isinstance(place.folder, LocalFolder)
    # If a kill leaves it there, the next save removes it by its name.
    directory = Path(place.folder.location if is_local else tempfile.mkdtemp(prefix="unisono-hooks-")) / new_mark()
    make_directories(directory)
    return directory


def _call_save_hooks(
    hooks: Hooks, models: Sequence[nn.Module], states: Sequence[dict[str, Any]], directory: Path
) -> list[bool]:
    """Call the hooks; returns which of the states they have kept."""
    weights, before = list(states), [dict(each) if each else {} for each in states]
    for hook in list(hooks.values()):
        hook(list(models), weights, str(directory))
    kept = [any(state is each for each in weights) for state in states]
    for place, (is_kept, state, was) in enumerate(zip(kept, states, before, strict=True)):
        if is_kept and was and (state.keys() != was.keys() or any(state[key] is not was[key] for key in was)):
            raise ValueError(
                f"a hook has changed the state of model {place}, and what is saved is the model's; remove the state "
                "from `weights`, and write a file of your own into `output_dir`"
            )
    return kept


def run_load_hooks(hooks: Hooks, models: Sequence[nn.Module], files: str, world: World) -> list[nn.Module]:
    """Call the hooks of a load. A collective. Returns the models that are not to be loaded."""
    remaining = list(models)
    for hook in list(hooks.values()):
        hook(remaining, files)
    return _models_left_out(models, [any(model is each for each in remaining) for model in models], world)


def _models_left_out(models: Sequence[nn.Module], kept: list[bool], world: World) -> list[nn.Module]:
    agreed = world.comm.broadcast_object(kept)
    return [model for model, is_kept in zip(models, agreed, strict=True) if not is_kept]


def remove_files(directory: Path) -> None:
    """Remove the directory of files of hooks, and the folder that it was in, if that is empty now."""
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        directory.parent.rmdir()


def take_files(directory: Path, checkpoint: Path) -> dict[str, Checksum]:
    """Move the files into a checkpoint that is being written, and return their checksums by name. FileExistsError if
    the checkpoint has a file of that name."""
    found: dict[str, Checksum] = {}
    for each in sorted(directory.iterdir()):
        target = checkpoint / each.name
        if target.exists() or each.name == COMPLETE:
            raise FileExistsError(
                f"a hook has written {each.name!r}, the name of a file of every checkpoint; rename it"
            )
        shutil.move(each, target)
        for path in sorted([target, *target.rglob("*")]):
            sync(path)
            if path.is_file():
                found[str(path.relative_to(checkpoint))] = checksum_of(path)
    remove_files(directory)
    return found
