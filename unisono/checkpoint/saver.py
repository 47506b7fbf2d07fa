"""One rank's part in saving checkpoints: what all ranks agree on, what is copied, which rank writes it.

Rank zero writes one file, `state.pt`; if a large model, or its optimizer's state, is sharded, all ranks also write
their parts, each into its own file. The state of other ranks is gathered by the communicator.

Ownership: a `Saver` owns the host memory of its copies and the thread that writes them.

*Threads:* the rank's own, and one that writes. If several ranks share a process, each has a saver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from unisono.checkpoint.agreement import agree_on, encode_error, raise_any, raise_together
from unisono.checkpoint.background import HostMemory, host_view, start_save
from unisono.checkpoint.directory import SHARD, STATE, Manifest, Place, choose_place, commit
from unisono.checkpoint.folders import Checksum, Folder, Location, RemoteFolder, checksum_of, sync, write_file
from unisono.checkpoint.generators import generator_states, keep_device_generator
from unisono.checkpoint.objects import (
    Copy,
    Objects,
    are_divided,
    divided_states,
    kept_states,
    kind_of,
    kinds_of,
    meet,
    own_states,
    user_module,
    whole_states,
)
from unisono.checkpoint.serialization import as_plain
from unisono.comm.operations import HOST
from unisono.comm.outcome import Outcome, add_note_once
from unisono.errors import CheckpointError
from unisono.launch.process_group import suppress_greetings
from unisono.training.digests import record_checkpoint
from unisono.training.strategies.sharded import gather_aside
from unisono.training.strategies.states import broadcast_entries
from unisono.world import World

logger = logging.getLogger(__name__)

SMALL = 256 << 20  # bytes of parameters: up to this size rank zero writes everything


_Copied = tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]
# What is to be written, in main memory: this rank's own state; on rank zero the contents of `state.pt`; if all ranks
# write concurrently, this rank's part.


class Saver:
    """Saves the checkpoints of one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._memory = HostMemory()
        self._save: Future[None] | None = None  # the last asynchronous one
        self._gather: Callable[[Any], list[Any]] | None = None  # of the threads that write
        self._is_writing = False  # perhaps on some rank; the same on all

    # Saves in progress.

    def poll(self) -> None:
        """Raise the error of a save that has failed meanwhile, on all ranks; do not wait for one in progress. A
        collective until the save has ended on all of them, and nothing from then on."""
        if self._is_writing:
            self.world.comm.announce("a step during a save")
            is_done = self._save is None or self._save.done()
            failure = self._save.exception() if self._save is not None and is_done else None
            own = torch.tensor([not is_done, failure is not None], dtype=torch.int32, device=HOST)
            is_writing, has_failed = self.world.comm.all_reduce(own, "max").tolist()
            self._is_writing = bool(is_writing or has_failed)
            if has_failed:
                self._save = None if is_done else self._save
                raise_together(failure, self.world)

    def wait(self, purpose: str) -> None:
        """Announce the purpose; wait for the save in progress, and raise its error on all ranks if it failed. A
        collective."""
        self.world.comm.announce(purpose)
        raise_together(self._end_save(), self.world)

    def close(self) -> None:
        """Wait for the save in progress, and raise its error if it failed on this rank; release the host memory."""
        failure = self._end_save()
        self._memory = HostMemory()
        if failure is not None:
            raise failure

    def _end_save(self) -> BaseException | None:
        """Wait for the save in progress; returns its error."""
        failure = None if self._save is None else self._save.exception()
        self._save, self._is_writing = None, False
        return failure

    # Saving.

    def save(
        self,
        place: Place | Callable[[], Place],
        objects: Objects,
        step: int,
        score: float | None = None,
        is_async: bool = False,
        facts: Any = None,
        held: Mapping[str, torch.Tensor] | None = None,
        choose: Callable[[Path], Objects] | None = None,
    ) -> Location | None:
        """Save the objects, and the `facts` and `held` gradients of this rank; returns and raises as
        `Checkpointer.save`, on all ranks. A collective. Rank zero calls `place`, if it is a function. All call `choose`
        with a directory, rank zero's, whose files become part of the checkpoint; it returns the objects to save."""
        world = self.world
        self.wait(f"save_state at step {step}")
        score = None if score is None else float(score)
        # The mark is a unique name: all ranks derive the path of their shards from it.
        chosen: Place | None
        chosen, mark = agree_on(lambda: (choose_place(place, score), f"save-{uuid4().hex[:12]}"), world)
        if chosen is None:
            return None
        for each in objects.values():
            meet(each, saves=True)
        try:
            if choose is not None:
                objects = choose(agree_on(partial(chosen.folder.draft, mark), world))
            # The previous save, which was waited for above, no longer reads this memory.
            self._memory.restart()
            copy = self._memory.copy if is_async else host_view
            is_shared = not isinstance(chosen.folder, RemoteFolder)  # whether all ranks can write to it
            # Captured: a rank that raised here would leave the others waiting in `_agreed_copy`.
            outcome = Outcome.capture(self._copy_states, objects, facts, held, copy, is_shared)
            # The copies are only submitted so far, and the writer reads host memory without waiting for the device.
            world.backend.synchronize(world.device)
            contents, part = self._agreed_copy(outcome)
        except BaseException:
            if world.rank == 0 and choose is not None:
                chosen.folder.discard(mark)
            raise
        manifest = Manifest(step, score, world.world_size, kinds_of(objects))
        write = partial(self._write_checkpoint, chosen, contents, part, manifest, mark)
        if not is_async:
            raise_together(Outcome.capture(write).error, world)
        else:
            self._is_writing = True
            if contents is not None or part is not None:
                self._save = start_save(write, f"saving {chosen.folder} at step {step}")
        return chosen.folder.location

    def _copy_states(
        self, objects: Objects, facts: Any, held: Mapping[str, torch.Tensor] | None, copy: Copy, is_shared: bool
    ) -> _Copied:
        """Copy what is to be written to main memory."""
        world = self.world
        part = {"states": own_states(objects), "generators": generator_states(world), "extra": facts}
        own: dict[str, Any] = as_plain(part, f"the state of rank {world.rank}", torch.Tensor.cpu)
        contents: dict[str, Any] = {"kinds": kinds_of(objects), "held": None, "is_divided": False}
        contents["kept"] = self._gather_kept(objects)
        if is_shared and self._is_divided(objects):
            # Created at the first use, by all ranks together: `new_group` is a collective.
            if self._gather is None:
                with suppress_greetings():
                    self._gather = gather_aside(world.world_size)
            states = {
                name: as_plain(part, f"{name}.state_dict()", copy)
                for name, part in divided_states(objects, lambda _, whole: whole if world.rank == 0 else {}).items()
            }
            rest = {name: each for name, each in objects.items() if name not in states}
            contents |= {"states": whole_states(rest, world, copy), "is_divided": True}
            held = {name: copy(each) for name, each in (held or {}).items()}
            return own, contents, {"states": states, "held": held}
        if held is not None:
            contents["held"] = self._gather_held(held, copy)
        contents["states"] = whole_states(objects, world, copy)
        return own, contents, None

    def _gather_held(self, held: Mapping[str, torch.Tensor], copy: Copy) -> list[dict[str, torch.Tensor]]:
        """Gather the gradients accumulated on each rank, on rank zero. A collective."""
        world, found = self.world, []
        for root in range(world.world_size):
            entries = broadcast_entries(held, world, root) if world.world_size > 1 else held.items()
            # Every rank iterates, since each entry is a broadcast; only rank zero keeps copies.
            found.append({name: copy(each) for name, each in entries if world.rank == 0})
        return found

    def _gather_kept(self, objects: Objects) -> list[Any] | None:
        """Gather what the models of each rank keep besides their parameters, on rank zero; None if they keep nothing. A
        collective if they do."""
        if not (own := kept_states(objects)):
            return None
        found = []
        for root in range(self.world.world_size):  # one by one: each may be as large as the model
            kept = self.world.comm.broadcast_object(own, root)
            found.append(kept if self.world.rank == 0 else None)
        return found

    def _is_divided(self, objects: Objects) -> bool:
        """Whether ranks write their shards concurrently. The same on all ranks."""
        if not are_divided(objects) or not self.world.takes_engines:
            return False
        modules = [user_module(each) for name, each in objects.items() if kind_of(name, each) == "model"]
        return sum(each.numel() * each.element_size() for module in modules for each in module.parameters()) > SMALL

    def _agreed_copy(self, outcome: Outcome[_Copied]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The contents of `state.pt`, on rank zero, and this rank's part; raises on all ranks if one could not copy."""
        own = outcome.value and outcome.value[0]
        found = self.world.comm.all_gather_object((encode_error(outcome.error), own))
        raise_any([failed for failed, _ in found], outcome.error)
        own, contents, part = outcome.unwrap()
        keep_device_generator(own["generators"], self.world)
        contents["ranks"] = [each for _, each in found]
        return (contents if self.world.rank == 0 else None), part

    def _write_checkpoint(
        self, place: Place, contents: dict[str, Any] | None, part: dict[str, Any] | None, manifest: Manifest, mark: str
    ) -> None:
        """Do this rank's part of the writing; on rank zero, make the checkpoint."""
        write = partial(self._write_files, place.folder, contents, part, mark)
        try:
            if contents is None:
                write()
            else:
                commit(place, write, manifest, mark)
                self.world.timeline.last_saved = str(place.folder.location)
                record_checkpoint(self.world, "saved", place.folder.location, mark, contents["ranks"][0]["extra"])
        except OSError as error:  # its own message names no path if the disk is full
            add_note_once(error, f"while writing {place.folder}; the checkpoint before it is as it was")
            raise

    def _write_files(
        self, folder: Folder, contents: dict[str, Any] | None, part: dict[str, Any] | None, mark: str
    ) -> dict[str, Checksum]:
        """Write this rank's files; returns the checksums of all on rank zero."""
        files: dict[str, Checksum] = {}
        if part is not None and self._gather is not None:
            # All ranks meet here, whatever happens to one: in the threads that write, so in a group of their own.
            outcome = Outcome.capture(lambda: write_file(folder.draft(mark) / SHARD.format(self.world.rank), part))
            found = self._gather((encode_error(outcome.error), outcome.value))
            raise_any([failed for failed, _ in found], outcome.error)
            files = {SHARD.format(rank): checksum for rank, (_, checksum) in enumerate(found)}
        if contents is None:
            return files
        directory = folder.draft(mark)
        if lost := [name for name in files if not (directory / name).exists()]:
            raise CheckpointError(
                f"another machine has written {lost[0]}, which is not in {directory} here; pass a directory on a file "
                "system that all machines share, or a URL"
            )
        for path in sorted(directory.rglob("*")):  # parts, and files of hooks
            sync(path)
            if path.is_file() and (name := path.relative_to(directory).as_posix()) not in files:
                files[name] = checksum_of(path)
        files[STATE] = write_file(directory / STATE, contents)
        return files
