"""Losses that are not a mean over the samples: the graphs of the first ones are examined, and findings are logged.

A rank's gradient is weighted as that of a mean over its samples. A mean over targets with some ignored, over the
classes' weights, or over the tokens of a mask is a mean over something else, and a sum is not a mean at all: their
results depend on the number of ranks and microbatches, unless `backward(loss, weight=)` says what the mean is over.

What autograd has saved shows how a loss was computed, wherever that happened: in the loop, in a module, in the model.
It does not show what a compiled graph or a user-defined Function computes.

*Threads:* the rank's. `torch.autograd.backward`, which the whole process shares, is replaced while any rank looks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch

from unisono.torch_private import SEQUENCE_NUMBER, output_size, saved
from unisono.world import World, given_world

logger = logging.getLogger(__name__)

_LOOKS = 4  # backward passes: a batch without padding says nothing
LEAF = "torch::autograd::AccumulateGrad"  # autograd's node for a leaf
_PASSED = 1000  # nodes between a sum and the model's outputs
_LINEAR = ("Add", "Sub", "Neg", "View", "Unsafe", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "_DDPSink")
_ENDING = (
    "; gradients are weighted as those of means over samples, so the result depends on the number of ranks and "
    "microbatches; write {}"
)


class LossWatch:
    """Looks at the first losses of a rank.

    Attributes:
        left: how many passes it still looks at.
        begun: autograd's number of the last forward pass's output: what has a greater one was computed from it.
    """

    def __init__(self, world: World, look: Callable[[torch.Tensor], None]) -> None:
        self.left, self.begun = _LOOKS, -1
        self._world, self._look = world, look
        self._ratios: dict[str, float] = {}  # what a sample counts, by the kind of loss

    def begin(self) -> None:
        """On rank zero, look at each loss that is given to torch's `backward`."""
        if self.left and self._world.rank == 0:
            _watching.add(self)
            _look_at_losses()

    def notice(self, loss: Any) -> None:
        """Look at a loss of this rank, if passes are left."""
        if self.left and isinstance(loss, torch.Tensor) and given_world() in (self._world, None):
            self.left -= 1
            self._look(loss)

    def describe(self, loss: torch.Tensor, rows: int | None, epoch: range) -> str | None:
        """Why a loss of that many rows is not a mean over them, and what to write; None if nothing says so. An epoch
        has one of these numbers of samples."""
        if loss.numel() != 1 or loss.grad_fn is None or not _is_after(loss.grad_fn, self.begun):
            return None
        for node, divisor, is_multiplied in _scalar_nodes(loss.grad_fn):
            if node.name().startswith("NllLoss"):
                said = self._describe_targets(node, divisor, is_multiplied, rows)
            elif (
                divisor in epoch
                and not is_multiplied
                and rows
                and _count(node) < epoch.start
                and _passed(node, self.begun, rows) is not None
            ):
                said = _OF_EPOCH.format(divisor)
            elif saved(node, "reduction") == 2:
                said = _SUM if divisor == 1 else None
            else:
                said = self._describe_terms(node, divisor, is_multiplied, rows)
            if said is not None:
                self.left = 0
                return said
        return None

    def _describe_targets(self, node: Any, divisor: float | None, is_multiplied: bool, rows: int | None) -> str | None:
        """Of cross_entropy and nll_loss."""
        target, classes, ignored = saved(node, "target"), saved(node, "weight"), saved(node, "ignore_index")
        is_sum = saved(node, "reduction") == 2
        if target is None or ignored is None or (is_sum and divisor in (None, rows)):
            return None
        ignored = (ignored + 2**63) % 2**64 - 2**63  # torch shows it without a sign
        by = divisor or 1.0
        kept = target != ignored
        terms = kept.double() if classes is None else classes.double()[target.where(kept, 0)] * kept
        count, number = float(terms.sum()), target.numel()
        if is_sum and by == 1 and number > 1:
            return _SUM
        # A sum over targets that is multiplied and divided is a multiple of their mean if it always is the same one.
        if is_sum and (self._changes("Sum", by / (count or 1)) if is_multiplied else by > count * 1.000001):
            return f"the loss is a sum over {count:g} targets, divided by {by:g}" + _ENDING.format(
                "the mean over this batch's targets (with a model of transformers, leave num_items_in_batch out), and "
                f"accelerator.backward(loss, weight=(targets != {ignored}).sum())"
            )
        if is_sum and (is_multiplied or by < count * 0.999999):
            return None
        own = terms.view(rows, -1).sum(1) if rows and number % rows == 0 else None
        is_even = not rows or (own is not None and bool(torch.allclose(own, own[:1])))
        is_plain = classes is None and bool(kept.all())
        if is_even and (is_plain or not self._changes(node.name(), count / (rows or 1))):
            return None
        if classes is not None:
            chosen = "targets" if bool(kept.all()) else f"targets[targets != {ignored}]"
            return "the loss is a mean over the classes' weights (weight= of cross_entropy)" + _ENDING.format(
                f"accelerator.backward(loss, weight=class_weights[{chosen}].sum())"
            )
        whose = f"of {rows} samples" if is_plain else f"of {number}, without ignore_index={ignored}"
        return f"the loss is a mean over {count:g} targets {whose}" + _ENDING.format(
            f"accelerator.backward(loss, weight=(targets != {ignored}).sum())"
        )

    def _describe_terms(self, node: Any, divisor: float | None, is_multiplied: bool, rows: int | None) -> str | None:
        """Of a sum or mean of the model's outputs that was written by hand."""
        sizes, kind = saved(node, "self_sym_sizes"), node.name()
        if not rows or not sizes or not kind.startswith(("SumBackward", "MeanBackward")):
            return None
        passed = _passed(node, self.begun, rows)
        if passed is None:
            return None
        if kind.startswith("Mean"):
            number = int(math.prod(sizes))
            if not number % rows or not any(each.startswith(("Index", "MaskedSelect")) for each in passed):
                return None
            return f"the loss is a mean over {number} terms that were chosen of {rows} samples" + _ENDING.format(
                "accelerator.backward(loss, weight=number), with the number of these terms"
            )
        if divisor == 1:
            return _SUM if sizes[0] == rows and math.prod(sizes) > 1 else None
        if divisor is None or not self._changes(kind, divisor / rows):
            return None
        return f"the loss is a sum, divided by {divisor:g} for {rows} samples, and otherwise before" + _ENDING.format(
            "the sum divided by the number of this batch's terms alone, and accelerator.backward(loss, weight=number)"
            if is_multiplied
            else "accelerator.backward(loss, weight=divisor), with the number that the sum is divided by"
        )

    def _changes(self, kind: str, ratio: float) -> bool:
        return abs(self._ratios.setdefault(kind, ratio) - ratio) > 1e-6 * abs(ratio)


