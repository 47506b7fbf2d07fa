"""The methods of an Accelerator that save and load."""

from __future__ import annotations

import os
from typing import Any

from unisono.checkpoint.folders import Location
from unisono.checkpoint.prepared_states import PreparedStates
from unisono.checkpoint.saver import Loaded
from unisono.timeline import SAVE
from unisono.world import World


class CheckpointMethods:
    """The checkpoint methods of an Accelerator, compatible with Accelerate's."""

    world: World
    _states: PreparedStates

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects along with what was prepared: an EMA, counters, anything with `state_dict()` and
        `load_state_dict()`, and `torch.Generator`s. Register them in the same order in each run.

        Args:
            objects: the objects to save and load.

        Raises:
            TypeError: an object has no state.
        """
        self._states.register(objects)

    def save_state(
        self, dir: str | os.PathLike[str] | None = None, *, score: float | None = None, is_async: bool = False
    ) -> Location | None:
        """Save everything that was prepared and registered, and every rank's random generators. Every rank must call
        it.

        In the middle of an accumulation, the gradients accumulated so far are saved as well.

        Args:
            dir: the checkpoint's directory; None uses `project_dir/checkpoints/checkpoint_{n}`, numbered from 0, of
                which `total_limit` are kept.
            score: save only if it is higher than the score of the checkpoint at `dir`; rank zero's score counts. For a
                loss, pass `score=-loss`.
            is_async: return once everything is copied to main memory; a thread writes it. If that fails, the next
                optimizer step, save or `end_training()` raises the error.

        Returns:
            The checkpoint's path; None if the existing checkpoint has at least that score, or `score` is NaN.

        Raises:
            CollectiveMismatchError: other ranks do not save, or are at another step.
            OSError: the checkpoint cannot be written; what was there before is intact.
            CheckpointError: gradients are reduced, but no step has been taken with them yet; or an optimizer that has
                stepped for a prepared model was neither prepared nor registered.
            TypeError: a state is not plain data.
        """
        with self.world.timeline.loop().named(SAVE):
            return self._states.save(dir, score, is_async)

    def load_state(self, dir: str | os.PathLike[str] | None = None, *, must_exist: bool = True) -> Loaded | None:
        """Load what `save_state` has saved, on any number of ranks, under any strategy.

        Every rank must call it, with the same things prepared and registered, in the same order.

        Args:
            dir: a checkpoint, or a directory of numbered ones, of which the latest is used; None uses
                `project_dir/checkpoints`. Damaged ones are skipped with a warning.
            must_exist: whether a missing checkpoint is an error; if False, None is returned.

        Returns:
            What was loaded, with its step; None if there is no checkpoint and `must_exist` is False.

        Raises:
            NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: there is no checkpoint that can be
                loaded.
            CheckpointMismatchError: the checkpoint holds other objects; nothing was changed.
        """
        return self._states.load(dir, must_exist)
