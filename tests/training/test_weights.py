"""`unisono.backward`: what gradients stand for, counted without an Accelerator."""

from __future__ import annotations

import pytest
import torch
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, each_of, scaling
from torch import nn

from unisono import Accelerator, DeviceLoader, backward, current_world, optimizer_step, use_world
from unisono.world import solo_world

pytestmark = pytest.mark.any_family


def host(count):
    """A batch in main memory, as data sets lie: other threads read it."""
    return torch.arange(float(count), device=HOST)


mode = each_of(scaling(SOLO, THREADS_3, PROCESSES_2))


@pytest.fixture(autouse=True)
def world():
    """A world of one that no other test has counted in."""
    with use_world(solo_world()) as fresh:
        yield fresh


def one():
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return weight, torch.optim.SGD([weight], lr=1.0)


def applied(weight, optimizer, *losses, **options):
    """The gradient that a step applies, of `weight` times each number."""
    for loss in losses:
        number, given = loss if isinstance(loss, tuple) else (loss, None)
        backward((weight * number).sum(), given)
    optimizer_step(optimizer, **options)
    gradient = weight.grad.item()
    optimizer.zero_grad()
    return gradient


def test_microbatches_without_a_loader_count_the_same(mode):
    def body():
        weight, optimizer = one()
        rank = current_world().rank
        return [applied(weight, optimizer, *[rank + number for number in range(count)]) for count in (1, 2, 3)]

    mean = (mode.ranks - 1) / 2
    for found in mode.run(body):
        assert found == pytest.approx([mean, mean + 0.5, mean + 1.0])


def test_given_weights_take_the_place_of_samples(mode):
    def body():
        weight, optimizer = one()
        rank = current_world().rank
        both = applied(weight, optimizer, (1.0, 2 + rank), (4.0, torch.tensor(1)))
        return both, applied(weight, optimizer, (float(rank), 1 + rank))

    ranks = range(mode.ranks)
    first = (sum(2 + rank for rank in ranks) + 4 * mode.ranks) / sum(3 + rank for rank in ranks)
    second = sum(rank * (1 + rank) for rank in ranks) / sum(1 + rank for rank in ranks)
    for found in mode.run(body):
        assert found == pytest.approx((first, second))


def test_a_step_whose_weights_are_zero_everywhere_is_skipped_on_all_ranks(mode):
    def body():
        weight, optimizer = one()
        assert applied(weight, optimizer, (3.0, 0)) == 0
        kept = weight.item()
        return kept, applied(weight, optimizer, (5.0, 2)), current_world().timeline.loop().counts["skipped steps"]

    assert mode.run(body) == [(1.0, 5.0, 1)] * mode.ranks


@pytest.mark.parametrize(
    ("weight", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (True, TypeError), ("3", TypeError), (torch.ones(2), TypeError)],
)
def test_what_is_no_weight_is_an_error(weight, error):
    with pytest.raises(error, match="weight="):
        backward(one()[0].sum(), weight)


def test_weights_for_some_microbatches_only_are_an_error():
    weight, _ = one()
    backward(weight.sum(), 2)
    with pytest.raises(ValueError, match=r"another one has none; pass backward\(..., weight=\)"):
        backward(weight.sum())


def test_losses_of_one_batch_count_it_once_and_have_one_weight():
    def body():
        weight, optimizer = one()
        for numbers in DeviceLoader([torch.ones(4)], split="global"):
            for factor in (2, 5):
                backward((weight * numbers).mean() * factor, 3)
            with pytest.raises(ValueError, match="one batch has the weights 3 of 3 and 5 of 5"):
                backward(weight.sum(), 5)
        optimizer_step(optimizer)
        return weight.grad.item()

    assert SOLO.run(body) == [7]


def test_a_second_optimizer_on_the_same_batch_steps_on_the_same_gradients(mode):
    def body():
        (weight, first), (other, second) = one(), one()
        for numbers in DeviceLoader([torch.arange(5.0)] * 2, split="global"):
            backward((weight * numbers).mean() + 2 * (other * numbers).mean())
            optimizer_step(first)
            optimizer_step(second)
        return weight.grad.item(), other.grad.item()

    for found in mode.run(body):
        assert found == pytest.approx((4, 8))


def test_a_loss_that_may_be_of_two_unequally_counting_batches_is_an_error():
    def body():
        weight, _ = one()
        batches = list(DeviceLoader([host(4), host(3)], split="global"))
        with pytest.raises(ValueError, match=r"may be the mean over .*unisono\.backward\(loss, batch=batch\)"):
            backward((weight * batches[0]).mean())

    THREADS_2.run(body)


@pytest.mark.parametrize("loss", ["loss", 0.5, None])
def test_a_loss_is_a_tensor(loss):
    for call in (backward, Accelerator().backward):
        with pytest.raises(TypeError, match=r"loss=.* is of type .*; pass the tensor that the loss function returned"):
            call(loss)
