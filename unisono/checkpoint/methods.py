"""The methods of an Accelerator that save and load.

*Threads:* the rank's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.checkpoint.agreement import agree_on
from unisono.checkpoint.contents import write_state
from unisono.checkpoint.folders import Location
from unisono.checkpoint.loading import Loaded
from unisono.checkpoint.objects import meet, user_module
from unisono.checkpoint.prepared_states import Hooks, LoadHook, PreparedStates, SaveHook
from unisono.report.timeline import SAVE
from unisono.training.replay import in_scratch
from unisono.training.strategies.states import model_state, on_host
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
        self, output_dir: str | os.PathLike[str] | None = None, *, score: float | None = None, is_async: bool = False
    ) -> Location | None:
        """Save everything that was prepared and registered, and every rank's random generators. Every rank must call
        it.

        In the middle of an accumulation, the gradients accumulated so far are saved as well.

        Args:
            output_dir: the checkpoint's directory; None uses `project_dir/checkpoints/checkpoint_{n}`, numbered from 0;
                `total_limit` of them are kept.
            score: save only if it is higher than the score of the checkpoint at `output_dir`; rank zero's score counts.
                For a loss, pass `score=-loss`.
            is_async: return once everything is copied to main memory; a thread writes it. If that fails, all ranks
                raise the error in the same optimizer step, or in the next save or load; that step is not taken.
                `end_training()` raises it on the rank that met it.

        Returns:
            The checkpoint's path; None if the existing checkpoint has at least that score, or `score` is NaN.

        Raises:
            CollectiveMismatchError: other ranks do not save, or are at another step.
            OSError: the checkpoint cannot be written; what was there before is intact.
            CheckpointError: gradients are reduced, but no step has been taken with them yet; or an optimizer that has
                stepped for a prepared model was neither prepared nor registered.
            RuntimeError: it is called in the middle of a round of virtual ranks, or a loop was left there.
            TypeError: a state is not plain data.
        """
        with self.world.timeline.loop().named(SAVE), self.world.state.deliveries.evaluations.aside():
            return self._states.save(output_dir, score, is_async)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *, must_exist: bool = True) -> Loaded | None:
        """Load what `save_state` has saved, on any number of ranks, under any strategy; rank zero says so on stderr.

        Every rank must call it, with the same things prepared and registered, in the same order.

        Args:
            input_dir: a checkpoint, or a directory of numbered ones, or a `project_dir`, where the latest is used; None
                uses `project_dir/checkpoints`. Damaged ones are skipped with a warning.
            must_exist: whether a missing checkpoint is an error; if False, None is returned.

        Returns:
            What was loaded, with its step; None if there is no checkpoint and `must_exist` is False.

        Raises:
            NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: there is no checkpoint that can be
                loaded.
            CheckpointMismatchError: the checkpoint holds other objects; nothing was changed.
        """
        return self._states.load(input_dir, must_exist)

    def rewind(self, steps: int = 1, *, skip: bool = True) -> Loaded:
        """Go back by some optimizer steps in the running loop, to a snapshot: as after a loss of NaN, or a spike. Every
        rank must call it, between two steps: before the forward pass on a batch, instead of its step, or after it.

        Models, optimizers, schedulers and what was registered are as they were then. Gradients are zero.

        Args:
            steps: the least number of steps to undo. `Accelerator(snapshots=n)` keeps as many snapshots to go back to.
            skip: the loop continues with its next batch, and what it has drawn since is not drawn again. False: it
                draws that again, with the same random numbers.

        Returns:
            What was loaded, with its step.

        Raises:
            RuntimeError: without `snapshot_every`; in the middle of a round of virtual ranks; or, with `skip=False`,
                several loops train, or none does.
            CheckpointError: there is no snapshot that far back.
            CollectiveMismatchError: other ranks do not call it.
        """
        return self._states.rewind(steps, skip)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every rank before each save, as Accelerate does.

        `models` are the prepared models; `weights` their states, as of `Accelerator.state_dict`. A model whose state
        rank zero removes from `weights` is not saved. Files that a hook writes into `output_dir`, a directory on its
        way to become the checkpoint, are part of the checkpoint.

        Returns:
            A handle, whose `remove()` takes the hook out again.
        """
        return _add_hook(self._states.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every rank before each load, as Accelerate does, once the checkpoint was
        found and verified.

        `models` are the prepared models; one that rank zero removes from the list is not loaded. `input_dir` is the
        checkpoint's directory; in a store, its address.

        Returns:
            A handle, whose `remove()` takes the hook out again.
        """
        return _add_hook(self._states.load_hooks, hook)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], *, safe_serialization: bool = True
    ) -> None:
        """Save a model for inference elsewhere, as Accelerate does, in one file. Every rank must call it, and has it
        then.

        Args:
            model: prepared or not.
            save_directory: made if it does not exist.
            safe_serialization: write `model.safetensors`; otherwise `pytorch_model.bin`, by `torch.save`.

        Raises:
            ImportError: safetensors is not installed.
            OSError: the file cannot be written; an existing one is as it was.
            CheckpointError: safetensors is asked for, and the state has more than tensors.
            RuntimeError: it is called in the middle of a round of virtual ranks, or a loop was left there.
        """
        self._states.check_round("save_model")
        self.world.comm.announce("save_model")
        meet(model)
        copy = on_host if self.world.rank == 0 else None
        state = model_state(user_module(model), self.world, copy)
        directory = Path(in_scratch(save_directory, self.world))
        name = "model.safetensors" if safe_serialization else "pytorch_model.bin"

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            write_state(state, directory / name, "safetensors" if safe_serialization else "torch", str(type(model)))

        agree_on(write, self.world)


def _add_hook(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
