"""Checkpoints for hand-written loops, on any number of ranks: in worker processes, on threads, in a plain script.

    with Checkpointer("runs/digits", model=model, optimizer=optimizer, loader=loader, every=100) as checkpointer:
        checkpointer.load(must_exist=False)  # resume the latest, if there is one
        for images, labels in loader:
            ...
            checkpointer.step()

*Threads:* the rank's own. All ranks must call, at the same places of their loops.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from unisono.arguments import check_integer
from unisono.checkpoint.contents import read_contents
from unisono.checkpoint.directory import Place
from unisono.checkpoint.folders import Location, folder_at
from unisono.checkpoint.loading import Loaded, load_checkpoint, say_resumed
from unisono.checkpoint.objects import kinds_of
from unisono.checkpoint.saver import Saver
from unisono.world import World, current_world


class Checkpointer:
    """Saves objects into numbered directories, `checkpoint_{step}`, and keeps the most recent ones. A context manager.

    Args:
        directory: the parent directory of the checkpoints; or a URL that fsspec supports, such as s3://bucket/run.
        objects: models, optimizers, schedulers, loaders, scalers, `torch.Generator`s and anything with `state_dict()`
            and `load_state_dict()`, by name; the same names on each rank. Every rank's random generators are saved as
            well.
        keep: the number of checkpoints to keep; None keeps all.
        every: `step()` saves on every `every`-th call; None leaves saving to `save()`.
        is_async: `save` returns once everything is copied to main memory, and a thread writes it. Only one save is in
            progress at a time; the next waits for it.
        world: None uses the current one.

    Attributes:
        num_steps: how many times `step` was called, in this run and in the runs it has resumed.

    Raises:
        TypeError, ValueError: an argument is out of range, or an object has no state.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | None = None,
        is_async: bool = True,
        *,
        world: World | None = None,
        **objects: Any,
    ) -> None:
        check_count(keep, "keep")
        check_count(every, "every")
        kinds_of(objects)
        self.num_steps = 0
        self._directory, self._keep, self._every, self._is_async = folder_at(directory), keep, every, is_async
        self._objects = objects
        self._saver = Saver(world or current_world())

    def step(self) -> bool:
        """Count a step of the loop, and save if a checkpoint is due; return whether it saved. Raises as `save`."""
        self.num_steps += 1
        if self._every is not None and self.num_steps % self._every == 0:
            self.save()
            return True
        self._saver.poll()
        return False

    def save(self, path: str | os.PathLike[str] | None = None, *, score: float | None = None) -> Location | None:
        """Save now. All ranks must call it.

        Args:
            path: a separate path, for example for the best model; this checkpoint is not numbered, and stays until it
                is replaced. None uses `checkpoint_{num_steps}` in the directory.
            score: as for `Accelerator.save_state`: save only if it is higher than that of the checkpoint at that path.

        Returns:
            The checkpoint's path; None if the existing checkpoint has at least that score, or `score` is NaN.

        Raises:
            Exception: the error of an earlier save.
            CollectiveMismatchError, OSError, TypeError: as for `Accelerator.save_state`.
            FileExistsError: the path is a directory with other contents.
        """
        place = Place.numbered(self._directory, self.num_steps, self._keep) if path is None else Place(folder_at(path))
        return self._saver.save(place, self._objects, self.num_steps, score, self._is_async)

    def load(self, path: str | os.PathLike[str] | None = None, *, must_exist: bool = True) -> Loaded | None:
        """Load a checkpoint: the one that `latest` in this directory names, or the one at `path`. Raises as
        `Accelerator.load_state`. All ranks must call it; rank zero says on stderr what was loaded.

        Args:
            path: a checkpoint, or a directory of checkpoints; None uses this Checkpointer's directory.
            must_exist: whether a missing checkpoint is an error; if False, None is returned.

        Returns:
            What was loaded, with its step; None if there is no checkpoint and `must_exist` is False.
        """
        folder = self._directory if path is None else folder_at(path)
        world = self._saver.world
        self._saver.wait("load_state")
        restored = load_checkpoint(world, partial(read_contents, folder), self._objects, must_exist)
        if restored is None:
            return None
        self.num_steps = restored.loaded.step
        world.timeline.at_load(self.num_steps)
        say_resumed(restored.loaded, self._objects, world)
        return restored.loaded

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error if it failed. All ranks must call it."""
        self._saver.wait("the end of a save")

    def close(self) -> None:
        """Wait for the save in progress, and raise its error on the rank where it failed."""
        self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save(path: str | os.PathLike[str], *, step: int = 0, world: World | None = None, **objects: Any) -> Location:
    """Save objects, and every rank's random generators, as one checkpoint. All ranks must call it.

    It returns when the checkpoint is on disk. Raises the errors of `Checkpointer.save`.

    Args:
        path: the checkpoint, which is replaced if it exists; or a URL.
        step: the number of steps to record in the checkpoint.
        objects: by name, as for `Checkpointer`.

    Returns:
        The checkpoint's path.
    """
    saved = Saver(world or current_world()).save(Place(folder_at(path)), objects, step)
    assert saved is not None  # only a score can make save return None
    return saved


def load(
    path: str | os.PathLike[str], *, must_exist: bool = True, world: World | None = None, **objects: Any
) -> Loaded | None:
    """Load objects; returns and raises as `Checkpointer.load`. All ranks must call it.

    Args:
        path: a checkpoint, or a directory of checkpoints; or a URL.
        must_exist: whether a missing checkpoint is an error; if False, None is returned.
        objects: under the names that they were saved with.
    """
    world = world or current_world()
    world.comm.announce("load_state")
    restored = load_checkpoint(world, partial(read_contents, folder_at(path)), objects, must_exist)
    if restored is None:
        return None
    world.timeline.at_load(restored.loaded.step)
    return restored.loaded


def check_count(count: Any, name: str) -> None:
    """Raise TypeError or ValueError unless `count` is a positive integer or None."""
    if count is not None:
        check_integer(count, name, 1, "pass an integer of at least 1, or None")
