"""Which share of the samples a step is told, whatever loops stand around it."""

from __future__ import annotations

import logging

import pytest
import torch

from unisono.window import Window, warn_of_unequal_shares


@pytest.fixture
def window() -> Window:
    return Window()


OPTIMIZER, OTHER = torch.optim.SGD([torch.zeros(1)]), torch.optim.SGD([torch.zeros(1)])


def share(window: Window, optimizer: object = OPTIMIZER) -> tuple[float, int] | None:
    told = window.share_for(optimizer)
    return None if told is None else (told.part, told.batches)


def test_a_step_gets_the_share_of_the_batches_since_the_last_step(window):
    loop = window.begin()
    loop.add(2, 8)
    assert share(window) == (0.25, 1)
    loop.add(1, 2)
    assert share(window) == (0.5, 1)
    loop.add(1, 4)
    loop.add(1, 4)
    assert share(window) == (0.25, 2)


def test_two_optimizers_on_one_batch_get_the_same_share(window):
    loop = window.begin()
    loop.add(2, 8)
    loop.add(3, 4)
    assert share(window) == (5 / 12, 2)
    loop.add(1, 8)
    assert share(window) == share(window) == (0.125, 1)
    assert share(window, OTHER) == (6 / 20, 3), "it has not stepped before"


def test_a_loop_of_evaluation_inside_the_training_loop_changes_nothing(window):
    train = window.begin()
    train.add(2, 8)
    evaluation = window.begin()
    evaluation.add(9, 10)
    window.end(evaluation)
    assert share(window) == (0.25, 1)


def test_a_loop_between_two_epochs_changes_nothing_with_gradients_or_without(window):
    for epoch in range(3):
        evaluation = window.begin()
        with torch.set_grad_enabled(epoch == 1):
            evaluation.add(9, 10)
        window.end(evaluation)
        train = window.begin()
        train.add(2, 8)
        assert share(window) == (0.25, 1)
        window.end(train)


def test_what_is_left_of_a_loop_can_be_stepped_on_after_it_and_only_once(window):
    loop = window.begin()
    loop.add(2, 8)
    window.end(loop)
    window.end(loop)
    with torch.no_grad():
        evaluation = window.begin()
        evaluation.add(9, 10)
        window.end(evaluation)
    assert share(window) == (0.25, 1)
    assert share(window) is None


def test_nothing_is_known_without_a_loader_or_with_one_that_does_not_tell(window):
    assert share(window) is None
    loop = window.begin()
    assert share(window) is None
    loop.add(3, None)
    assert share(window) is None


def test_unequal_shares_between_two_steps_are_weighted_by_their_sum_and_told_once(window, caplog):
    warn_of_unequal_shares.cache_clear()
    loop = window.begin()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loop.add(4, 8)
            loop.add(1, 5)
            assert share(window) == (5 / 13, 2)
    (record,) = caplog.records
    assert "not all dealt in one proportion" in record.message


def test_the_mark_is_that_of_the_last_batch(window):
    loop = window.begin()
    loop.add(1, 2, mark=7)
    loop.add(1, 2, mark=8)
    told = window.share_for(OPTIMIZER)
    assert told is not None
    assert told.mark == 8


def rows(loop, count):
    told = loop.last_rows(count)
    return None if told is None else (told.counted, told.batches)


def test_rows_of_the_last_batches_are_told_by_their_number():
    loop = Window().begin()
    loop.add(3, 6)
    loop.add(2, 3, repeated=1)
    loop.add(0, 1, repeated=2)
    assert rows(loop, 2) == ([], 1)
    assert rows(loop, 5) == ([0, 1], 2)
    assert rows(loop, 8) == ([0, 1, 2, 3, 4], 3)
    assert [rows(loop, count) for count in (0, 1, 3, 9)] == [None] * 4
    assert loop.recent_rows() == [3, 3, 2]


def test_the_loop_that_received_a_batch_last_comes_first(window):
    train = window.begin()
    train.add(2, 4)
    evaluation = window.begin()
    evaluation.add(1, 1)
    window.end(evaluation)
    assert window.recent() == [evaluation, train]
    train.add(2, 4)
    assert window.recent() == [train, evaluation]
    assert (train.is_open, evaluation.is_open) == (True, False)


def test_the_latest_batch_is_the_open_loops_or_that_of_the_loop_that_ended_last(window):
    assert window.latest() is None
    train = window.begin(lambda: True)
    assert window.latest() is None
    train.add(2, 4, mark=5)
    with torch.no_grad():
        evaluation = window.begin()
        evaluation.add(1, 1)
    assert window.latest().samples == 2
    window.end(evaluation)
    latest = window.latest()
    assert (latest.samples, latest.total, latest.mark, latest.is_last(), latest.is_over) == (2, 4, 5, True, False)
    window.end(train)
    assert window.latest().key == latest.key
    assert window.latest().is_over


def test_a_step_belongs_to_the_open_training_loop_that_delivered_last(window):
    train, other = window.begin(), window.begin()
    with torch.no_grad():
        evaluation = window.begin()
        evaluation.add(1, 1)
    other.add(1, 4)
    train.add(3, 4)
    with torch.no_grad():
        evaluation.add(1, 1)
    assert window.latest().samples == 3
    assert window.share_for(OPTIMIZER).part == 0.75
    window.end(train)
    window.end(other)
    assert window.latest().is_over
