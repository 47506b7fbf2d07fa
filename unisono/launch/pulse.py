"""A worker's pulse: how far it is and which collective it is in, told to the supervisor whenever that has changed.

Nothing is written on the way of a step: a thread looks at counters that are kept anyway.

*Threads:* `unisono-pulse`, a daemon, wakes every interval. It needs the interpreter's lock, so a worker that holds it
for long shows no progress, which is the truth.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from unisono.launch.reports import Pulse, Reporter
from unisono.world import World

_COUNTED = ("batches", "steps")


@contextlib.contextmanager
def beating(world: World, reporter: Reporter, interval_s: float) -> Iterator[None]:
    """Report the pulse of `world` during the block."""
    is_over = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(world, reporter, interval_s, is_over), name="unisono-pulse", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()  # it may be in the middle of a message; the reporter's lock waits for that


def take_pulse(world: World) -> Pulse:
    """How far the rank is now."""
    counted = sum(track.counts.get(name, 0) for track in world.timeline.tracks() for name in _COUNTED)
    calls, current = getattr(world.comm, "num_calls", 0), getattr(world.comm, "current", None)
    device_bytes = None if not world.backend.moves_in_background else world.backend.memory(world.device)
    return Pulse(counted + calls + _sequence_number(), current or "", device_bytes)


def _sequence_number() -> int:
    """How many collectives the default process group has begun, whoever called them."""
    with contextlib.suppress(Exception):  # it is going, or its backend does not count
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return 0


def _beat(world: World, reporter: Reporter, interval_s: float, is_over: threading.Event) -> None:
    """Body of the pulse's thread."""
    told: Pulse | None = None
    while not is_over.wait(interval_s):
        pulse = take_pulse(world)
        if pulse != told:
            reporter.send_pulse(pulse)
            told = pulse
