"""Timeline: where one rank's time goes. Always on; a switch of phase costs about a microsecond.

The thread that runs the user's loop is, at each moment, in exactly one phase: waiting for data ("fetch"), in the loop's
body ("compute"), reducing ("reduce"), stepping ("step"), or outside any loop. The loader and the collectives switch the
phase where they are entered and left, so the phases tile the loop's time without gaps. A batch that is received while
gradients are off is for "evaluate"; and the user names blocks (`phase("augmentation")`): all time in a block has that
name. A helper thread (a transfer, for example) works next to the loop and has its own track.

An accelerator runs asynchronously to the thread that submits to it. So if a device has a clock, each switch leaves a
stamp in its work, and the "device" track has the phases as the device went through them. A stamp is read about two
steps later, and nothing waits for it.

The causes of waiting are counted besides the phases (`Waits`): "wait_source_ns" and so on. The other counters are
"samples", "batches", "steps"; "bytes" of the batches; "repeated" samples in them, which only repeat others; and
"queued", the sum of the batches that waited in the loader at each receipt.

*Threads:* a `Track` has one writer, the thread that requested it, and acquires no lock; others may read it at any time
and see it up to the last completed span. The timeline's table of tracks is locked.

Invariants:
1. Totals are complete; spans are kept up to `MAX_SPANS` per track, the latest ones.
2. Times are `time.perf_counter_ns()`, in nanoseconds.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # which imports torch: a reader of records need not
    from unisono.protocols import DeviceClock


MAX_SPANS = 16384
MAX_LOGGED = 1024  # between two readings
DEVICE = "device"  # the name of that track
NOT_FINITE = "first step that is not finite"  # a counter: the number of that step
_STAMPS_AHEAD = 16  # of about two steps: read earlier, the device might not have reached it

FETCH, MOVE, COMPUTE, REDUCE, STEP = PHASES = ("fetch", "move", "compute", "reduce", "step")
EVALUATE, LOG, SAVE = "evaluate", "log", "save"
FORWARD, BACKWARD = "forward", "backward"  # only in runs that are recorded


class Waits(NamedTuple):
    """Nanoseconds that a loop waited for its data's source, for a batch to be moved, and for the loops of its peers."""

    source: int
    transfer: int
    peers: int


def wait_counter(cause: str) -> str:
    """The counter of a cause, of `Waits`."""
    return f"wait_{cause}_ns"


_WAIT_SOURCE, _WAIT_TRANSFER, _WAIT_PEERS = map(wait_counter, Waits._fields)


_SAME: Any = object()


class Span(NamedTuple):
    """One stretch of time in one phase; `start` and `stop` in nanoseconds."""

    phase: str
    start: int
    stop: int


_span, waits_of = partial(tuple.__new__, Span), partial(tuple.__new__, Waits)  # without a Python call


class Track:
    """What one thread did, as spans and totals."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.totals: defaultdict[str, int] = defaultdict(int)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.innermost: LoopTiming | None = None
        self.on_device: DeviceTrack | None = None
        self.phase: str | None = None  # None: outside any loop
        self._name: str | None = None  # of the innermost named block, which all its time belongs to
        self.since = 0  # when the current phase began

    def switch(self, phase: str | None, name: str | None = _SAME) -> str | None:
        """Leave the current phase, enter `phase` (None: outside any loop), and return the one that was left; `name` is
        that of the innermost named block, if that changes."""
        now, left = perf_counter_ns(), self.phase
        ended = self._name or left
        if ended is not None:
            self.spans.append(_span((ended, self.since, now)))
            self.totals[ended] += now - self.since
        self.phase, self.since = phase, now
        self._name = self._name if name is _SAME else name
        if self.on_device is not None:
            self.on_device.enter(self._name or phase, now)
        return left

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Attribute the time of the block to this name, whatever its phases; of nested blocks, the inner one counts."""
        outer = self._name
        self.switch(self.phase, name)
        try:
            yield
        finally:
            self.switch(self.phase, outer)

    def span(self, phase: str) -> _Block:
        """Run the block in `phase`, then return to the phase before it; outside a loop, record only the block."""
        return _Block(self, phase)

    @property
    def current(self) -> str | None:
        """The phase, or the innermost named block, that the thread is in; None outside any loop."""
        return self._name or self.phase

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to a counter ("samples", "batches", "steps")."""
        self.counts[name] += amount

    def count_wait(self, waits: Waits, is_direct: bool = False) -> None:
        """Add the times that the loop waited; if nothing is moved (`is_direct`), the transfer belongs to the source."""
        if self._name is not None:  # the wait is not a part of "fetch"
            return
        counts, (source, transfer, peers) = self.counts, waits
        counts[_WAIT_SOURCE] += source + transfer if is_direct else source
        counts[_WAIT_TRANSFER] += 0 if is_direct else transfer
        counts[_WAIT_PEERS] += peers


class _Block:
    """A block that runs in a phase. Not a generator, which would cost a step of the loop four more calls."""

    __slots__ = ("_before", "_phase", "_track")

    def __init__(self, track: Track, phase: str) -> None:
        self._track, self._phase = track, phase

    def __enter__(self) -> None:
        self._before = self._track.switch(self._phase)

    def __exit__(self, *_: object) -> None:
        self._track.switch(self._before)


class DeviceTrack(Track):
    """The phases of a loop, as its device went through the work that the loop submitted in each.

    The device's time is aligned with the host's clock at the first stamp, when the device is idle.
    """

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__(DEVICE)
        self._clock = clock
        self._stamps: deque[tuple[str | None, Any]] = deque()  # with the phase that each begins, not read yet
        self._now = 0

    def enter(self, phase: str | None, now: int) -> None:
        """Attribute what is submitted from now on to `phase`; `now` is the host's time."""
        stamp = self._clock.stamp()
        if stamp is not None:
            self._now = self._now or now
            self._stamps.append((phase, stamp))
            self.read(_STAMPS_AHEAD)

    def read(self, left: int = 1) -> None:
        """Read the stamps that the device has reached by now; none of the last `left`."""
        while len(self._stamps) > left:
            (phase, first), (_, second) = self._stamps[0], self._stamps[1]
            took = self._clock.elapsed_ns(first, second)
            # The device has not reached the second stamp yet.
            if took is None:
                return
            self._stamps.popleft()
            began, self._now = self._now, self._now + took
            if phase is not None:
                self.spans.append(Span(phase, began, self._now))
                self.totals[phase] += took


