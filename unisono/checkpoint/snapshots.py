"""Snapshots: what `save_state` saves, copied between two steps into memory that outlives the workers. A group that is
restarted continues from the newest one, unless a checkpoint is more than `every` steps newer.

Where a run continues is known at one place only: where the loop that trains draws its next batch, or ends. The lines
that belong to the batch before have run by then, and `load_state` brings the loop back to this place. So of the loops
that are open in the first step, the one that drew first is the one whose draws are watched from then on.

State that all ranks have is divided among the ranks of a machine, so that each machine has all of it; or among all
ranks, as soon as other state is: then each machine also has a copy of the parts of the one before. A snapshot needs no
collective: between two there is one, that of a step; between two epochs, where there is none, the ranks meet. So when a
rank overwrites its last but one, all have the last.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pickle import PicklingError
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize, ref

import torch
from torch import nn

from unisono.batches.deliveries import Loop
from unisono.checkpoint.contents import Contents
from unisono.checkpoint.generators import generator_states, keep_device_generator
from unisono.checkpoint.objects import (
    Objects,
    are_divided,
    divided_states,
    is_spread,
    kept_states,
    kind_of,
    kinds_of,
    own_states,
    user_module,
)
from unisono.checkpoint.serialization import as_plain
from unisono.checkpoint.snapshot_contents import contents_of, packed
from unisono.checkpoint.snapshot_memory import SLOTS, Content, SlotWriter, find_parts, free_others, open_memory, size_of
from unisono.checkpoint.snapshot_neighbours import Neighbours
from unisono.checkpoint.snapshot_search import gather_snapshot
from unisono.errors import CheckpointError
from unisono.launch.messages import say_once
from unisono.launch.watching.memory import memory_left
from unisono.report.timeline import SAVE
from unisono.training.steps import Steps
from unisono.training.strategies.states import plain_name

logger = logging.getLogger(__name__)


class Home(NamedTuple):
    """Where the script looks for what it continues from: the place, the number of checkpoints to keep there, and
    whether it is the Accelerator's, where the launcher may save one if the run fails."""

    place: str
    limit: int | None
    is_numbered: bool


class Described(NamedTuple):
    """What a checkpoint would hold now: the objects, the facts of this rank, the optimizer steps taken; and the home of
    the script, None if it looks for nothing."""

    objects: Objects
    facts: Mapping[str, Any]
    step: int
    home: Home | None


class _Keeper:
    """Whether an Accelerator of this rank has kept snapshots."""

    def __init__(self) -> None:
        self.has_kept = False


