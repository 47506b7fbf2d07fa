"""One rank's part in saving and loading checkpoints: what all ranks agree on, what is copied, which rank writes it.

Rank zero writes one file, `state.pt`; if a large model, or its optimizer's state, is sharded, all ranks also write
their parts, each into a file of its own. The state of other ranks is gathered by the communicator.

Ownership: a `Saver` owns the host memory of its copies and the thread that writes them.

*Threads:* the rank's own, and one that writes. If several ranks share a process, each has a saver.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from unisono.checkpoint.background import HostMemory, host_view, start_save
from unisono.checkpoint.contents import Contents
from unisono.checkpoint.directory import SHARD, STATE, Manifest, Place, choose_place, commit
from unisono.checkpoint.folders import Checksum, Folder, Location, RemoteFolder, checksum_of, sync, write_file
from unisono.checkpoint.generators import generator_states, keep_device_generator, restore_generators
from unisono.checkpoint.objects import (
    Copy,
    Objects,
    are_divided,
    check_fit,
    divided_states,
    kept_states,
    kind_of,
    kinds_of,
    load_kept,
    meet,
    own_states,
    restore,
    user_module,
    whole_states,
)
from unisono.checkpoint.serialization import as_plain
from unisono.comm.operations import HOST
from unisono.comm.outcome import Outcome, add_note_once
from unisono.errors import CheckpointError, CheckpointMismatchError, NoCheckpointError
from unisono.launch.process_group import suppress_greetings
from unisono.loading.parallel_loader import DeviceLoader, ParallelLoader
from unisono.training.digests import record_checkpoint
from unisono.training.strategies.sharded import gather_aside
from unisono.training.strategies.states import broadcast_entries
from unisono.world import World

logger = logging.getLogger(__name__)

SMALL = 256 << 20  # bytes of parameters: up to this size rank zero writes everything


def agree_on(ask: Callable[[], Any], world: World) -> Any:
    """Call `ask` on rank zero, and return its result on all ranks; or raise its error on all of them. A collective."""
    outcome: Outcome[Any] = Outcome.capture(ask) if world.rank == 0 else Outcome()
    if outcome.error is not None and not isinstance(outcome.error, Exception):
        raise outcome.error
    found, failed = world.comm.broadcast_object((outcome.value, encode_error(outcome.error)))
    raise_any([failed], outcome.error)
    return found if world.rank else outcome.value


def encode_error(error: BaseException | None) -> bytes | None:
    """Encode an error for the other ranks, even if it cannot be pickled."""
    return None if error is None else Outcome.failure(error).to_bytes()


def raise_any(failed: Sequence[bytes | None], own: BaseException | None) -> None:
    """Raise, on all ranks, an error that one has reported; on that rank, the original error."""
    for each in filter(None, failed):
        Outcome.failure(own).unwrap() if own is not None else Outcome.from_bytes(each).unwrap()


def raise_together(own: BaseException | None, world: World) -> None:
    """Raise, on all ranks, the error of the first rank that has one. A collective."""
    raise_any(world.comm.all_gather_object(encode_error(own)), own)


class Loaded(NamedTuple):
    """What was loaded.

    Attributes:
        path: the path of the checkpoint.
        step: the training step, as counted when it was saved.
        world_size: the number of ranks that saved it.
        score: the score it was saved with; None without one.
    """

    path: Location
    step: int
    world_size: int
    score: float | None


class Restored(NamedTuple):
    """What was loaded, and the mark of its save; the facts of each rank; on rank zero the accumulated gradients of
    each, None between steps."""

    loaded: Loaded
    mark: str
    facts: Sequence[Any]
    held: Sequence[Mapping[str, torch.Tensor]] | None


_Copied = tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]
# What is to be written, in main memory: this rank's own state; on rank zero the contents of `state.pt`; if all ranks
# write concurrently, this rank's part.


class Saver:
    """Saves and loads the checkpoints of one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._memory = HostMemory()
        self._save: Future[None] | None = None  # the last asynchronous one
        self._gather: Callable[[Any], list[Any]] | None = None  # of the threads that write
        self._is_writing = False  # on some rank, perhaps; the same on all

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

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error on all ranks if it failed. A collective."""
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
        world.comm.announce(f"save_state at step {step}")
        self.wait()
        score = None if score is None else float(score)
        # The mark is a unique name, from which all ranks derive the path of their shards.
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
        """Gather what the models of each rank keep beside their parameters, on rank zero; None if they keep nothing. A
        collective if they do."""
        if not (own := kept_states(objects)):
            return None
        found = []
        for root in range(self.world.world_size):  # one by one: each may be as large as the model
            kept = self.world.comm.broadcast_object(own, root)
            found.append(kept if self.world.rank == 0 else None)
        return found

    def _load_kept(self, objects: Objects, kept: Sequence[Any] | None, is_of_all: bool, saved_by: int) -> None:
        """Load what the models of each rank have kept, which rank zero has. A collective."""
        world = self.world
        if is_of_all and saved_by == world.world_size:
            for rank in range(saved_by):
                found = world.comm.broadcast_object(None if kept is None else kept[rank])
                if rank == world.rank:
                    load_kept(objects, found)
        elif world.rank == 0:
            logger.warning(
                "saved by %d ranks, loaded by %d: what the comm_hook has kept on each of them, such as the errors of "
                "its rounding, is not loaded",
                saved_by,
                world.world_size,
            )

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

    # Loading.

    def say_resumed(self, loaded: Loaded, objects: Objects, lost: int | None = None) -> None:
        """Print on rank zero where the run continues, and how many steps are lost, if that is known."""
        if self.world.rank == 0:
            loaders = [each for each in objects.values() if isinstance(each, DeviceLoader | ParallelLoader)]
            epoch = f"epoch {loaders[0].epoch}, " if loaders else ""
            behind = "" if lost is None else f", {lost} step{'s' * (lost != 1)} lost"
            print(f"resumed from {loaded.path}: {epoch}step {loaded.step}{behind}", file=sys.stderr)

    def load(
        self,
        find: Callable[[], Contents],
        objects: Objects,
        must_exist: bool = True,
        choose: Callable[[str], Objects] | None = None,
        generates_alike: bool = True,
    ) -> Restored | None:
        """Load the objects from what rank zero finds. A collective. Raises as `Checkpointer.load`.

        Args:
            find: called on rank zero; raises as `read_contents`.
            objects: what is loaded, of all that was saved.
            must_exist: False: without a checkpoint, nothing is loaded.
            choose: called with the place of the files, if there are any; returns the objects to load.
            generates_alike: whether the random generators are those of the save from then on.
        """
        world = self.world
        world.comm.announce("load_state")
        self.wait()
        for each in objects.values():
            meet(each)  # so that nothing that is loaded counts as a step
        contents: Contents | None = None

        def read() -> tuple[Location, Manifest, Sequence[Any], bool] | None:
            nonlocal contents
            try:
                contents = find()
            except NoCheckpointError as error:
                if must_exist:
                    raise NoCheckpointError(f"{error}; to begin without one, pass must_exist=False") from error
                return None
            return contents.path, contents.manifest, contents.ranks, contents.kept is not None

        def check() -> dict[str, Any]:
            assert contents is not None
            if not objects and contents.kinds and choose is None:
                raise CheckpointMismatchError(
                    f"{contents.path} holds {', '.join(contents.kinds)}, and nothing here takes it; prepare or "
                    "register the objects first, and keep what prepare() returns, or the model or its optimizer"
                )
            check_fit(objects, contents.states, contents.kinds, str(contents.path))
            if generates_alike and (left := [name for name in contents.kinds if name not in objects]):
                logger.warning(
                    "%s also holds %s, which was not loaded; to continue that run, prepare or register as many objects "
                    "as it had before load_state",
                    contents.path,
                    ", ".join(left),
                )
            return {name: each for name, each in contents.states.items() if contents.kinds[name][0] == "state"}

        found = agree_on(read, world)
        if found is None:
            return None
        path, manifest, ranks, has_kept = found
        if choose is not None and manifest.directory:
            objects = choose(f"{path}/{manifest.directory}")
        others = agree_on(check, world)
        # On another number of ranks no saved rank corresponds to this one; all take rank zero's state.
        own = ranks[world.rank] if len(ranks) == world.world_size else ranks[0]
        restore(objects, contents.states if contents is not None else {}, others, own["states"], world)
        if has_kept:
            kept = None if contents is None else contents.kept
            self._load_kept(objects, kept, len(ranks) == manifest.world_size, manifest.world_size)
        # After everything that may draw random numbers or run a graph.
        if generates_alike:
            restore_generators([each["generators"] for each in ranks], manifest.world_size, world)
        loaded = Loaded(path, manifest.step, manifest.world_size, manifest.score)
        held = contents.held if contents is not None else None
        return Restored(loaded, manifest.directory, [each["extra"] for each in ranks], held)
