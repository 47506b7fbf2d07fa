"""An early stop on which all ranks agree: one of them is asked, and all of them come to it after the same step."""

from __future__ import annotations

import torch

from unisono import preemption
from unisono.comm.operations import HOST
from unisono.timeline import REDUCE
from unisono.world import World, current_world


class _Stop:
    """Whether a rank has agreed with the others to stop."""

    is_agreed = False


def should_stop(*, world: World | None = None) -> bool:
    """Whether the ranks are to stop here, because SIGTERM has come to one of them since the first call; on all alike.

    Every rank calls it at the same place, after a step, say::

        should_stop()  # from here on SIGTERM is heeded, and loader workers ignore it
        for step, (images, labels) in enumerate(loader):
            ...
            if should_stop():
                save(model, optimizer, loader)
                break

    From the first call on, SIGTERM no longer ends this process, which is then expected to ask again and again, and
    loader workers that are started later ignore the signal, so that the loop continues until it has saved. (One that
    runs before the first call would be ended: ask once before the loop. Those of a DataLoader whose
    `multiprocessing_context` is not "fork" are not shielded.) Schedulers send SIGKILL some time after SIGTERM: a step
    and a checkpoint must fit in between.

    It costs a reduction of one number, for which ranks wait for one another, and not for their devices; where steps
    are short, ask at every tenth, on all ranks at the same ones. Once it is True it stays True in this world, and costs
    nothing.

    In threads (`DataParallel`), all replicas stop when the process is asked; the first call must come from the main
    thread, before the replicas start.

    Args:
        world: None takes the current one.

    Raises:
        UnisonoError: this is the process's first call, and not in the main thread.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    preemption.heed()
    stop = world.state.part(_Stop)
    if stop.is_agreed:
        return True
    with world.timeline.loop().span(REDUCE):
        asked = torch.tensor(int(preemption.is_requested()), dtype=torch.int32, device=HOST)
        stop.is_agreed = bool(world.comm.all_reduce(asked, "max").item())
    if stop.is_agreed:
        preemption.agree()
    return stop.is_agreed
