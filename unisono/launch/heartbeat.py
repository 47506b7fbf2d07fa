"""A worker's pulse: its progress and its current collective, sent to the supervisor whenever they have changed.

Nothing is written during a step: a thread reads counters that are kept anyway.

*Threads:* `unisono-pulse`, a daemon, wakes every interval. It needs the GIL, so a worker that holds the GIL for long
shows no progress, which is accurate.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from unisono.launch.reports import Pulse, Reporter
from unisono.world import World


@contextlib.contextmanager
def beating(world: World, reporter: Reporter, interval_s: float) -> Iterator[None]:
    """Report the pulse of `world` during the block."""
    is_over = threading.Event()
    thread = threading.Thread(
        target=_send_pulses, args=(world, reporter, interval_s, is_over), name="unisono-pulse", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()  # not joined: if it is in the middle of a message, the reporter's lock waits for that


def count_of(world: World, name: str) -> int:
    """How many "steps", "batches" or "samples" a rank has taken."""
    return sum(track.counts.get(name, 0) for track in world.timeline.tracks())


def take_pulse(world: World) -> Pulse:
    """The rank's progress now."""
    counted = sum(count_of(world, name) for name in ("batches", "steps"))
    return Pulse(
        progress=counted + getattr(world.comm, "progress", 0),
        doing=getattr(world.comm, "current", None) or "",
        device_bytes=world.backend.memory(world.device) if _may_ask(world) else None,
        step=count_of(world, "steps"),
    )


def _may_ask(world: World) -> bool:
    """Whether the pulse's thread may use the rank's device."""
    return world.backend.moves_in_background and not world.backend.moves_in_loop


def _send_pulses(world: World, reporter: Reporter, interval_s: float, is_over: threading.Event) -> None:
    """Body of the pulse's thread."""
    # The current device is a property of a thread.
    if _may_ask(world):
        world.backend.activate(world.device)
    reported: Pulse | None = None
    # The first one at once: until then, the supervisor does not count this rank.
    while True:
        pulse = take_pulse(world)
        if pulse != reported:
            reporter.send_pulse(pulse)
            reported = pulse
        if is_over.wait(interval_s):
            return
