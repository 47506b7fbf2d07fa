"""The end of torch's process groups in this process, orderly or not, and in time.

A group of devices waits at its end for collectives under way, which a peer that is gone never joins. So a thread ends
it, and is waited for so long; where that was in vain, the group is aborted: what its devices wait in ends.

*Threads:* whichever ends the group, and `unisono-end-group`, which may be left in the driver.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

_END_S = 10.0
_LAST_S = 30  # for what else the process has to do at its end, when its group is stuck


def free_reducer(replicated: DistributedDataParallel) -> None:
    """`__del__` for torch's DistributedDataParallel: free its reducer while the group has another holder.

    A reducer that is the group's last holder joins gloo's threads with the interpreter's lock held, and these may wait
    for that lock to free a tensor (torch 2.13, `Reducer::~Reducer`).
    """
    for name in ("logger", "reducer"):
        replicated.__dict__.pop(name, None)


def free_reducers_before_groups() -> None:
    """From now on every DistributedDataParallel of this process ends by `free_reducer`."""
    DistributedDataParallel.__del__ = free_reducer  # type: ignore[attr-defined]


def end_group(is_broken: bool, waits_for_device: bool) -> None:
    """End the default process group, and with it all others.

    Args:
        is_broken: collectives that are under way have failed; nothing waits for them.
        waits_for_device: its end may wait for a device.
    """
    if not waits_for_device:
        dist.destroy_process_group()
        return
    abort: Callable[[], None] = dist.distributed_c10d._abort_process_group
    ends = [abort] if is_broken else [dist.destroy_process_group, abort]
    if not any(_ends_in_time(end) for end in ends):
        logger.warning("the process group could not be ended within %g s; this process ends without it", _END_S)
        if hasattr(signal, "alarm"):
            signal.alarm(_LAST_S)  # nothing else ends a process whose destructors wait for the device


def _ends_in_time(end: Callable[[], None]) -> bool:
    thread = threading.Thread(target=_quietly, args=(end,), name="unisono-end-group", daemon=True)
    thread.start()
    thread.join(_END_S)
    return not thread.is_alive()


def _quietly(end: Callable[[], None]) -> None:
    """Body of the thread: what fails in the end of a group was broken before, and the cause is known."""
    with contextlib.suppress(RuntimeError, ValueError):
        end()
