"""Ends torch's process groups in this process, orderly or not, within a bounded time.

A group of devices waits at its end for collectives in progress, which a peer that is gone never joins. So a thread,
`unisono-end-group`, ends it, and is waited for with a timeout; after that, the group is aborted.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.torch_private import abort_process_group

logger = logging.getLogger(__name__)

END_S = 10.0
LAST_S = 30  # seconds for the rest of the process's exit when its group is stuck


def free_reducer(replicated: DistributedDataParallel) -> None:
    """`__del__` for torch's DistributedDataParallel: free its reducer while the group has another holder. The last
    holder joins gloo's threads, which may wait for the GIL that it holds (torch 2.13, `Reducer::~Reducer`)."""
    # The logger first: it holds the reducer, too.
    for name in ("logger", "reducer"):
        replicated.__dict__.pop(name, None)


def free_reducers_before_groups() -> None:
    """Make every DistributedDataParallel of this process end by `free_reducer`."""
    DistributedDataParallel.__del__ = free_reducer  # type: ignore[attr-defined]


def end_group(is_broken: bool, waits_for_device: bool) -> None:
    """End the default process group, and with it all others: without waiting for collectives in progress, if it is
    broken."""
    if not waits_for_device:
        dist.destroy_process_group()
        return
    ends = [abort_process_group] if is_broken else [dist.destroy_process_group, abort_process_group]
    if not any(_ends_in_time(end) for end in ends):
        logger.warning("the process group could not be shut down within %g s; this process ends without that", END_S)
        if hasattr(signal, "alarm"):
            signal.alarm(LAST_S)  # nothing else ends a process whose destructors wait for the device


def _ends_in_time(end: Callable[[], None]) -> bool:
    thread = threading.Thread(target=_end_quietly, args=(end,), name="unisono-end-group", daemon=True)
    thread.start()
    thread.join(END_S)
    return not thread.is_alive()


def _end_quietly(end: Callable[[], None]) -> None:
    """Body of the thread. A failure while a group ends was caused by an earlier one, whose cause is known."""
    with contextlib.suppress(RuntimeError, ValueError):
        end()
