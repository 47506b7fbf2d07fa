"""The methods of an Accelerator that save and load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.checkpoint.agreement import agree_on
from unisono.checkpoint.contents import Format, write_state
from unisono.checkpoint.folders import Location
from unisono.checkpoint.objects import user_module
from unisono.checkpoint.prepared_states import Hooks, PreparedStates
from unisono.checkpoint.saver import Loaded
from unisono.parallel.strategies.states import model_state, on_host
from unisono.timeline import SAVE
from unisono.world import World

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]

_FILES: dict[bool, tuple[str, Format]] = {
    True: ("model.safetensors", "safetensors"),
    False: ("pytorch_model.bin", "torch"),
}


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
            output_dir: the checkpoint's directory; None uses `project_dir/checkpoints/checkpoint_{n}`, numbered from 0,
                of which `total_limit` are kept.
            score: save only if it is higher than the score of the checkpoint at `output_dir`; rank zero's score counts.
                For a loss, pass `score=-loss`.
            is_async: return once everything is copied to main memory; a thread writes it. If that fails, all ranks
                raise the error in the same optimizer step, or in the next save or load; that step is not taken.
                `end_training()` raises it on the rank that has met it.

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
            return self._states.save(output_dir, score, is_async)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        must_exist: bool = True,
    ) -> Loaded | None:
        """Load what `save_state` has saved, on any number of ranks, under any strategy.

        Every rank must call it, with the same things prepared and registered, in the same order.

        Args:
            input_dir: a checkpoint, or a directory of numbered ones, of which the latest is used; None uses
                `project_dir/checkpoints`. Damaged ones are skipped with a warning.
            must_exist: whether a missing checkpoint is an error; if False, None is returned.

        Returns:
            What was loaded, with its step; None if there is no checkpoint and `must_exist` is False.

        Raises:
            NoCheckpointError, DamagedCheckpointError, CheckpointVersionError: there is no checkpoint that can be
                loaded.
            CheckpointMismatchError: the checkpoint holds other objects; nothing was changed.
        """
        return self._states.load(input_dir, must_exist)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Accelerate's `register_save_state_pre_hook`: "a function to be called in `Accelerator.save_state` before
        `save_checkpoint`", with the signature `hook(models, weights, output_dir)`. Every rank calls it.

        `models` are the prepared models; `weights` their states, as of `Accelerator.state_dict`. A model whose state
        rank zero removes from `weights` is not saved. Files that a hook writes into `output_dir`, a directory on its
        way to become the checkpoint, are part of the checkpoint.

        Returns:
            A handle, whose `remove()` takes the hook out again.
        """
        return _add_hook(self._states.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Accelerate's `register_load_state_pre_hook`: "a function to be called in `Accelerator.load_state` before
        `load_checkpoint`", with the signature `hook(models, input_dir)`. Every rank calls it, once the checkpoint was
        found and verified, and before anything is loaded.

        `models` are the prepared models; one that rank zero removes from the list is not loaded. `input_dir` is the
        checkpoint's directory; in a store, its address.

        Returns:
            A handle, whose `remove()` takes the hook out again.
        """
        return _add_hook(self._states.load_hooks, hook)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], *, safe_serialization: bool = True
    ) -> None:
        """Accelerate's `save_model`: "Save a model so that it can be re-loaded using load_checkpoint_in_model", for
        inference elsewhere; one file of any size. Every rank must call it, and it returns once the file is written.

        Args:
            model: "The model can be wrapped or unwrapped."
            save_directory: "Will be created if it doesn't exist."
            safe_serialization: write `model.safetensors`; otherwise `pytorch_model.bin`, by `torch.save`.

        Raises:
            ImportError: safetensors is not installed.
            OSError: the file cannot be written; an existing one is as it was.
            CheckpointError: safetensors is asked for, and the state has more than tensors.
        """
        self.world.comm.announce("save_model")
        copy = on_host if self.world.rank == 0 else None
        state, directory = model_state(user_module(model), self.world, copy), Path(save_directory)
        name, file_format = _FILES[safe_serialization]

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            write_state(state, directory / name, file_format, type(model).__name__)

        agree_on(write, self.world)


def _add_hook(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
