"""What the gradients that a rank holds stand for: microbatches with their weights, counted by `backward`.

A microbatch m of rank r has the gradient g(r, m) of its mean loss and the weight w(r, m): its samples, or what the user
gives instead (tokens that count). The gradient of the mean over all of a step's samples, on all ranks, is

    sum over r and m of w(r, m) g(r, m) / W,    W = sum over r and m of w(r, m)

`backward` scales each loss by w(r, m) / u(r), where the unit u(r) is the rank's first weight in the step, so that the
factor is 1 but for a microbatch of another size; the reduction scales the rank's sum by u(r) / W. W is known without
asking where the loader tells each round's total, and else is one small sum over the ranks.

Gradients that plain `loss.backward()` has made are no business of this module: `Window` has their shares.

*Threads:* a rank's tally belongs to the thread of its loop.
"""

from __future__ import annotations

import math
import threading
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from unisono.window import Share, window_of
from unisono.world import World, current_world


def backward(loss: torch.Tensor, weight: float | torch.Tensor | None = None, *, world: World | None = None) -> None:
    """`loss.backward()` for a microbatch, so that the next optimizer step applies the gradient of the mean over all
    microbatches since the last one, on all ranks, each weighted exactly.

    The loss must be the mean over the microbatch, and is not divided by the number of microbatches.

    Args:
        loss: of one element.
        weight: what the mean was taken over, where that is not the samples: the number of tokens that are not masked,
            say. None takes the samples that the loader has dealt to this rank; without a loader of this package each
            microbatch counts the same. All ranks give weights in a step, or none does. Several losses of one batch
            have one weight.

    Raises:
        ValueError: the weight is negative or not finite, or does not fit those given before in this step.
    """
    factor = tally_of(world or current_world()).note(weight)
    (loss if factor == 1 else loss * factor).backward()  # type: ignore[no-untyped-call]


class Tally:
    """The microbatches of one rank since its last step.

    Args:
        world: the rank's.

    Attributes:
        microbatches: how many there are.
    """

    def __init__(self, world: World) -> None:
        self._window = window_of(world)
        self._comm = world.comm
        self._device = world.device
        self._key: object = None
        self._is_open = False
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._begin()

    def _begin(self) -> None:
        self.microbatches = 0
        self._unit: float | None = None
        self._own = 0.0
        self._last = 0.0
        self._total: float | None = None  # of all ranks, where it is known without asking
        self._is_given = False
        self._mark = 0
        self._is_open = True
        self._stepped.clear()

    def note(self, weight: float | torch.Tensor | None) -> float:
        """Count a microbatch, the batch that the loop received last; return the factor for its loss.

        Another loss of the same batch counts it once, and so does one behind another optimizer's step.
        """
        latest = self._window.latest()
        key = latest.key if latest is not None else None
        is_new = key is None or key != self._key
        own, total = _checked(weight), None
        if own is None:
            own, total = (latest.samples, latest.total) if latest and latest.total else (1, self._comm.size)
        is_other = self._is_given != (weight is not None) or own != self._last
        if not self._is_open and (is_new or is_other):
            is_new = True
            self._begin()
        elif self.microbatches and self._is_given != (weight is not None):
            raise ValueError(
                "one microbatch of this step has a weight of its own, another one has none; pass backward(..., weight=) "
                "for each of them, or for none"
            )
        elif not is_new and own != self._last:
            raise ValueError(
                f"one batch has got the weights {self._last:g} and {own:g}; several losses of a batch have one weight, "
                "so add them up, each in its proportion, and call backward once"
            )
        self._key = key
        if is_new:
            self.microbatches += 1
            self._is_given, self._last, self._mark = weight is not None, own, latest.mark if latest else 0
            self._own += own
            self._total = (self._total or 0) + total if total is not None else None
            self._unit = self._unit or own or None
        return own / self._unit if self._unit else 0.0

    def is_new(self) -> bool:
        """Whether the next `note` counts a further microbatch in an open step."""
        latest = self._window.latest()
        return self._is_open and self.microbatches > 0 and (latest is None or latest.key != self._key)

    def holds_for(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of that optimizer, about to step, were made by `backward`."""
        if self._is_open or not self.microbatches:
            return self.microbatches > 0
        latest = self._window.latest()
        return optimizer not in self._stepped and (latest.key if latest else None) == self._key

    def share(self) -> tuple[Share, float]:
        """This rank's share of the weight W, and u / W, the factor of its gradients. A collective, for given weights.

        Raises:
            ValueError: all ranks' weights are zero.
        """
        total = self._total
        if total is None:
            total = self._sum(self._own)
        if not total:
            raise ValueError(
                "the weights of this step are 0 on all ranks, so there is no mean to take the gradient of; skip a "
                "batch without anything that counts, on every rank"
            )
        share = Share(self._own / total, self.microbatches, self._mark)
        return share, (self._unit or 0.0) / total

    def close(self, optimizer: Optimizer) -> None:
        """That optimizer has stepped: the next microbatch begins a new step."""
        self._is_open = False
        self._stepped.add(optimizer)

    def clear(self) -> None:
        """The gradients were thrown away."""
        self._is_open, self.microbatches = False, 0

    def _sum(self, weight: float) -> float:
        if self._comm.size == 1:
            return weight
        return float(self._comm.all_reduce(torch.tensor(weight, dtype=torch.float64, device=self._device)))


def share_of(weight: float | torch.Tensor, world: World) -> tuple[Share, float]:
    """This rank's share where its gradients, however they were made, weigh so much; and their factor."""
    tally = Tally(world)
    tally.note(weight)
    share, _ = tally.share()
    return share, share.part


def _checked(weight: float | torch.Tensor | None) -> float | None:
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"weight={weight!r} is a {type(weight).__name__}; pass a number, of samples or tokens say")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight={weight} is no weight; pass a finite number that is not negative")
    return float(weight)


_lock = threading.Lock()
_tallies: WeakKeyDictionary[World, Tally] = WeakKeyDictionary()


def tally_of(world: World) -> Tally:
    """The tally of that rank."""
    with _lock:
        tally = _tallies.get(world)
        if tally is None:
            _tallies[world] = tally = Tally(world)
        return tally
