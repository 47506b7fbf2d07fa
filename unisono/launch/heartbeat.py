"""A worker's pulse: its progress and its current collective, sent to the supervisor whenever they have changed.

Nothing is written during a step: a thread reads counters that are kept anyway.

*Threads:* `unisono-pulse`, a daemon, wakes every interval. It needs the GIL, so a worker that holds the GIL for long
shows no progress, which is accurate.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from unisono.launch.reports import Pulse, Reporter
from unisono.timeline import Track
from unisono.world import World

_COUNTED = ("batches", "steps")


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


class HeartbeatSender:
    """Makes the pulses of one rank; each depends on the previous one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._awaited: tuple[Any, Any] | None = None  # a loss, and the mark after it
        self._loss: float | None = None  # the last one known
        self._at = time.monotonic()
        self._samples = 0

    def take(self) -> Pulse:
        """The rank's progress now."""
        world, tracks = self._world, self._world.timeline.tracks()
        counted = sum(count_of(world, name) for name in _COUNTED)
        calls, current = getattr(world.comm, "progress", 0), getattr(world.comm, "current", None)
        return Pulse(
            progress=counted + calls,
            doing=current or "",
            device_bytes=None if not world.backend.moves_in_background else world.backend.memory(world.device),
            step=count_of(world, "steps"),
            samples_per_s=self._samples_per_s(count_of(world, "samples")),
            loss=None if world.backend.is_lazy else self._latest_loss(tracks),
        )

    def _samples_per_s(self, samples: int) -> float:
        now = time.monotonic()
        rate = (samples - self._samples) / max(now - self._at, 1e-9)
        self._at, self._samples = now, samples
        return round(rate, 1)

    def _latest_loss(self, tracks: list[Track]) -> float | None:
        """The latest loss that is available without waiting: a device may never get to it.

        A lazy device is not asked, since that would make it compute.
        """
        backend = self._world.backend
        if self._awaited is None:
            loss = next((track.loss for track in tracks if track.loss is not None), None)
            self._awaited = loss, backend.mark(self._world.device)
        # The mark was made after the loss was read, so once it is reached the loss has been computed.
        loss, mark = self._awaited
        if backend.is_reached(mark):
            self._awaited, self._loss = None, None
            with contextlib.suppress(Exception):  # no loss, a loss with several elements, or a failed device
                self._loss = float(loss)
        return self._loss


def _send_pulses(world: World, reporter: Reporter, interval_s: float, is_over: threading.Event) -> None:
    """Body of the pulse's thread."""
    # The current device is a property of a thread.
    world.backend.activate(world.device)
    reported: Pulse | None = None
    taker = HeartbeatSender(world)
    # The first one at once: until then, the supervisor does not count this rank.
    while True:
        pulse = taker.take()
        if pulse != reported:
            reporter.send_pulse(pulse)
            reported = pulse
        if is_over.wait(interval_s):
            return
