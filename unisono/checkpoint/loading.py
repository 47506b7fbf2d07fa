"""One rank's part in loading a checkpoint, which rank zero reads.

*Threads:* the rank's own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.checkpoint.agreement import agree_on
from unisono.checkpoint.contents import Contents
from unisono.checkpoint.directory import Manifest
from unisono.checkpoint.folders import Location
from unisono.checkpoint.generators import restore_generators
from unisono.checkpoint.objects import Objects, check_fit, load_kept, meet, restore
from unisono.errors import CheckpointMismatchError, DamagedCheckpointError, NoCheckpointError
from unisono.loading.loader_options import Dealt
from unisono.world import World

logger = logging.getLogger(__name__)


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


def load_checkpoint(
    world: World,
    find: Callable[[], Contents],
    objects: Objects,
    must_exist: bool = True,
    choose: Callable[[str], Objects] | None = None,
    generates_alike: bool = True,
) -> Restored | None:
    """Load the objects from what rank zero finds, once no save is in progress. A collective. Raises as
    `Checkpointer.load`.

    Args:
        find: called on rank zero; raises as `read_contents`.
        objects: what is loaded, of all that was saved.
        must_exist: False: without a checkpoint, nothing is loaded.
        choose: called with the place of the files, if there are any; returns the objects to load.
        generates_alike: whether the random generators are those of the save from then on.
    """
    for each in objects.values():
        meet(each)  # so that nothing that is loaded counts as a step
    contents: Contents | None = None  # on rank zero

    def read() -> tuple[Location, Manifest, Sequence[Any], bool] | None:
        nonlocal contents
        contents = _find(find, must_exist)
        if contents is None:
            return None
        return contents.path, contents.manifest, contents.ranks, contents.kept is not None

    found = agree_on(read, world)
    if found is None:
        return None
    path, manifest, ranks, has_kept = found
    can_choose = choose is not None
    if choose is not None and manifest.directory:
        objects = choose(f"{path}/{manifest.directory}")
    others = agree_on(lambda: _checked_states(contents, objects, can_choose, generates_alike), world)
    # On another number of ranks no saved rank corresponds to this one; all take rank zero's state.
    own = ranks[world.rank] if len(ranks) == world.world_size else ranks[0]
    restore(objects, contents.states if contents else {}, others, own["states"], world)
    if has_kept:
        is_of_all = len(ranks) == manifest.world_size == world.world_size
        _load_kept(objects, contents.kept if contents else None, is_of_all, manifest.world_size, world)
    # After everything that may draw random numbers or run a graph.
    if generates_alike:
        restore_generators([each["generators"] for each in ranks], manifest.world_size, world)
    loaded = Loaded(path, manifest.step, manifest.world_size, manifest.score)
    held = contents.held if contents else None
    return Restored(loaded, manifest.directory, [each["extra"] for each in ranks], held)


def _find(find: Callable[[], Contents], must_exist: bool) -> Contents | None:
    try:
        return find()
    except NoCheckpointError as error:
        if must_exist:
            raise NoCheckpointError(f"{error}; to begin without one, pass must_exist=False") from None
        return None
    except DamagedCheckpointError as error:  # must_exist=False does not start afresh: the run's progress would be lost
        raise DamagedCheckpointError(
            f"{error}; load another checkpoint, or a copy; to begin without one, move it away, and pass "
            "must_exist=False"
        ) from None


def _checked_states(
    contents: Contents | None, objects: Objects, can_choose: bool, generates_alike: bool
) -> dict[str, Any]:
    """The states that all ranks take, once the checkpoint is known to fit the objects."""
    assert contents is not None
    if not objects and contents.kinds and not can_choose:
        raise CheckpointMismatchError(
            f"{contents.path} holds {', '.join(contents.kinds)}, and nothing here takes it; prepare or register the "
            "objects first, and keep what prepare() returns, or the model or its optimizer"
        )
    check_fit(objects, contents.states, contents.kinds, str(contents.path))
    if generates_alike and (left := [name for name in contents.kinds if name not in objects]):
        logger.warning(
            "%s also holds %s, which was not loaded; to continue that run, prepare or register as many objects as it "
            "had before load_state",
            contents.path,
            ", ".join(left),
        )
    return {name: each for name, each in contents.states.items() if contents.kinds[name][0] == "state"}


def _load_kept(
    objects: Objects, kept: Sequence[Mapping[str, Any]] | None, is_of_all: bool, saved_by: int, world: World
) -> None:
    """Load what each rank's models have kept, which rank zero has. A collective."""
    if is_of_all:
        for rank in range(saved_by):
            found = world.comm.broadcast_object(None if kept is None else kept[rank])
            if rank == world.rank:
                load_kept(objects, found)
    elif world.rank == 0:
        logger.warning(
            "saved by %d ranks, loaded by %d: what the comm_hook has kept on each of them, such as the errors of its "
            "rounding, is not loaded",
            saved_by,
            world.world_size,
        )


def say_resumed(loaded: Loaded, objects: Objects, world: World, lost: int | None = None) -> None:
    """Print on rank zero where the run continues, and how many steps are lost, if known."""
    if world.rank == 0:
        loaders = [each for each in objects.values() if isinstance(each, Dealt)]
        epoch = f"epoch {loaders[0].epoch}, " if loaders else ""
        behind = "" if lost is None else f", {lost} step{'s' * (lost != 1)} lost"
        print(f"resumed from {loaded.path}: {epoch}step {loaded.step}{behind}", file=sys.stderr)
