"""Means over the samples of all ranks, for what a loop prints: a loss, an accuracy.

Each sample counts once: the rows that only repeat others, in a split tail, are left out. torchmetrics has all other
metrics; `Accelerator.prepare` makes them do the same.

The sums of batches are added without rounding, and the total is rounded once: it does not depend on their order, nor,
with virtual ranks, on the number of ranks.

*Threads:* an object belongs to one rank's loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum, isfinite
from numbers import Real
from typing import Any

import torch

from unisono.arguments import check_type
from unisono.comm.operations import HOST
from unisono.report.timeline import REDUCE
from unisono.training.collectives import num_rows
from unisono.world import World, current_world

_HELD = 1000
_TERMS = 8  # that many float64 hold a sum of float32 exactly


class Mean:
    """The mean of a value over the samples of all ranks, each counted once.

        loss_mean = accelerator.prepare(Mean())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss_mean.update(loss, y)
        accelerator.print(loss_mean.compute())  # every rank calls it

    A prepared one is saved in the Accelerator's checkpoints: an epoch that is resumed, on any number of ranks, gets the
    mean of all its samples.

    Args:
        world: the ranks; None uses the current world. `Accelerator.prepare` sets the Accelerator's.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world or current_world()
        self.reset()

    def reset(self) -> None:
        """Forget all samples, as before a new epoch."""
        self._terms: list[float] = []  # whose exact sum is the total
        self._count = 0
        self._sums: list[torch.Tensor] = []  # of batches, on their device: not added to the total yet

    def update(self, values: torch.Tensor | float, of: Any) -> None:
        """Add this rank's samples of a batch. Waits for no other rank, and only every thousandth time for the device.

        Args:
            values: the mean over the samples of the rank's batch, as of a loss: a number, or a tensor of one element;
                or one value for each row of the batch, shape (rows,).
            of: the batch of the values, or tensors of it, such as its labels, as the loader delivered them: they
                identify the rows that count. Or the number of samples, at the front, that count.

        Raises:
            TypeError: an argument has another type.
            ValueError: the tensors belong to no batch that a loader has delivered, or to several that count
                differently; or the number of values is neither 1 nor that of the batch's rows.
        """
        if not isinstance(values, torch.Tensor | Real):
            raise TypeError(f"values={values!r} is of type {type(values).__name__}; pass a number or a tensor")
        rows, samples = _count_rows(of, self.world)
        self.world.state.deliveries.evaluations.num_met += 1
        found = values.detach() if isinstance(values, torch.Tensor) else torch.tensor(values, device=HOST)
        if found.numel() != 1 and (found.ndim != 1 or len(found) != rows):
            raise ValueError(
                f"values of shape {tuple(found.shape)} for a batch of {rows} rows; pass the mean over its samples, or "
                f"one value for each row, of shape ({rows},)"
            )
        if not samples:
            return  # also for a loss that is NaN, since nothing counts
        found = found.float().reshape(-1)  # not every device has float64
        self._sums.append(found[0] * samples if len(found) == 1 else found[:samples].sum())
        self._count += samples
        if len(self._sums) == _HELD:
            self._add_up()

    def compute(self) -> float:
        """Return the mean over the samples of all ranks. A collective.

        Raises:
            ValueError: on all ranks, if no rank has added a sample.
        """
        with self.world.state.deliveries.evaluations.aside():  # `update` knows which loop it is for
            (total, *_), count = self._reduce_total()
        if not count:
            raise ValueError(f"the {type(self).__name__} holds no sample; call update(values, batch) in a loop first")
        return total / count

    def state_dict(self) -> dict[str, Any]:
        """The sum and the number of samples of all ranks; "rest" is what rounding took from the sum. A collective."""
        (total, *rest), count = self._reduce_total()
        return {"sum": total, "count": count, "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`, on any number of ranks; each of them calls it."""
        self.reset()
        if self.world.rank == 0:
            self._terms, self._count = [state["sum"], *state.get("rest", ())], int(state["count"])

    def _add_up(self) -> None:
        """Add the sums of batches to the total."""
        if self._sums:
            self._terms = _exact([*self._terms, *torch.stack(self._sums).tolist()])
            self._sums.clear()

    def _reduce_total(self) -> tuple[list[float], int]:
        """The terms of the total, the rounded total first, and the number of samples."""
        self._add_up()
        sent = [self._count, *_exact(self._terms)[:_TERMS]]
        sent += [0.0] * (1 + _TERMS - len(sent))
        with self.world.timeline.loop().span(REDUCE):
            found = self.world.comm.all_gather(torch.tensor(sent, dtype=torch.float64, device=HOST))
        counts, *terms = zip(*(each.tolist() for each in found), strict=True)
        return _exact(each for held in terms for each in held), int(sum(counts))


class Accuracy(Mean):
    """The fraction of all ranks' samples that are classified correctly, each counted once, 0 to 1.

    Used as `Mean`, with `update(scores, labels)`.
    """

    def update(self, values: torch.Tensor, of: torch.Tensor) -> None:  # type: ignore[override]
        """Add this rank's samples of a batch.

        Args:
            values: a score for each class, shape (rows, classes): the largest is the prediction; or the predicted
                class, integers of shape (rows,).
            of: the labels as the loader has delivered them, integers of shape (rows,).

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: the shapes are different, or the labels belong to no batch that a loader has delivered.
        """
        for name, each in (("values", values), ("of", of)):
            check_type(each, name, "pass a tensor", torch.Tensor)
        if values.ndim not in (1, 2) or values.shape[:1] != of.shape:
            raise ValueError(
                f"scores of shape {tuple(values.shape)} for labels of shape {tuple(of.shape)}; pass (rows, classes) or "
                "predictions (rows,), and labels (rows,)"
            )
        if values.shape[1:] == (1,) or (values.ndim == 1 and values.is_floating_point()):
            raise ValueError(
                f"values={values.dtype} of shape {tuple(values.shape)} are neither scores of several classes nor "
                "predicted classes; for two classes with one score, pass integers of shape (rows,): (scores > 0).long()"
            )
        predicted = values.argmax(dim=1) if values.ndim == 2 else values
        super().update(predicted == of, of)


def _exact(values: Iterable[float]) -> list[float]:
    """Floats whose exact sum is that of the values; the first one is that sum, rounded."""
    left = list(values)
    if not all(map(isfinite, left)):
        return [sum(left)]
    terms = [fsum(left)]
    while terms[-1]:
        left.append(-terms[-1])
        terms.append(fsum(left))
    return terms[:-1] or terms


def _count_rows(of: Any, world: World) -> tuple[int, int]:
    """The rows of a batch, and how many of them, at the front, are samples that count."""
    if isinstance(of, int) and not isinstance(of, bool):
        if of < 0:
            raise ValueError(f"of={of} is no number of samples; pass 0 or more, or tensors of the batch")
        return of, of
    try:
        rows = num_rows(of)
    except TypeError:
        raise TypeError(
            f"of={of!r} is neither tensors of the batch, with a row for each sample, nor a number of samples"
        ) from None
    deliveries = world.state.deliveries
    found = deliveries.find_rows(of, rows)
    samples = {batch.samples for batch in found}
    if not samples and deliveries.recent():
        raise ValueError(
            f"of= holds {rows} rows that belong to no batch of a prepared loader; prepare(loader), and pass the "
            "batch, or its labels, as it came, or the number of samples that count, loader.valid_samples"
        )
    if len(samples) > 1:
        raise ValueError("of= holds tensors of several batches that count differently; pass those of one")
    for batch in found:
        batch.note_metric()
    return rows, samples.pop() if samples else rows
