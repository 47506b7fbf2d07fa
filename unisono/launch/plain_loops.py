"""Loops that do not use this package: torch's DataLoader, model and optimizer, also in the loops of a library.

Where a run is recorded, functions of torch are wrapped, so that the track of such a loop has the same phases as a loop
over a loader of this package:

    fetch      `DataLoader.__iter__`, and `next()` of its iterators
    forward    `DistributedDataParallel.forward`; while gradients are off, it is "evaluate"
    backward   `torch.autograd.backward`
    reduce     the collectives of torch.distributed, and those of DDP's reducer in a group of shared memory
    step       `Optimizer.step`, by torch's hooks
    compute    the rest between two batches; without a DataLoader, the rest from the first pass on

*Threads:* the one that called `observe_plain_loops`; in others the wrapped functions only call torch's.

Invariants:

1. Nothing here changes a result, or raises. After an error of its own, it no longer observes.
2. What the track already has is not observed: a loop over a loader of this package, except for a backward pass that the
   script calls itself, and what a prepared object does.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from unisono.comm.shared_memory.process_group import SharedMemoryGroup
from unisono.launch.script_group import replace_functions
from unisono.report.timeline import BACKWARD, COMPUTE, EVALUATE, FETCH, FORWARD, REDUCE, STEP, Track, Waits
from unisono.tree import batch_size, flat_tensors, nbytes
from unisono.world import World

logger = logging.getLogger(__name__)

_BODY = (None, COMPUTE, EVALUATE)
_INTERRUPTED: dict[str, tuple[str | None, ...]] = {  # by each phase; never "step", whose spans are counted as steps
    FETCH: _BODY,
    FORWARD: _BODY,
    EVALUATE: (None, COMPUTE),
    BACKWARD: (*_BODY, FORWARD),
    REDUCE: (FETCH, COMPUTE, EVALUATE, FORWARD, BACKWARD),  # outside loops, ranks meet to begin, for example
    STEP: (*_BODY, FORWARD, BACKWARD),
}
_OF_REDUCER = ("allreduce", "broadcast")  # which it calls itself, of a group
_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_object", "gather", "gather_object"),
    *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier"),
)


def observe_plain_loops(world: World) -> None:
    """Observe the loops of this thread, until its process ends."""
    try:
        loops = PlainLoops(world)
        loops.wrap_torch()
    except Exception as error:  # a version of torch that lacks a name
        logger.warning("loops over torch's own DataLoader are not recorded: %s", error)


@dataclass(eq=False)
class _Loop:
    """One over a DataLoader."""

    iterator: weakref.ref[Any]
    before: str | None  # the phase around it
    passes: int | None = None  # with gradients, until its last batch; None before any


_Entered = tuple[Track, str | None]  # with the phase before


class PlainLoops:
    """What is known of the loops of the thread that creates it."""

    def __init__(self, world: World) -> None:
        self._world, self._thread = world, get_ident()
        self._track: Track | None = None
        self._is_off = False
        self._loops: list[_Loop] = []  # those that are open, the innermost last
        self._is_fed = False  # whether a DataLoader has delivered a batch while gradients were on
        self._passes = 0  # with gradients
        self._stepping: Optimizer | None = None
        self._before_step: str | None = None
        self._has_closure = False  # the step's
        self._stepped: set[weakref.ref[Optimizer]] = set()  # since the last step that was counted
        self._steps = 0  # that were counted

    def wrap_torch(self) -> None:
        from unisono.torch_private import LoaderIterator

        kinds: tuple[tuple[Any, str, str], ...] = (
            (DataLoader, "__iter__", FETCH),
            (DistributedDataParallel, "forward", FORWARD),
            (torch.autograd, "backward", BACKWARD),
            *((SharedMemoryGroup, name, REDUCE) for name in _OF_REDUCER),
        )
        for owner, name, phase in kinds:
            setattr(owner, name, self._in_phase(phase, getattr(owner, name)))
        LoaderIterator.__next__ = self._receiving_batches(LoaderIterator.__next__)
        collectives = {name: each for name in _COLLECTIVES if (each := getattr(dist, name, None))}
        replace_functions(**{name: self._in_phase(REDUCE, each) for name, each in collectives.items()})
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)

    def _in_phase(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        enter, leave = self._enter, self._leave

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            entered = enter(phase)
            if entered is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                leave(entered)

        return wrapped

    def _receiving_batches(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:  # noqa: N807
            entered = self._enter(FETCH)
            if entered is None:
                return original(iterator)
            track, before = entered
            loop = self._begin_loop(iterator, before)
            try:
                batch = original(iterator)
            except BaseException:
                self._end_loop(loop, track)
                raise
            self._note_batch(loop, track, batch)
            return batch

        return __next__

    def _enter(self, phase: str, into: str | None = None) -> _Entered | None:
        """Enter the phase, or another one, `into`, that it begins; None if the current call is not to be observed."""
        if is_dynamo_compiling() or self._is_off or get_ident() != self._thread:
            return None
        try:
            track = self._track or self._find_track()
            if track.innermost is not None and phase != BACKWARD:  # which a script calls by itself there, too
                return None
            if track.phase == STEP and phase in (FETCH, FORWARD, BACKWARD):
                self._give_up_step(track, phase)
            if phase == FORWARD and not torch.is_grad_enabled():
                phase = EVALUATE
            if track.phase not in _INTERRUPTED[phase]:
                return None
            if track.phase is None and self._world.state.deliveries.recent():  # loops over our loaders have all numbers
                return None
            if phase in (FORWARD, BACKWARD):
                self._passes += 1
            return track, track.switch(into or phase)
        except Exception as error:
            self._end(error)
            return None

    def _leave(self, entered: _Entered) -> None:
        track, before = entered
        try:
            phase, began = track.phase, track.since
            if phase == BACKWARD and self._has_closure:
                before = STEP
            elif before != COMPUTE:
                before = self._phase_after(phase, before)
            track.switch(before)
            if phase == FETCH:
                track.count_wait(Waits(track.since - began, 0, 0))
        except Exception as error:
            self._end(error)

    def _phase_after(self, phase: str | None, before: str | None) -> str | None:
        """The first pass or step outside any loop begins one that has no DataLoader, and no known end."""
        if phase not in (FORWARD, BACKWARD, STEP):
            return before
        return COMPUTE if before == EVALUATE or (before is None and not self._is_fed) else before

    def _find_track(self) -> Track:
        """Only once it is needed: a script without such loops has no track."""
        self._track = self._world.timeline.loop()
        return self._track

    def _end(self, error: Exception) -> None:
        self._is_off = True
        logger.warning("the phases of this rank's loops are not recorded from here on: %s", error)

    # Loops over a DataLoader.

    def _begin_loop(self, iterator: Any, before: str | None) -> _Loop:
        """The loop, which is new if this is its first batch; those within it that were left have ended."""
        loops = self._loops
        if loops and loops[-1].iterator() is iterator:
            return loops[-1]
        found = next((place for place, loop in enumerate(loops) if loop.iterator() is iterator), None)
        if found is None:
            loops.append(_Loop(weakref.ref(iterator, self._drop_loop), before))
        else:
            del loops[found + 1 :]
        return loops[-1]

    def _note_batch(self, loop: _Loop, track: Track, batch: Any) -> None:
        try:
            # Loops that evaluate may turn gradients off for each batch: with no pass on the one before, this is one.
            began, is_training = track.since, torch.is_grad_enabled() and loop.passes != self._passes
            loop.passes = self._passes
            track.switch(COMPUTE if is_training else EVALUATE)
            track.count_wait(Waits(track.since - began, 0, 0))
            # Not "batches": those show that ranks share a loader.
            samples, size = _measure_batch(batch)
            track.counts["samples"] += samples
            track.counts["bytes"] += size
            if is_training:
                self._stepped.clear()
                if not self._is_fed:
                    self._is_fed = True
                    self._loops[0].before = None  # what was before it was not a loop
        except Exception as error:
            self._end(error)

    def _end_loop(self, loop: _Loop, track: Track) -> None:
        """The loop has passed its last batch, or failed."""
        try:
            if loop in self._loops:
                del self._loops[self._loops.index(loop) :]
            began = track.since
            track.switch(loop.before)
            track.count_wait(Waits(track.since - began, 0, 0))
        except Exception as error:
            self._end(error)

    def _drop_loop(self, iterator: weakref.ref[Any], thread: Callable[[], int] = get_ident) -> None:
        """A loop was left early, as its dropped iterator shows; the garbage collector may drop it in any thread."""
        if thread() != self._thread:  # no global name: at the interpreter's exit, modules may be gone
            return
        found = next((loop for loop in self._loops if loop.iterator is iterator), None)
        if found is None:
            return
        del self._loops[self._loops.index(found) :]
        track = self._world.timeline.loop()
        if track.innermost is None and track.phase in (COMPUTE, EVALUATE):
            track.switch(found.before)

    # Steps.

    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_counted_elsewhere():
            return
        has_closure = any(each is not None for each in (*args[1:], kwargs.get("closure")))
        entered = self._enter(STEP, COMPUTE if has_closure else STEP)
        if entered is not None:
            self._stepping, self._before_step, self._has_closure = optimizer, entered[1], has_closure

    def _after_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping is not optimizer or get_ident() != self._thread:
            return
        self._stepping, self._has_closure = None, False
        try:
            timeline = self._world.timeline
            track = self._track or self._find_track()
            track.switch(self._phase_after(STEP, self._before_step))
            own, stepped = weakref.ref(optimizer), self._stepped
            is_first = not stepped or own in stepped or not any(each() for each in stepped)
            if is_first:
                stepped.clear()
            stepped.add(own)
            if is_first:
                self._steps += 1
                track.counts["steps"] += 1
                if timeline.at_step is not None:
                    timeline.at_step(track.counts["steps"], None)
        except Exception as error:
            self._end(error)

    def _is_counted_elsewhere(self) -> bool:
        """Whether steps of an optimizer of this package are counted: then only these count."""
        if is_dynamo_compiling() or get_ident() != self._thread:
            return True
        counts = (self._track or self._find_track()).counts
        if counts["steps"] == self._steps:
            return False
        counts["steps"] -= self._steps
        self._steps = 0
        return True

    def _give_up_step(self, track: Track, phase: str) -> None:
        """Leave a step whose end was not seen, since it has raised."""
        is_within_closure = self._has_closure and phase != FETCH
        if self._stepping is not None and not is_within_closure:
            self._stepping, self._has_closure = None, False
            track.switch(COMPUTE)


def _measure_batch(batch: Any) -> tuple[int, int]:
    """The samples and the bytes of a batch; fast for the most common ones."""
    held = flat_tensors(batch)
    if not held:
        return batch_size(batch) or 0, nbytes(batch)
    first = next(iter(held))
    return len(first) if first.ndim else 0, sum([each.nbytes for each in held])
