"""The methods of an Accelerator that save and load."""

from __future__ import annotations

import os
from typing import Any

from unisono.checkpoint.prepared_states import PreparedStates
from unisono.checkpoint.remote import Location
from unisono.checkpoint.saver import Loaded
from unisono.timeline import SAVE
from unisono.world import World


class CheckpointMethods:
    """What an Accelerator has in common with Accelerate's, for checkpoints."""

    world: World
    _states: PreparedStates

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these, too, with what was prepared: an EMA, counters, anything with `state_dict()` and
        `load_state_dict()`, and `torch.Generator`s. In the same order in each run.

        Raises:
            TypeError: an object has no state.
        """
        self._states.register(objects)

    def save_state(
        self, dir: str | os.PathLike[str] | None = None, *, score: float | None = None, is_async: bool = False
    ) -> Location | None:
        """Save all that was prepared and registered, and every rank's random generators. Every rank calls it.

        In the midst of an accumulation, the gradients that are held are saved, too.

        Args:
            dir: the checkpoint's; None takes `project_dir/checkpoints/checkpoint_{n}`, numbered from 0 on, of which
                `total_limit` stay.
            score: save only where it is higher than that of the checkpoint at `dir`; rank zero's counts. For a loss
                pass `score=-loss`.
            is_async: return when all is copied to main memory; a thread writes it. What that fails with is raised by
                the next optimizer step, save or `end_training()`.

        Returns:
            The checkpoint's path; None where there is a better one.

        Raises:
            CollectiveMismatchError: other ranks do not save, or are at another step.
            OSError: it cannot be written; what was there before still is.
            CheckpointError: gradients are reduced, and not stepped on yet.
            TypeError: a state is no plain data.
        """
        with self.world.timeline.loop().named(SAVE):
            return self._states.save(dir, score, is_async)

    def load_state(self, dir: str | os.PathLike[str] | None = None, *, must_exist: bool = True) -> Loaded | None:
        """Load what `save_state` has saved, on any number of ranks, under any strategy. Every rank calls it, with the
        same things prepared and registered, in the same order.

        Args:
            dir: a checkpoint, or a directory of numbered ones, of which the latest is taken; None takes
                `project_dir/checkpoints`. Damaged ones are passed over with a warning.
            must_exist: None is returned where there is none, and this is False.

        Raises:
            NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: there is none that can be loaded.
            CheckpointMismatchError: it is of other objects; nothing was changed.
        """
        return self._states.load(dir, must_exist)
