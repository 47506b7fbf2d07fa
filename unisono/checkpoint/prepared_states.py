"""The checkpoints of one Accelerator: everything it has prepared, what was registered, and the position of its loop.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from unisono.checkpoint.agreement import agree_on
from unisono.checkpoint.checkpointer import check_count
from unisono.checkpoint.directory import Place, numbered_in
from unisono.checkpoint.folders import Location, folder_at
from unisono.checkpoint.held_gradients import claims_of, held_gradients, resume_step
from unisono.checkpoint.hooks import Hooks, remove_files, run_load_hooks, run_save_hooks
from unisono.checkpoint.objects import kind_of
from unisono.checkpoint.saver import Loaded, Saver
from unisono.errors import CheckpointError
from unisono.parallel.prepared.prepared_objects import PreparedObjects
from unisono.parallel.prepared.scaler import LossScaler
from unisono.parallel.prepared.schedule_units import Taken
from unisono.parallel.steps import Steps
from unisono.parallel.strategies.engine import Engine
from unisono.torch_private import STEP_WRAPPED

logger = logging.getLogger(__name__)

_FOLDER = "checkpoints"


class PreparedStates:
    """The state of one Accelerator, as saved in its checkpoints."""

    def __init__(
        self,
        prepared: PreparedObjects,
        steps: Steps,
        scaler: LossScaler | None,
        project_dir: str | os.PathLike[str] | None,
        total_limit: int | None,
    ) -> None:
        check_count(total_limit, "total_limit")
        self._prepared, self._steps, self._scaler = prepared, steps, scaler
        self._root, self._limit = folder_at(project_dir or "runs") / _FOLDER, total_limit
        self._registered: list[Any] = []
        self.save_hooks, self.load_hooks = Hooks(), Hooks()
        self._saver = Saver(steps.world)
        self._has_warned = False

    def register(self, objects: Sequence[Any]) -> None:
        """See `Accelerator.register_for_checkpointing`."""
        for place, each in enumerate(objects):
            kind_of(f"object {place}", each)
        self._registered += [each for each in objects if not any(each is other for other in self._registered)]

    def save(self, directory: str | os.PathLike[str] | None, score: float | None, is_async: bool) -> Location | None:
        """See `Accelerator.save_state`."""
        self._check_optimizers()
        self._warn_of_schedulers()
        place = self._next_place if directory is None else Place(folder_at(directory))
        if is_async:
            self._poll_in_steps()
        claims = claims_of(self._steps, self._prepared_engines())
        taken = [list(each.taken) for each in self._prepared.steppers()]
        held = None if claims is None else held_gradients(self._prepared_engines())
        objects, files, saved = self._named_objects(), None, None
        if self.save_hooks:
            self._steps.world.comm.announce("save_state")
            self._saver.wait()  # the save in progress clears up in its folder
            place = agree_on(place, self._steps.world) if callable(place) else place  # before there are files in it
            models, modules = self._prepared.models(), self._prepared.modules()
            left_out, files = run_save_hooks(self.save_hooks, models, modules, place, self._steps.world)
            objects = self._named_objects(left_out)
        facts = {"taken": taken, "claims": claims}
        try:
            saved = self._saver.save(place, objects, self._steps_taken(), score, is_async, facts, held, files)
        finally:
            if saved is None and files is not None and self._steps.world.rank == 0:
                remove_files(files)
        return saved

    def load(
        self, directory: str | os.PathLike[str] | None, must_exist: bool, allow_other_optimizer: bool
    ) -> Loaded | None:
        """See `Accelerator.load_state`."""
        folder = self._root if directory is None else folder_at(directory)
        choose = self._choose_objects if self.load_hooks else None
        restored = self._saver.load(folder, self._named_objects(), must_exist, allow_other_optimizer, choose)
        if restored is None:
            return None
        facts = [each or {"taken": [], "claims": None} for each in restored.facts]  # a Checkpointer saves no facts
        for stepper, taken in zip(self._prepared.steppers(), facts[0]["taken"], strict=False):
            stepper.taken = Taken(*taken)
        for scheduler in self._prepared.schedulers():
            scheduler.follow()
        self._steps.restart()
        for engine in self._prepared_engines():  # gradients of this run do not belong to a step of the loaded one
            for each in [*engine.trained(), *engine.leaves()]:
                each.grad = None
            engine.forget()
        if facts[0]["claims"] is not None:
            claims = [each["claims"] for each in facts]
            resume_step(claims, restored.held, self._steps, self._prepared_engines())
        return restored.loaded

    def close(self) -> None:
        """Wait for the save in progress, and raise its error if it failed."""
        self._saver.close()

    def _check_optimizers(self) -> None:
        """Refuse to leave out the state of an optimizer that trains one of the models; CheckpointError if there is such
        an optimizer."""
        for engine in self._prepared_engines():
            for each in (trainer.optimizer() for trainer in engine.trainers if trainer.is_unprepared):
                if each is not None and not any(each is other for other in self._registered):
                    raise CheckpointError(
                        f"save_state would leave out the {type(each).__name__} that has stepped for the {engine.name}, "
                        "since it was not prepared, and a resumed run would lose its state; prepare it, or pass it to "
                        "register_for_checkpointing"
                    )

    def _warn_of_schedulers(self) -> None:
        """Warn once of a prepared optimizer that has a scheduler, none of which is known."""
        known = [*self._prepared.schedulers(), *self._registered]
        followed = {id(getattr(each, "optimizer", None)) for each in known}
        left_out = [
            type(each.optimizer).__name__
            for each in self._prepared.steppers()
            if hasattr(each.optimizer.step, STEP_WRAPPED) and id(each.optimizer) not in followed
        ]
        if left_out and not self._has_warned and self._steps.world.rank == 0:
            self._has_warned = True
            logger.warning(
                "save_state leaves out the scheduler of the %s, which was not prepared: a resumed run would begin its "
                "schedule again; prepare it, or pass it to register_for_checkpointing",
                left_out[0],
            )

    def _steps_taken(self) -> int:
        return max((each.taken.steps for each in self._prepared.steppers()), default=0)

    def _prepared_engines(self) -> list[Engine]:
        return [each.engine for each in self._prepared.models()]

    def _choose_objects(self, files: str) -> dict[str, Any]:
        """What is loaded from the checkpoint with these files, by the choice of the hooks."""
        return self._named_objects(run_load_hooks(self.load_hooks, self._prepared.models(), files, self._steps.world))

    def _named_objects(self, left_out: Sequence[nn.Module] = ()) -> dict[str, Any]:
        """Everything that is saved, by name."""
        kinds: dict[str, Sequence[Any]] = {
            "model": self._prepared.models(),
            "optimizer": [each.optimizer for each in self._prepared.steppers()],
            "scheduler": self._prepared.schedulers(),
            "loader": self._prepared.loaders(),
            "mean": self._prepared.means(),
            "registered": self._registered,
        }
        named = {f"{kind}_{place}": each for kind, found in kinds.items() for place, each in enumerate(found)}
        named = {name: each for name, each in named.items() if not any(each is other for other in left_out)}
        return named if self._scaler is None else {**named, "scaler": self._scaler}

    def _next_place(self) -> Place:
        number = max((number for number, _ in numbered_in(self._root)), default=-1) + 1
        return Place.numbered(self._root, number, self._limit)

    def _poll_in_steps(self) -> None:
        """Make the next step raise the error of an asynchronous save that failed."""
        for stepper in self._prepared.steppers():
            if self._saver.poll not in stepper.checks:
                stepper.checks.append(self._saver.poll)
