"""However samples are dealt to ranks and microbatches, the ledger's numbers make the mean over all of them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.deliveries import Deliveries
from unisono.parallel.ledger import Claim, Ledger

# Of each microbatch, how many samples each rank has, each at least one in all.
DEALT = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any), min_size=1, max_size=4)
)


def weights_of(dealt: list[list[int]], is_mean: bool) -> list[list[float]]:
    """What each rank's gradient of each microbatch weighs in the end: microbatches in rows, ranks in columns."""
    size = len(dealt[0])
    ledgers = [Ledger(size, math.inf, is_mean) for _ in range(size)]
    scaled = []
    for number, counts in enumerate(dealt):
        claims = [Claim(count, sum(counts)) for count in counts]
        for ledger, claim in zip(ledgers, claims, strict=True):
            ledger.enter(claim, number)
        scaled.append([claim.part(size) * ledger.scale(claim) for ledger, claim in zip(ledgers, claims, strict=True)])
    return [[each * ledger.factor() for each, ledger in zip(row, ledgers, strict=True)] for row in scaled]


@given(DEALT)
def test_the_mean_over_the_step_weighs_each_sample_the_same(dealt):
    total = sum(map(sum, dealt))
    for row, counts in zip(weights_of(dealt, is_mean=True), dealt, strict=True):
        assert row == pytest.approx([float(Fraction(count, total)) for count in counts])


@given(DEALT)
def test_the_sum_of_means_weighs_each_microbatch_the_same(dealt):
    for row, counts in zip(weights_of(dealt, is_mean=False), dealt, strict=True):
        assert row == pytest.approx([float(Fraction(count, sum(counts))) for count in counts])


@given(DEALT)
def test_what_each_rank_adds_to_each_loss_counts_once_in_the_mean_over_the_step(dealt):
    size, ledger = len(dealt[0]), Ledger(len(dealt[0]), math.inf)
    scales = []
    for number, counts in enumerate(dealt):
        claim = Claim(counts[0], sum(counts))
        ledger.enter(claim, number)
        scales.append(ledger.scale(claim))
    assert sum(scales) * size * ledger.factor() == pytest.approx(1)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
def test_batches_that_are_dealt_evenly_are_not_scaled(size, samples, count):
    ledger = Ledger(size, math.inf)
    for number in range(count):
        claim = Claim(samples, size * samples)
        ledger.enter(claim, number)
        assert claim.part(size) == ledger.scale(claim) == 1
    assert ledger.factor() == pytest.approx(1 / (size * count))


@given(DEALT)
def test_a_second_reduction_leaves_what_the_first_has_made_as_it_was(dealt):
    size, ledger = len(dealt[0]), Ledger(len(dealt[0]), math.inf)
    for number, counts in enumerate(dealt):
        ledger.enter(Claim(counts[0], sum(counts)), number)
    assert ledger.factor() * size / ledger.held_factor() == pytest.approx(1)


def test_several_losses_of_a_batch_count_it_once():
    ledger = Ledger(2, every=2)
    for key in ("first", "first", "second", "first"):
        ledger.enter(Claim(3, 4), key)
    assert (ledger.step.number, ledger.count, ledger.factor()) == (1, 2, 4 / (2 * 8))


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.zeros(1)])


def test_a_step_is_full_at_its_number_of_microbatches_or_at_the_end_of_a_loop(optimizer):
    deliveries, ends = Deliveries(), []
    loop = deliveries.begin(lambda: bool(ends))
    ledger, full = Ledger(1, every=3), []
    for place in range(5):
        batch = deliveries.add(loop, (), 2, 2)
        ends += [True] if place == 4 else []
        ledger.enter(Claim(2, 2, batch), batch)
        full.append(ledger.is_full())
        if full[-1]:
            ledger.close(optimizer)
    assert full == [False, False, True, False, True]
    assert ledger.step.number == 2


def test_batches_drawn_ahead_end_no_step():
    deliveries, ledger = Deliveries(), Ledger(1, every=3)
    loop = deliveries.begin(lambda: True)
    first, second = (deliveries.add(loop, (), 2, 2) for _ in range(2))
    ledger.enter(Claim(2, 2, first), first)
    assert not ledger.is_full()
    ledger.enter(Claim(2, 2, second), second)
    assert ledger.is_full()


def test_another_optimizer_on_the_same_batch_belongs_to_the_step_that_one_has_closed(optimizer):
    ledger = Ledger(2, every=1)
    ledger.enter(Claim(1, 2), "batch")
    ledger.close(optimizer)
    ledger.enter(Claim(1, 2), "batch")
    assert (ledger.step.number, ledger.count, ledger.is_full()) == (1, 1, True)
    ledger.enter(Claim(1, 2), "next")
    assert (ledger.step.number, ledger.count) == (2, 1)


def test_what_counts_nothing_anywhere_is_empty_and_scales_nothing():
    ledger = Ledger(2, every=2)
    ledger.enter(Claim(0, 0, is_given=True), "first")
    assert (ledger.is_empty, ledger.factor(), Claim(0, 0).part(2)) == (True, 0, 0)
    ledger.enter(Claim(3, 4, is_given=True), "second")
    assert (ledger.is_empty, ledger.factor()) == (False, 0.5)


def test_one_batch_has_one_weight_and_a_step_one_kind_of_weights():
    ledger = Ledger(2, every=2)
    ledger.enter(Claim(3, 4, is_given=True), "first")
    with pytest.raises(ValueError, match="one batch has the weights 3 and 2"):
        ledger.enter(Claim(2, 4, is_given=True), "first")
    with pytest.raises(ValueError, match="one microbatch of this step has a weight of its own, another one has none"):
        ledger.enter(Claim(2, 4), "second")


def test_another_number_of_microbatches_counts_from_the_next_step_on() -> None:
    ledger, full = Ledger(1, every=3), []
    for number in range(7):
        if number == 1:
            ledger.accumulate(2)
        ledger.enter(Claim(1, 1), number)
        full.append(ledger.is_full())
        if full[-1]:
            ledger.close(torch.optim.SGD([torch.ones(1)]))
    assert full == [False, False, True, False, True, False, True]
    ledger.accumulate(1)
    ledger.enter(Claim(1, 1), 8)
    assert ledger.is_full()
    assert not ledger.is_mean
