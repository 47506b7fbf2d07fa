"""What the checkpoints of an Accelerator hold: everything it has prepared, what was registered, and the position of its
loop; without the models that a hook saves or loads itself.

Which models are left out is rank zero's choice: scripts often act on that rank only.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from unisono.arguments import check_integer
from unisono.checkpoint.checkpointer import check_count
from unisono.checkpoint.contents import read_newest
from unisono.checkpoint.directory import CHECKPOINTS, Place, next_place
from unisono.checkpoint.folders import Location, folder_at
from unisono.checkpoint.held_gradients import claims_of, held_gradients, resume_step
from unisono.checkpoint.loading import Loaded, Restored, load_checkpoint, say_resumed
from unisono.checkpoint.objects import OF_EACH_RANK, kind_of
from unisono.checkpoint.saver import Saver
from unisono.checkpoint.snapshots import Described, Home, Snapshots
from unisono.errors import CheckpointError
from unisono.launch.messages import say_once
from unisono.torch_private import STEP_WRAPPED
from unisono.training.digests import describe_kernels, record_checkpoint
from unisono.training.prepared.prepared_objects import PreparedObjects
from unisono.training.prepared.scaler import LossScaler
from unisono.training.prepared.stepper import Taken
from unisono.training.replay import in_scratch, replay_of
from unisono.training.steps import Steps
from unisono.training.strategies.states import model_state
from unisono.training.strategies.virtual import check_between

logger = logging.getLogger(__name__)

Hooks = OrderedDict[int, Callable[..., None]]
"""By the ids of their handles, in the order in which they were registered."""
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


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
        self._root, self._limit = folder_at(project_dir or "runs") / CHECKPOINTS, total_limit
        self._registered: list[Any] = []
        self.save_hooks, self.load_hooks = Hooks(), Hooks()
        self._saver = Saver(steps.world)
        self._snapshots: Snapshots | None = None
        self._home: Home | None = None  # where this script looks for a checkpoint to continue from

    def keep_snapshots(self, every: int, kept: int) -> None:
        """From now on, take a snapshot once in that many steps, and keep the last ones."""
        self._snapshots = Snapshots(self._steps, every, kept, self._num_steps, self._describe)

    def drop_snapshots(self) -> None:
        """Take no more snapshots."""
        self._snapshots = None

    def _num_steps(self) -> int:
        """The number of steps that the optimizers have taken."""
        return max((each.taken.steps for each in self._prepared.steppers()), default=0)

    def _describe(self) -> Described:
        self._check_optimizers()
        return Described(self._named_objects(), self._facts(None), self._num_steps(), self._home)

    def _facts(self, claims: Any) -> dict[str, Any]:
        """What a checkpoint knows of this rank besides the objects."""
        return {
            "taken": [list(each.taken) for each in self._prepared.steppers()],
            "claims": claims,
            "bits": self._bits(),
        }

    def register(self, objects: Sequence[Any]) -> None:
        for place, each in enumerate(objects):
            kind_of(f"object {place}", each)
        self._registered += [each for each in objects if not any(each is other for other in self._registered)]

    def save(self, directory: str | os.PathLike[str] | None, score: float | None, is_async: bool) -> Location | None:
        """See `Accelerator.save_state`."""
        self._prepared.collect()
        self._check_optimizers()
        self._warn_of_schedulers()
        objects = self._named_objects()
        self._check_complete(objects)
        place = self._next_place if directory is None else Place(folder_at(in_scratch(directory, self._steps.world)))
        for stepper in self._prepared.steppers() if is_async else []:
            if self._saver.poll not in stepper.checks:  # the next step raises the error of a save that has failed
                stepper.checks.append(self._saver.poll)
        self.check_round("save_state")
        claims = claims_of(self._steps, self._prepared.engines())
        held = None if claims is None else held_gradients(self._prepared.engines())
        choose = self._run_save_hooks if self.save_hooks else None
        facts = self._facts(claims)
        return self._saver.save(place, objects, self._num_steps(), score, is_async, facts, held, choose)

    def load(self, directory: str | os.PathLike[str] | None, must_exist: bool) -> Loaded | None:
        """See `Accelerator.load_state`."""
        self._prepared.collect()
        folder = self._root if directory is None else folder_at(directory)
        if (replay := replay_of(self._steps.world)) is not None:
            folder = folder_at(replay.place_to_load(str(folder)))
        choose = self._run_load_hooks if self.load_hooks else None
        in_memory, within = None, 0
        if self._snapshots is not None and self._snapshots.has_not_begun:
            place = os.path.abspath(folder.location) if isinstance(folder.location, Path) else folder.location
            self._home = Home(place, self._limit, directory is None)
            in_memory, within = self._snapshots.newest(place), self._snapshots.every
        find = partial(read_newest, folder, in_memory, within)
        self._saver.wait("load_state")
        restored = load_checkpoint(self._steps.world, find, self._named_objects(), must_exist, choose)
        facts = [] if restored is None else self._continue_from(restored)
        if self._snapshots is not None:
            self._snapshots.note_load(self._num_steps())
        if restored is None:
            return None
        if self._steps.world.rank == 0:
            self._compare_bits(facts[0].get("bits", {}))
        now = {**facts[0], "bits": self._bits()}
        if restored.mark:
            record_checkpoint(self._steps.world, "loaded", restored.loaded.path, restored.mark, now)
        if facts[0]["claims"] is not None:
            claims = [each["claims"] for each in facts]
            resume_step(claims, restored.held, self._steps, self._prepared.engines())
        lost = None if restored.mark else max(0, self._steps.world.state.done_before - restored.loaded.step)
        say_resumed(restored.loaded, self._named_objects(), self._steps.world, lost)
        return restored.loaded

    def _continue_from(self, restored: Restored) -> list[Any]:
        """Continue from the step of what was loaded; returns the facts of each rank."""
        facts = [each or {"taken": [], "claims": None} for each in restored.facts]  # a Checkpointer saves no facts
        for stepper, taken in zip(self._prepared.steppers(), facts[0]["taken"], strict=False):
            stepper.taken = Taken(*taken)
        self._steps.world.timeline.at_load(self._num_steps())
        for scheduler in self._prepared.schedulers():
            scheduler.follow()
        self._steps.restart()
        for engine in self._prepared.engines():  # gradients of this run do not belong to a step of the loaded one
            for each in [*engine.members.trained(), *engine.leaves()]:
                each.grad = None
            engine.restart()
        return facts

    def rewind(self, steps: int, skips: bool) -> Loaded:
        """See `Accelerator.rewind`."""
        check_integer(steps, "steps", 1)
        if self._snapshots is None:
            raise RuntimeError("rewind() needs snapshots: Accelerator(snapshot_every=1)")
        self.check_round("rewind")
        objects = self._named_objects()
        if skips:
            objects = {name: each for name, each in objects.items() if kind_of(name, each) not in OF_EACH_RANK}
        self._snapshots.check_rewind(skips)
        find = self._snapshots.before(self._num_steps() - steps)
        self._saver.wait("rewind")
        restored = load_checkpoint(self._steps.world, find, objects, generates_alike=not skips)
        assert restored is not None
        self._continue_from(restored)
        self._snapshots.note_rewind(restored.loaded.step, skips)
        return restored.loaded

    def check_round(self, name: str) -> None:
        """Refuse a call of that name in the middle of a round of virtual ranks, or after a loop that was left there."""
        check_between(self._steps, name)

    def _bits(self) -> dict[str, Any]:
        """What the bits of a run with virtual ranks depend on; {} without them."""
        virtual = self._steps.virtual
        return {} if virtual is None else {"virtual_ranks": virtual.count, **describe_kernels(self._steps.world)}

    def _compare_bits(self, saved: Mapping[str, Any]) -> None:
        """Warn if this run continues with other bits than the saved one would have."""
        own = self._bits()
        names = own if saved and own else ["virtual_ranks"]
        if differing := [
            f"{name}={saved.get(name)!r}, now {own.get(name)!r}" for name in names if saved.get(name) != own.get(name)
        ]:
            logger.warning(
                "the bits will differ from those of a run that was not interrupted: the checkpoint was saved with %s",
                "; ".join(differing),
            )

    def close(self) -> None:
        """Wait for the save in progress, and raise its error if it failed."""
        self._saver.close()

    def _run_save_hooks(self, directory: Path) -> dict[str, Any]:
        """Call the hooks of a save; returns what is still to be saved. ValueError if a hook has changed a state."""
        models = self._prepared.models()
        states = [model_state(each, self._steps.world) for each in self._prepared.modules()]
        weights, before = list(states), [dict(each) if each else {} for each in states]
        for hook in list(self.save_hooks.values()):
            hook(list(models), weights, str(directory))
        kept = [any(state is each for each in weights) for state in states]
        for place, (is_kept, state, was) in enumerate(zip(kept, states, before, strict=True)):
            if is_kept and was and (state.keys() != was.keys() or any(state[key] is not was[key] for key in was)):
                raise ValueError(
                    f"a hook has changed the state of model {place}, and the model's is saved; remove the state from "
                    "`weights`, and write a file of your own into `output_dir`"
                )
        return self._named_objects(kept)

    def _run_load_hooks(self, files: str) -> dict[str, Any]:
        """Call the hooks of a load; returns what is still to be loaded."""
        models = self._prepared.models()
        remaining = list(models)
        for hook in list(self.load_hooks.values()):
            hook(remaining, files)
        return self._named_objects([any(model is each for each in remaining) for model in models])

    def _check_complete(self, objects: Mapping[str, Any]) -> None:
        """CheckpointError if the models are gone, or there is nothing to save, except by hooks."""
        lost = self._prepared.has_models and not self._prepared.modules()
        if lost or not (objects or self.save_hooks):
            what = "no model: those that were prepared are gone" if lost else "nothing: nothing is prepared"
            raise CheckpointError(
                f"save_state would save {what}; keep what prepare() returns, or the model or its optimizer, until the "
                "last save, or call free_memory() when you are done with them"
            )

    def _check_optimizers(self) -> None:
        """CheckpointError if the state of an optimizer that trains one of the models would be left out."""
        for engine in self._prepared.engines():
            for each in (trainer.optimizer() for trainer in engine.trainers if trainer.is_unprepared):
                if each is not None and not any(each is other for other in self._registered):
                    raise CheckpointError(
                        f"save_state would leave out the {type(each).__name__} that has stepped for the {engine.name}, "
                        "since it was not prepared; prepare it, or pass it to register_for_checkpointing"
                    )

    def _warn_of_schedulers(self) -> None:
        """Warn once of a prepared optimizer that has a scheduler, but no known one."""
        known = [*self._prepared.schedulers(), *self._registered]
        followed = {id(getattr(each, "optimizer", None)) for each in known}
        for each in [stepper.optimizer for stepper in self._prepared.steppers()]:
            if hasattr(each.step, STEP_WRAPPED) and id(each) not in followed and self._steps.world.rank == 0:
                say_once(
                    f"save_state leaves out the scheduler of the {type(each).__name__}, which was not prepared; "
                    "prepare it, or pass it to register_for_checkpointing"
                )

    def _named_objects(self, kept: Sequence[bool] | None = None) -> dict[str, Any]:
        """Everything that is saved, by name; of the models, if `kept` is given, those that rank zero keeps."""
        models = dict(enumerate(self._prepared.models()))
        if kept is not None:
            agreed = self._steps.world.comm.broadcast_object(kept)
            models = {place: each for place, each in models.items() if agreed[place]}
        others: dict[str, Sequence[Any]] = {
            "optimizer": [each.optimizer for each in self._prepared.steppers()],
            "scheduler": self._prepared.schedulers(),
            "loader": self._prepared.loaders(),
            "mean": self._prepared.means(),
            "registered": self._registered,
        }
        named: dict[str, Any] = {f"model_{place}": each for place, each in models.items()}
        named |= {f"{kind}_{place}": each for kind, found in others.items() for place, each in enumerate(found)}
        return named if self._scaler is None else {**named, "scaler": self._scaler}

    def _next_place(self) -> Place:
        return next_place(self._root, self._limit)
