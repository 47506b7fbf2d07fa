"""The first loss, or gradient, that is not finite: which rank had it, in which step, said once.

From the next step on, parameters and losses are not finite on any rank. A rank that finds its parameters not finite
says nothing, except rank zero: the cause may be a gradient that no loss has shown.

*Threads:* the rank's.

Invariant: nothing waits for a device. Values on an accelerator are checked some steps later; those on a lazy device are
not, since its graphs would have more outputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from unisono.devices.movement import host_buffer
from unisono.report.timeline import NOT_FINITE
from unisono.training.gradients import values_of
from unisono.training.steps import Steps
from unisono.training.strategies.sharded import is_distributed
from unisono.world import World

logger = logging.getLogger(__name__)

LOSS = "the loss of rank {}"
GRADIENT = "a gradient that was reduced (with accelerator.backward(loss) the line would name the rank)"

_SKIPPING = (
    "; to leave out such steps, on all ranks: norm = accelerator.clip_grad_norm_(model, max_norm), and `if norm is "
    "None or norm.isfinite(): optimizer.step()`"
)
_TOGETHER = 16  # values on an accelerator that are read together
_SMALL = 2**16  # elements of what is checked in each step

_Parameters = Callable[[], Sequence[torch.Tensor]]
_Place = tuple[str, int, int | None]  # what it is; the numbers of the step, and of the batch in its loop


class Finiteness:
    """What one rank has seen."""

    def __init__(self) -> None:
        self.is_known = False  # from then on nothing is checked
        self._advice = ""
        self._probe: Callable[[], torch.Tensor | None] = lambda: None  # a small parameter
        self._held: list[tuple[torch.Tensor, torch.Tensor, _Place]] = []  # whether a value is finite, and the parameter
        self._sent: tuple[torch.Tensor, Any, list[_Place]] | None = None  # on the way to main memory; when it is there

    def look(self, value: torch.Tensor, what: str, steps: Steps, parameters: _Parameters) -> None:
        """Check a value of the latest visit, which trains these parameters."""
        world = steps.world
        if self.is_known or world.backend.is_lazy:
            return
        is_here = not world.backend.is_accelerated() or value.device.type != world.device.type
        if is_here and (math.isfinite(value.item()) if value.numel() == 1 else _is_finite(value)):
            return
        visits = steps.step.visits
        if visits and not visits[-1].claim.samples:  # the mean over no samples is NaN, and counts for nothing
            return
        batch = visits[-1].batch if visits else None
        place = what, steps.step.number, None if batch is None else batch.number
        self._advice = _SKIPPING if steps.virtual is None else ""  # a round of virtual ranks ends with a step
        if is_here:
            self._say_first(place, world, all(map(_is_finite, parameters())))
        else:
            self._hold_value(value, place, world, parameters)

    def _hold_value(self, value: torch.Tensor, place: _Place, world: World, parameters: _Parameters) -> None:
        """Keep, on the device, whether the value is finite; read what was kept before, if it is in main memory."""
        probe = self._probe()
        if probe is None:
            known = [each for each in parameters() if each.device == value.device and each.numel() <= _SMALL]
            probe = known[0] if known else value
            self._probe = ref(probe)
        self._held.append((_finite(value.detach()), _finite(probe.detach()), place))
        if self._sent is not None and world.backend.is_reached(self._sent[1]):
            (flags, _, places), self._sent = self._sent, None
            for (is_finite, was_whole), each in zip(flags.tolist(), places, strict=True):
                if not is_finite:
                    self._say_first(each, world, was_whole)
                    return
        if self._sent is None and len(self._held) >= _TOGETHER:
            flags = torch.stack([flag for *pair, _ in self._held for flag in pair]).view(-1, 2)
            host = host_buffer(flags, world.backend.pins_memory).copy_(flags, non_blocking=True)
            self._sent = host, world.backend.mark(world.device, flags), [each for *_, each in self._held]
            self._held = []

    def _say_first(self, place: _Place, world: World, was_whole: bool) -> None:
        self.is_known, self._held, self._sent = True, [], None
        what, step, batch = place
        if not was_whole and world.rank != 0:
            return
        world.timeline.loop().counts[NOT_FINITE] = step
        logger.warning(
            "%s is NaN or infinite in step %d%s%s; torch.autograd.set_detect_anomaly(True) names the operation%s",
            what.format(world.rank),
            step,
            "" if batch is None else f" (batch {batch} of its loop)",
            "" if was_whole else ", and parameters are so already, by a gradient of a step before",
            self._advice,
        )


def small_gradient(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A gradient that costs little to check: if the loss is not finite, most gradients are not either."""
    found = (each.grad for each in reversed(parameters) if each.grad is not None)
    return next((each for each in found if each.numel() <= _SMALL), None)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if is_distributed(tensor) else values_of(tensor)).isfinite().all()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_finite(tensor.detach()))