def warn_of_unprepared(world: World) -> None:
    """Warn of a loss in an Accelerator of several ranks that has prepared no model."""
    if world.comm.size > 1 and world.rank == 0:
        logger.warning(
            "accelerator.backward() is called, and no model is prepared: nothing reduces its gradients, and each of "
            "the %d ranks trains a model of its own; model, optimizer, loader = accelerator.prepare(model, optimizer, "
            "loader)",
            world.comm.size,
        )


_SUM = "the loss was computed with reduction='sum', or as a sum by hand" + _ENDING.format(
    "a mean, or accelerator.backward(loss / count, weight=count)"
)
_OF_EPOCH = "the loss is a sum, divided by {:g}, the samples of an epoch" + _ENDING.format("the mean over this batch's")
_watching: WeakSet[LossWatch] = WeakSet()
_beneath = torch.autograd.backward  # what `_looking` stands before
_stands = False


def _look_at_losses() -> None:
    """Put `_looking` before torch's function, or before what a profiler has put there, unless it is still there."""
    global _beneath, _stands
    if not _stands:
        _beneath, _stands = torch.autograd.backward, True
        torch.autograd.backward = _looking


def _looking(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `torch.autograd.backward`, which `Tensor.backward` calls, as long as a rank looks at its losses."""
    global _stands
    for each in list(_watching):
        each.notice(tensors)
        if not each.left:
            _watching.discard(each)
    if not _watching and torch.autograd.backward is _looking:
        torch.autograd.backward, _stands = _beneath, False
    _beneath(tensors, *args, **kwargs)


def _count(node: Any) -> float:
    """The number of terms of a sum."""
    if node.name().startswith("SumBackward"):
        return float(math.prod(saved(node, "self_sym_sizes") or [math.inf]))
    terms = saved(node, "self") if saved(node, "reduction") == 2 else None
    return math.inf if terms is None else float(terms.numel())


def _scalar_nodes(root: Any) -> Iterator[tuple[Any, float | None, bool]]:
    """The nodes that compute one number each, from the loss on, its divisor in the loss (None if unknown), and whether
    it was multiplied, as Accelerate's scripts multiply a sum over tokens by the numbers of ranks and microbatches."""
    left: list[tuple[Any, float | None, bool]] = [(root, 1.0, False)]
    seen = {root}
    while left:
        node, divisor, is_multiplied = left.pop()
        if node is None:
            continue
        yield node, divisor, is_multiplied
        name, following = node.name(), [each for each, _ in node.next_functions]
        if name.startswith(("SumBackward", "MeanBackward")) and following:  # of several losses?
            is_list = following[0] is not None and following[0].name().startswith(("Stack", "Cat"))
            following = [each for each, _ in following[0].next_functions] if is_list else []
        elif name.startswith("Div"):
            by = saved(node, "other")
            is_known = divisor is not None and by is not None
            divisor = divisor * float(by) if is_known else None  # type: ignore[operator]
        elif name.startswith("Mul"):
            by, is_multiplied = _constant_factor(node), True
            divisor = divisor / by if divisor is not None and by else None
        elif not name.startswith(_LINEAR):
            divisor = None
        new = [
            each for each in following if each is not None and each not in seen and math.prod(output_size(each)) == 1
        ]
        seen.update(new)
        left += [(each, divisor, is_multiplied) for each in reversed(new)]


def _constant_factor(node: Any) -> float | None:
    """The number in a product with a tensor that requires grad; None if there is none."""
    inputs = [each for each, _ in node.next_functions]
    factor = None if None not in inputs and len(inputs) == 2 else saved(node, "other" if inputs[0] else "self")
    # A tensor of float32 may be a GradScaler's scale, which changes from step to step and is divided out again.
    return None if factor is None or getattr(factor, "dtype", None) == torch.float32 else float(factor)


def _passed(node: Any, begun: int, rows: int) -> set[str] | None:
    """The names of the nodes between this one and the model's outputs, with none that reduces the rows; None if there
    is one, if the loss does not depend on outputs, as a penalty, or if the model computed it."""
    if _number(node) <= begun:
        return None
    names, left, reaches = set[str](), [node], False
    while left and len(names) < _PASSED:
        for each, _ in left.pop().next_functions:
            if each is None or each.name() == LEAF:
                continue
            if _number(each) <= begun:
                reaches = True
            elif each.name().startswith(("SumBackward", "MeanBackward")) and output_size(each)[:1] != (rows,):
                return None
            else:
                names.add(each.name())
                left.append(each)
    return names if reaches else None


def _is_after(root: Any, begun: int) -> bool:
    """Whether a loss was computed from the model's outputs, or is one."""
    return any(node.name() != LEAF and _number(node) <= begun for node in islice(graph_nodes(root), _PASSED))


def graph_nodes(root: Any) -> Iterator[Any]:
    """The nodes of autograd's graph from this one on, each once."""
    # A loop, not a recursion: the graph may be deeper than Python's stack.
    left, seen = [root], {root, None}
    while left:
        node = left.pop()
        yield node
        new = {each for each, _ in node.next_functions} - seen
        seen |= new
        left += new


def _number(node: Any) -> int:
    return int(getattr(node, SEQUENCE_NUMBER)())