class LoopPlace(NamedTuple):
    """Where a loop that trains is in its epoch."""

    epoch: int  # from 0
    before: int  # the batches of the epoch before the position at which the loop has begun
    length: int | None  # the batches of a whole epoch; None if that is unknown
    progress: Any  # its `rounds` are the batches that the loop has received

    def as_numbers(self) -> dict[str, int | None]:
        """For a record."""
        return {"epoch": self.epoch, "batch": self.before + self.progress.rounds, "length": self.length}


class LoopTiming:
    """One loop of the calling thread, waiting for its first batch; loops nest.

    Afterwards the thread is outside again, or in the loop around it.
    """

    def __init__(self, track: Track) -> None:
        self.track = track
        self._before = track.switch(FETCH)
        self.around = track.innermost
        self.place: LoopPlace | None = None  # once it has trained, where a record is kept
        self.thread = threading.get_ident()
        track.innermost = self

    def end(self) -> None:
        """The loop's thread has passed its last batch."""
        self.track.switch(self._before)
        self.track.innermost = self.around

    def abandon(self) -> bool:
        """The loop was left early, as a dropped iterator shows: end it, unless its thread is in another loop."""
        # The garbage collector may drop an iterator in another thread, which must not write to this track.
        is_running = self.track.innermost is self and threading.get_ident() == self.thread
        if is_running:
            self.end()
        return is_running


class Timeline:
    """The tracks of one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracks: list[Track] = []
        self._idle: list[Track] = []
        self._clock: DeviceClock | None = None
        self.is_recorded = False
        self.backward: Track | None = None  # of the loop that is in `accelerator.backward`
        self.at_step: Callable[[int, int | None], None] | None = None
        """Where a record is kept: called after each step, with the number of steps, and the steps that a prepared
        optimizer has done, with those before the state that was loaded."""
        self.at_load: Callable[[int], None] = lambda done: None  # with the steps before a state that was loaded
        self.logged: deque[tuple[int, int | None, dict[str, Any]]] = deque(maxlen=MAX_LOGGED)
        """What the loop has logged, for the record of the rank: when, the step, and the values."""
        self.last_logged: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}  # of the run, as the script has given them to its trackers
        self.last_saved = ""  # where the last checkpoint is
        self.write_digests: Callable[[dict[str, Any]], None] | None = None  # of rank zero, where a record is kept
        self.at_pulse: list[Callable[[], None]] = []  # called about once a second, by another thread
        self.at_sample: list[Callable[[Path], None]] = []  # called with the run's directory after each line of it
        self.tuned: dict[int, Callable[[], str]] = {}
        """For each loader whose loader workers are chosen while it runs: describes how many it has."""
        self._of_thread = threading.local()

    def loop(self) -> Track:
        """Return the track of the loop that runs in the calling thread; create it at the first call."""
        track: Track | None = getattr(self._of_thread, "loop", None)
        if track is None:
            track = self._of_thread.loop = self._add(Track("loop"))
            if self._clock is not None:
                track.on_device = DeviceTrack(self._clock)
                self._add(track.on_device)
        return track

    def loop_in_backward(self, is_hosted: bool) -> Track | None:
        """The loop's track for a hook of a backward pass; None in `loss.backward()` unless its gradients are in main
        memory (`is_hosted`): its hooks run on an autograd thread."""
        return self.backward or (self.loop() if is_hosted else None)

    def follow(self, clock: DeviceClock) -> None:
        """Record the phases of loops that begin from now on by the device's clock, too."""
        self._clock = clock

    @contextmanager
    def helper(self, name: str) -> Iterator[Track]:
        """Lend a helper thread a track for its life; the next thread of that name continues with the same one."""
        with self._lock:
            track = next((track for track in self._idle if track.name == name), None)
            if track is not None:
                self._idle.remove(track)
        track = track or self._add(Track(name))
        try:
            yield track
        finally:
            with self._lock:
                self._idle.append(track)

    def tracks(self) -> list[Track]:
        """All tracks so far."""
        with self._lock:
            return list(self._tracks)

    def _add(self, track: Track) -> Track:
        with self._lock:
            self._tracks.append(track)
        return track
