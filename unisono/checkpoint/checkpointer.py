"""Checkpoints for loops by hand, on any number of ranks: in worker processes, on threads, in a plain script.

    with Checkpointer("runs/digits", model=model, optimizer=optimizer, loader=loader, every=100) as checkpointer:
        checkpointer.load(must_exist=False)  # resume the latest, if there is one
        for images, labels in loader:
            ...
            checkpointer.step()

*Threads:* the rank's own. All ranks call, at the same places of their loops.
"""

from __future__ import annotations

import os
from typing import Any

from unisono.checkpoint.directory import Place
from unisono.checkpoint.objects import kinds_of
from unisono.checkpoint.remote import Location, location
from unisono.checkpoint.saver import Loaded, Saver
from unisono.errors import ClosedError
from unisono.world import World, current_world


class Checkpointer:
    """Saves objects into numbered directories, `checkpoint_{step}`, and keeps the last few; a context manager.

    Args:
        directory: of the checkpoints; or a URL that fsspec knows, s3://bucket/run.
        objects: models, optimizers, schedulers, loaders, scalers, `torch.Generator`s and anything with `state_dict()`
            and `load_state_dict()`, by name: the same on each rank. Every rank's random generators are saved with them.
        keep: how many stay; None keeps all.
        every: `step()` saves at each `every`-th; None leaves saving to `save()`.
        is_async: saving returns when all is copied to main memory, and a thread writes it. One save is under way at a
            time; the next one waits for it.
        sharded: all ranks write their parts of a model, or an optimizer's state, that a strategy has divided. None:
            where the model has more than 256 MB.
        world: None takes the current one.

    Attributes:
        num_steps: how often `step` was called, in this run and in those that it has resumed.

    Raises:
        TypeError, ValueError: an argument is out of its range, or an object has no state.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | None = None,
        is_async: bool = True,
        *,
        sharded: bool | None = None,
        world: World | None = None,
        **objects: Any,
    ) -> None:
        check_count(keep, "keep")
        check_count(every, "every")
        kinds_of(objects)
        self.num_steps = 0
        self._directory, self._keep, self._every, self._is_async = location(directory), keep, every, is_async
        self._objects = objects
        self._saver = Saver(world or current_world(), sharded)
        self._is_closed = False

    def step(self) -> bool:
        """Count a step of the loop, and save where one is due; whether it was.

        Raises:
            Exception: as `save`; what an earlier save has failed with.
        """
        self._check_open()
        self.num_steps += 1
        if self._every is not None and self.num_steps % self._every == 0:
            self.save()
            return True
        self._saver.poll()
        return False

    def save(self, path: str | os.PathLike[str] | None = None, *, score: float | None = None) -> Location | None:
        """Save now. All ranks call.

        Args:
            path: a place of its own, for the best model say; it is not numbered, and stays until it is replaced. None
                takes `checkpoint_{num_steps}` in the directory.
            score: save only where it is higher than that of the checkpoint which lies there; rank zero's counts. For a
                loss pass `score=-loss`.

        Returns:
            The checkpoint's path; None where there is a better one.

        Raises:
            Exception: what an earlier save has failed with.
            CollectiveMismatchError: other ranks do not save, or are at another step.
            OSError: it cannot be written; what was there before still is.
            FileExistsError: the path is a directory of something else.
            TypeError: a state is no plain data.
        """
        self._check_open()
        place = Place.numbered(self._directory, self.num_steps, self._keep) if path is None else Place(location(path))
        return self._saver.save(place, self._objects, self.num_steps, score, self._is_async)

    def load(self, path: str | os.PathLike[str] | None = None, *, must_exist: bool = True) -> Loaded | None:
        """Load a checkpoint, that of this directory which `latest` names or the one at the path. All ranks call.

        Damaged ones are passed over with a warning, where there is another one.

        Args:
            path: of a checkpoint, or of a directory of them; None takes this one's directory.
            must_exist: None is returned where there is none, and this is False.

        Raises:
            NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: there is none that can be loaded.
            CheckpointMismatchError: it is of other objects; nothing was changed.
        """
        self._check_open()
        restored = self._saver.load(self._directory if path is None else location(path), self._objects, must_exist)
        if restored is None:
            return None
        self.num_steps = restored.loaded.step
        return restored.loaded

    def wait(self) -> None:
        """Wait for the save that is under way; raise what it has failed with."""
        self._saver.wait()

    def close(self) -> None:
        """As `wait`, and take no more. Idempotent."""
        self._is_closed = True
        self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this Checkpointer is closed; make another one")


def save(path: str | os.PathLike[str], *, step: int = 0, world: World | None = None, **objects: Any) -> Location:
    """Save objects, and every rank's random generators, as one checkpoint. All ranks call.

    Errors are as for `Checkpointer.save`; it returns when the disk has it.

    Args:
        path: of the checkpoint, which is replaced if it is there; or a URL.
        step: the number of steps that it says were taken.
        objects: by name, as for `Checkpointer`.
    """
    saved = Saver(world or current_world()).save(Place(location(path)), objects, step)
    assert saved is not None  # there is no score
    return saved


def load(
    path: str | os.PathLike[str], *, must_exist: bool = True, world: World | None = None, **objects: Any
) -> Loaded | None:
    """Load objects; as `Checkpointer.load`. All ranks call.

    Args:
        path: of a checkpoint, or of a directory of them; or a URL.
        must_exist: None is returned where there is none, and this is False.
        objects: under the names by which they were saved.
    """
    restored = Saver(world or current_world()).load(location(path), objects, must_exist)
    return None if restored is None else restored.loaded


def check_count(count: Any, name: str) -> None:
    """Refuse what is no number from 1 on, or None. TypeError, ValueError."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError(f"{name}={count!r} is a {type(count).__name__}; pass a whole number, or None")
    if count is not None and count < 1:
        raise ValueError(f"{name}={count} is too small; pass a whole number from 1 on, or None")
