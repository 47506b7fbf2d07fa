"""An early stop that all ranks agree on: one of them gets the request, and all of them stop after the same step."""

from __future__ import annotations

import torch

from unisono.comm import preemption
from unisono.comm.operations import HOST
from unisono.errors import UnisonoError
from unisono.report.timeline import REDUCE
from unisono.training.collectives import refuse_within_round
from unisono.world import World, current_world, warning_signals


class _Stop:
    """Whether a rank has agreed with the others to stop."""

    is_agreed = False


def should_stop(asked: bool | None = None, *, world: World | None = None) -> bool:
    """Return whether to stop here, because a rank has received SIGTERM or Ctrl-C since the first call; the same on
    all ranks.

    Every rank calls it at the same place, for example after a step::

        should_stop()  # from here on SIGTERM is a request, and loader workers ignore it
        for step, (images, labels) in enumerate(loader):
            ...
            if should_stop():
                save(model, optimizer, loader)
                break

    From the first call on, SIGTERM and the first Ctrl-C no longer end this process, which must then call this
    regularly; the second Ctrl-C does (KeyboardInterrupt). Loader workers
    started later ignore the signal, so that the loop continues until it has saved. (Those already running before the
    first call would be ended, so call it once before the loop. Those of a DataLoader whose `multiprocessing_context` is
    not "fork" are not shielded.) Schedulers send SIGKILL some time after SIGTERM: a step and a checkpoint must fit in
    between. In a task of submitit, its warning is such a request, too (docs/several_machines.md, "submitit").

    It costs a reduction of one number: ranks wait for each other, but not for their devices. If steps are short, call
    it after every tenth, at the same steps on all ranks. Once it is True it stays True in this world, and costs
    nothing.

    In threads (`DataParallel`), all replicas stop when the process receives the signal; `DataParallel` must be called
    in the main thread, or `should_stop` once before, since only that can handle signals.

    Args:
        asked: whether this rank was asked to stop in another way, such as by the notice of a cloud or of an engine that
            runs this function in a thread; SIGTERM counts, too, where it can be handled.
        world: None uses the current one.

    Raises:
        UnisonoError: this is the process's first call, the main thread has no part in it, and `asked` is not given.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    refuse_within_round("should_stop", world)
    try:
        preemption.handle(warning_signals())
    except UnisonoError:
        if asked is None:
            raise
    stop = world.state.part(_Stop)
    if stop.is_agreed:
        # All ranks agreed in the same call, so all of them leave out the reduction from then on.
        return True
    with world.timeline.loop().span(REDUCE):
        wish = torch.tensor(int(bool(asked) or preemption.is_requested()), dtype=torch.int32, device=HOST)
        stop.is_agreed = bool(world.comm.all_reduce(wish, "max").item())
    if stop.is_agreed:
        preemption.agree()
    return stop.is_agreed
