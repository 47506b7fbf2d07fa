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
import weakref
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from unisono.window import Latest, Share, window_of
from unisono.world import World, current_world


def backward(loss: torch.Tensor, weight: float | torch.Tensor | None = None, *, world: World | None = None) -> None:
    """`loss.backward()` for a microbatch, so that the next optimizer step applies the gradient of the mean over all
    microbatches since the last one, on all ranks, each weighted exactly.

    The loss must be the mean over the microbatch, and is not divided by the number of microbatches. A batch that is to
    be left out is left out before this call: nothing tells here that its gradients were zeroed.

    Args:
        loss: of one element.
        weight: what the mean was taken over, where that is not the samples: the number of tokens that are not masked,
            say. None takes the samples that the loader has dealt to this rank; without a loader of this package each
            microbatch counts the same. All ranks give weights in a step, or none does. Several losses of one batch
            have one weight.

    Raises:
        ValueError: the weight is negative or not finite, or does not fit those given before in this step.
    """
    run_backward(loss, tally_of(world or current_world()).note(weight))


def run_backward(loss: torch.Tensor, factor: float) -> None:
    """The backward pass of the loss times what `Tally.note` has told; of 0 times a loss that is not finite, too.

    A mean over nothing is NaN, and stays NaN times 0; so there the gradients are made zero where they arrive.
    """
    hooks = [] if factor else [each.register_hook(torch.zeros_like) for each in _leaves(loss)]
    try:
        weighted(loss, factor or 1.0).backward()
    finally:
        for hook in hooks:
            hook.remove()


def weighted(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The loss times a factor."""
    return loss if factor == 1 else loss * factor


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which the backward pass of the loss leaves gradients."""
    found: list[torch.Tensor] = []
    seen, left = {loss.grad_fn}, [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None:
            continue
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.append(leaf)
        new = {each for each, _ in node.next_functions if each not in seen}
        seen |= new
        left += new
    return found


class Tally:
    """The microbatches of one rank since its last step.

    Args:
        world: the rank's.

    Attributes:
        microbatches: how many there are.
        spent: the last batch of a loop that is over, which was stepped on: what comes now comes from elsewhere.
    """

    def __init__(self, world: World) -> None:
        self._window = window_of(world)
        self._world = weakref.ref(world)  # tallies are kept by their worlds
        self._size = world.comm.size
        self.num_restarts = 0
        self._key: object = None
        before = self._window.latest()
        self.spent: object = before.key if before is not None and before.is_over else None
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
        self._is_open, self._is_ending = True, False
        self._stepped.clear()

    def note(self, weight: float | torch.Tensor | None, key: object = None) -> float:
        """Count a microbatch, the batch that the loop received last; return the factor for its loss.

        Another loss of the same batch counts it once, and so does one behind another optimizer's step.

        Args:
            key: tells one microbatch from another where there is no loop.
        """
        latest = self.latest()
        if latest is not None and latest.is_over and latest.key == self._key and not self._is_open:
            self.spent, latest = latest.key, None
        key = latest.key if latest is not None else key
        is_new = key is None or key != self._key
        own, total = _checked(weight), None
        if own is None:
            own, total = (latest.samples, latest.total) if latest and latest.total else (1, self._size)
        is_other = self._is_given != (weight is not None) or own != self._last
        if (not self._is_open and (is_new or is_other)) or (self._is_ending and is_new):
            is_new = True
            self._begin()
        elif self.microbatches and self._is_given != (weight is not None):
            raise ValueError(
                "one microbatch of this step has a weight of its own, another one has none; pass backward(..., "
                "weight=) for each of them, or for none"
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
            self._total = (self._total or 0.0) + total if total is not None else None
            self._unit = self._unit or own or None
        return own / self._unit if self._unit else 0.0

    def latest(self) -> Latest | None:
        """The batch that gradients come from now; None where no loop has delivered it."""
        latest = self._window.latest()
        return None if latest is not None and latest.key == self.spent else latest

    def would_add(self) -> bool:
        """Whether the next `note` adds a further microbatch to the step."""
        latest = self.latest()
        is_new = latest is None or latest.key != self._key
        return self._is_open and not self._is_ending and self.microbatches > 0 and is_new

    def is_held(self, optimizer: Optimizer | None = None) -> bool:
        """Whether the gradients that are held, and that optimizer is about to apply, were made by `backward`."""
        if not self.microbatches:
            return False
        if self._is_open and not self._is_ending:
            return True
        latest = self.latest()
        return optimizer not in self._stepped and (latest.key if latest else None) == self._key

    def is_of(self, key: object) -> bool:
        """Whether the microbatch that was counted last is the batch with that key."""
        return key is not None and key == self._key

    @property
    def unit(self) -> float:
        """The weight of a loss whose factor is 1."""
        return self._unit or 0.0

    def share(self) -> tuple[Share, float]:
        """This rank's share of the weight W, and u / W, the factor of its gradients. A collective, once a step, where
        weights were given.

        Raises:
            ValueError: all ranks' weights are zero.
        """
        if self._total is None:
            self._total = self._sum(self._own)
        if not self._total:
            raise ValueError(
                "the weights of this step are 0 on all ranks, so there is no mean to take the gradient of; skip a "
                "batch without anything that counts, on every rank"
            )
        share = Share(self._own / self._total, self.microbatches, self._mark)
        return share, self.unit / self._total

    def close(self, optimizer: Optimizer) -> None:
        """That optimizer has stepped: the next microbatch begins a new step."""
        self._is_open = False
        self._stepped.add(optimizer)

    def clear(self) -> None:
        """Gradients were zeroed: the next microbatch begins a new step."""
        self._is_ending = True

    def restart(self) -> None:
        """The rank's loop begins anew, and whatever an earlier one has left is of no step."""
        self.clear()
        self.num_restarts += 1

    def _sum(self, weight: float) -> float:
        world = self._world()
        if self._size == 1 or world is None:
            return weight
        return float(world.comm.all_reduce(torch.tensor(weight, dtype=torch.float64, device=world.device)))


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