class Snapshots:
    """The snapshots of one rank.

    Args:
        every: the number of optimizer steps from one to the next.
        kept: how many are kept for `before`.
        count: returns the number of steps taken.
        describe: returns what to copy.
    """

    def __init__(
        self, steps: Steps, every: int, kept: int, count: Callable[[], int], describe: Callable[[], Described]
    ) -> None:
        self._slots = kept + 1
        if self._slots + 1 > SLOTS:  # one more with copies on the next machine
            raise ValueError(f"snapshots={kept} are too many for the memory's slots; pass at most {SLOTS - 2}")
        self._steps, self.every, self._kept, self._count, self._describe = steps, every, kept, count, describe
        self._world = world = steps.world
        self._file, self._attempt = open_memory(world), world.state.groups_before
        self._writer = self._write_into()
        self._thread = threading.get_ident()
        self._number = 0
        self._ranks: range | None = None
        self._neighbours: Neighbours | None = None
        self._has_loaded = self._attempt == 0
        self._restart(0)
        finalize(self, os.close, self._file)
        keeper, other = world.state.part(_Keeper), world.state.deliveries.at_draw
        is_alive = other is not None and other() is not None
        if is_alive or (keeper.has_kept and world.state.held_memory):
            raise ValueError(
                f"snapshot_every={every}: another Accelerator of this rank keeps snapshots, or has kept some, and a "
                "restarted script could not know which to load; prepare everything with one Accelerator, call spawn() "
                "once for each run, or pass snapshot_every to one of them"
            )
        keeper.has_kept = True
        world.state.deliveries.at_draw = WeakMethod(self._at_draw)
        world.timeline.at_step = partial(_look_at_step, ref(self), world.timeline.at_step)

    def _restart(self, step: int) -> None:
        self._step = step  # of the last snapshot, or where the run begins
        self._drawn: list[tuple[Loop, ref[Any]]] = []  # with gradients, in the order of their first batches
        self._leader: ref[Any] | None = None  # the loader whose draws are watched
        self._loop: Loop | None = None  # the last one over it
        self._iterator: Callable[[], Any] = lambda: None
        self._epoch = 0  # of the last batch that was drawn from it

    @property
    def has_not_begun(self) -> bool:
        """Whether no step was taken in this attempt since a state was loaded."""
        return not self._number and self._count() == self._step

    def note_load(self, step: int) -> None:
        """A state was loaded: the run continues after that step."""
        self._has_loaded = True
        self._restart(step)

    # Loading. Both are collectives if there are several machines, and return the contents on rank zero only.

    def newest(self, place: str) -> Contents | None:
        """What the attempts before this one left last, for a script that looks there; None if there is nothing."""
        taken = gather_snapshot(self._file, range(self._attempt), self._world)
        homes = [content.rest["home"] for _, content in taken or () if content.rest.get("home") is not None]
        return None if not taken or any(each.place != place for each in homes) else contents_of(taken)

    def before(self, step: int) -> Callable[[], Contents]:
        """A function that returns, on rank zero, the last snapshot of this attempt at or before that step;
        CheckpointError if there is none."""
        self._wait_for_copies()
        taken = gather_snapshot(self._file, range(self._attempt, self._attempt + 1), self._world, step)
        if taken is None:
            more = f"Accelerator(snapshots={self._kept + 1}) keeps more than the last {self._kept}"
            raise CheckpointError(
                f"there is no snapshot of step {max(step, 0)}, or before it: the first is taken after the first step, "
                f"and {more}"
            )

        def find() -> Contents:
            if any(content.rest.get("epoch", self._epoch) != self._epoch for _, content in taken):
                raise CheckpointError(
                    "rewind() goes back within an epoch only, and the snapshot before this one was taken in the epoch "
                    "before: lines after that loop, such as a scheduler's step, would be undone and not run again"
                )
            return contents_of(taken)

        return find

    def check_rewind(self, skips: bool) -> None:
        """Check that the ranks can go back now, before they do."""
        loops = self._world.state.deliveries.open_loops()
        if self._loop is None or not self._loop.is_open:
            raise RuntimeError("rewind() was called outside of the loop that trains; call it in the body of that loop")
        if not skips and any(each.is_trained and each is not self._loop for each in loops):
            raise RuntimeError(
                "rewind(skip=False) draws again what one loop has drawn, and several are open, as with zip(); pass "
                "skip=True, or give the model one loader"
            )

    def note_rewind(self, step: int, skips: bool) -> None:
        """The ranks have gone back to the snapshot of that step. Those after it are dropped. If the loop does not skip
        what it has drawn since, it draws that again."""
        self._number = self._writer.drop_after(step) + 1
        if self._neighbours is not None:
            self._neighbours.drop_after(step)
        self._step = step
        if not skips:
            self._iterator().go_back()

    # Taking.

    def _at_draw(self, loop: Loop, iterator: Any) -> None:
        """A loop is about to draw a batch, or to end."""
        if not torch.is_grad_enabled():
            return
        if threading.get_ident() != self._thread:
            say_once("no snapshot is taken: one thread draws the batches, and another takes the steps")
            return
        step, is_first, loader = self._count(), loop.num_batches == 0, iterator.loader
        if self._leader is None:
            if is_first:
                self._drawn.append((loop, ref(loader)))
            if step == self._step:
                return
            self._leader = next((of for each, of in self._drawn if each.is_open), ref(loader))
            self._drawn.clear()
        if loader is not self._leader():
            self._look_at_other(loop, step)
            return
        before, self._loop, self._iterator = self._loop, loop, ref(iterator)
        epoch_before, self._epoch = self._epoch, iterator.epoch
        # It is not known whether the lines after a loop that was left have run.
        is_behind_epoch = is_first and before is not None and before.is_exhausted
        is_due = is_behind_epoch or (not is_first and step - self._step >= self.every)
        if not is_due or not self._steps.begins_step():
            return
        if loop.lags:
            raise RuntimeError(
                f"snapshot_every={self.every}: a loop draws batches before the steps on those that it has drawn, "
                "which a snapshot would leave out; draw each batch after optimizer.step(), or leave out snapshot_every"
            )
        with self._world.timeline.loop().named(SAVE), self._world.state.deliveries.evaluations.aside():
            self._check_place(iterator, epoch_before + 1 if is_behind_epoch else self._epoch)
            if is_behind_epoch:  # no step has kept the ranks together since the last snapshot, which all are to have
                self._world.comm.barrier()
            self.take()

    def _check_place(self, iterator: Any, epoch: int) -> None:
        """Check that the state of the loader is that of this loop, in that epoch."""
        if iterator.loader.state_dict() != iterator.state_dict() or self._epoch != epoch:
            raise RuntimeError(
                f"snapshot_every={self.every}: a second loop over the training loader counts as an epoch of it, so the "
                "place of the training loop is lost; prepare a second loader, over the same dataset, for the other loop"
            )

    def _look_at_other(self, loop: Loop, step: int) -> None:
        """Say, once, that a loop trains whose place in the script is unknown."""
        is_behind = step - self._step >= 4 * self.every
        if is_behind and loop.last is not None and loop.last.is_used and self._world.rank == 0:
            say_once(
                "no snapshot is taken in this loop: its loader is not the first step's, so a restart could not "
                "find its place; a kill here costs all its steps, or those since your last save_state()"
            )

    def look_at_step(self) -> None:
        """Say, once, that steps are taken without a loop whose draws could be watched."""
        is_behind = self._leader is None and self._count() - self._step >= 4 * self.every
        if is_behind and self._world.rank == 0 and not self._world.state.deliveries.recent():
            say_once(
                "no snapshot is taken: the batches come from no prepared loader, so a restart could not find its place "
                "in the loop; prepare the loader, or save now and then by save_state(is_async=True)"
            )

    def take(self) -> None:
        """Copy the state of this rank, as it is now."""
        world, (objects, facts, step, home) = self._world, self._describe()
        generators = generator_states(world)
        if self._ranks is None:
            self._ranks = self._ranks_with_all(objects)
            if len(self._ranks) > world.local_world_size and self._are_machines_alike():
                self._slots += 1
                self._writer = self._write_into()
                self._neighbours = Neighbours(world, self._writer, self._write_into(are_guests=True))
        place = self._ranks.index(world.rank), len(self._ranks)
        parts = divided_states(objects, partial(_own_share, *place), self._ranks)
        # On every rank: it may be a collective.
        others = {name: each.state_dict() for name, each in objects.items() if kind_of(name, each) == "state"}
        if self._number == 0:
            _check_plain({**parts, **others})
        own = {"states": own_states(objects), "generators": generators, "extra": facts}
        rest = {
            "kinds": kinds_of(objects),
            "own": own,
            "kept": kept_states(objects),
            "home": home,
            "epoch": self._epoch,
        }
        content = packed(parts, {**rest, "others": {} if place[0] else others})
        if self._number == 0:
            self._check_first(content, objects)
        self._wait_for_copies()
        if self._number == 1 + bool(self._neighbours) and world.local_rank == 0:
            free_others(self._file, self._attempt)  # all ranks have the first of this attempt, and the copies of it
        try:
            self._writer.write(self._number, step, world.rank, world.world_size, content, needed=place[1])
        except (AttributeError, TypeError, PicklingError):
            _check_plain({**parts, **others})  # which one it is
            raise
        if self._neighbours is not None:
            self._neighbours.send(self._number)
        keep_device_generator(generators, world)
        self._number, self._step = self._number + 1, step

    def _write_into(self, are_guests: bool = False) -> SlotWriter:
        return SlotWriter(self._file, self._attempt, self._world.local_rank, self._slots, are_guests)

    def _wait_for_copies(self) -> None:
        if self._neighbours is not None:
            self._neighbours.wait()

    def _are_machines_alike(self) -> bool:
        """Whether each rank has one with its number on the next machine. A collective."""
        counts = self._world.comm.all_gather_object(self._world.local_world_size)
        if len({*counts}) > 1 and self._world.rank == 0:
            logger.warning(
                "machines have different numbers of ranks (%s), so none keeps a copy of another's snapshots: if one is "
                "lost, the newest checkpoint on disk is taken",
                ", ".join(map(str, sorted({*counts}))),
            )
        return len({*counts}) == 1

    def _ranks_with_all(self, objects: Objects) -> range:
        """The ranks whose parts are the whole state: those of this machine, if each machine has all of it."""
        world, first = self._world, self._world.rank - self._world.local_rank
        here = range(first, first + world.local_world_size)
        if len(here) == world.world_size or not are_divided(objects):
            return here
        return range(world.world_size) if any(world.comm.all_gather_object(is_spread(objects, here))) else here

    def _check_first(self, content: Content, objects: Objects) -> None:
        """Check that the run did not start over, that the snapshot has the place of the loop, and that memory is left
        for all of them."""
        world = self._world
        if self._leader is not None and not any(each is self._leader() for each in objects.values()):
            raise ValueError(
                f"snapshot_every={self.every}: a snapshot cannot record the place in a loader that was not prepared; "
                "prepare it by this Accelerator"
            )
        before = find_parts(self._file, range(self._attempt))
        if not self._has_loaded and any(
            len(parts) >= min(parts[0].snapshot.needed, world.local_world_size) for parts in before
        ):
            raise RuntimeError(
                "this run was restarted, and has started over, although a snapshot is there; call "
                "accelerator.load_state(must_exist=False) before the first step, which continues from it"
            )
        copies = self._slots * (1 if self._neighbours is None else 2)
        needed = size_of(content) * copies * world.local_world_size
        used = os.fstat(self._file).st_blocks * 512  # by attempts before this one, which is given back
        if needed > (left := memory_left() + used):
            raise MemoryError(
                f"snapshot_every={self.every} needs {needed / 2**20:,.0f} MiB of main memory on this machine, for "
                f"{copies} copies of the state, and {left / 2**20:,.0f} MiB are left; leave it out, and call "
                "save_state(is_async=True) now and then"
            )
        if world.rank == 0:
            when = "after each step" if self.every == 1 else f"every {self.every} steps"
            size = f"{needed / 2**20:,.1f} MiB"
            print(f"snapshots: {when}, in {size} of each machine's memory", file=sys.stderr)


def _look_at_step(
    snapshots: ref[Snapshots], before: Callable[[int, int | None], None] | None, number: int, done: int | None
) -> None:
    """What the timeline calls after a step; calls what the timeline called before, too."""
    if before is not None:
        before(number, done)
    if (own := snapshots()) is not None:
        own.look_at_step()


def _check_plain(states: Mapping[str, Any]) -> None:
    """TypeError if one of them is not plain data; the message says which."""
    for name, each in states.items():
        as_plain(each, f"{name}.state_dict()", lambda tensor: tensor)


def _own_share(rank: int, ranks: int, each: Any, whole: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """One rank's share of what all ranks have alike: parameters, and their states. Buffers may differ."""
    if ranks == 1:
        return whole
    module = user_module(each) if isinstance(each, nn.Module) else None
    buffers = () if module is None else {plain_name(module, name) for name, _ in module.named_buffers()}
    alike = {key: one.nbytes for key, one in whole.items() if isinstance(one, torch.Tensor) and key not in buffers}
    total, at, kept = sum(alike.values()) or 1, 0, {}
    for key, value in whole.items():
        if (at * ranks // total if key in alike else 0) == rank:
            kept[key] = value
        at += alike.get(key, 0)
    return kept
