"""`gather_for_metrics`: each sample exactly once, whatever was padded or repeated, in every order of calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, THREADS_4, scaling
from torch.utils.data import DataLoader, IterableDataset
from twin import loader_of, model, sgd

from unisono import Accelerator, DeviceLoader
from unisono.world import solo_world

MODES = [SOLO, THREADS_2, THREADS_3, THREADS_4, PROCESSES_2]


def numbers(count, batch):
    return DataLoader(torch.arange(count, device=HOST), batch_size=batch)


def in_order(gathered):
    return sorted(torch.cat([each.reshape(-1) for each in gathered]).tolist())


def per_step(accelerator, loader):
    with torch.no_grad():
        return in_order([accelerator.gather_for_metrics(batch) for batch in loader])


def once_after_the_loop(accelerator, loader):
    with torch.no_grad():
        return in_order([accelerator.gather_for_metrics(torch.cat(list(loader)))])


def after_a_training_loop(accelerator, loader):
    with torch.no_grad():
        outputs = torch.cat(list(loader))
    for _ in accelerator.prepare(numbers(40, 3)):
        pass
    return in_order([accelerator.gather_for_metrics(outputs)])


def inside_a_training_loop(accelerator, loader):
    found = []
    for batch in accelerator.prepare(numbers(17, 2)):
        found.append(accelerator.gather_for_metrics(batch))
        if len(found) % 2:
            with torch.no_grad():
                outputs = torch.cat(list(loader))
            gathered = in_order([accelerator.gather_for_metrics(outputs)])
    assert in_order(found) == list(range(17))
    return gathered


def every_few_steps(accelerator, loader):
    gathered, held = [], []
    with torch.no_grad():
        for number, batch in enumerate(loader):
            held.append(batch)
            if number % 3 == 2:
                gathered.append(accelerator.gather_for_metrics(torch.cat(held)))
                held = []
        if held:
            gathered.append(accelerator.gather_for_metrics(torch.cat(held)))
    return in_order(gathered)


ORDERS = [per_step, once_after_the_loop, after_a_training_loop, inside_a_training_loop, every_few_steps]


@settings(max_examples=25)
@given(st.integers(1, 21), st.integers(1, 4), st.sampled_from(MODES[:4]), st.sampled_from(["split", "pad"]))
def test_every_sample_comes_once_in_every_order_of_calls(count, batch, mode, tail):
    def body():
        accelerator = Accelerator()
        return [
            order(accelerator, accelerator.prepare(DeviceLoader(numbers(count, batch), tail=tail))) for order in ORDERS
        ]

    for gathered in mode.run(body):
        for order, found in zip(ORDERS, gathered, strict=True):
            assert found == list(range(count)), order.__name__


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_4), ids=str)
@pytest.mark.parametrize("tail", ["split", "pad"])
def test_every_sample_comes_once_of_a_short_last_round(mode, tail):
    def body():
        accelerator = Accelerator()
        return [order(accelerator, accelerator.prepare(DeviceLoader(numbers(13, 3), tail=tail))) for order in ORDERS]

    assert mode.run(body) == [[list(range(13))] * len(ORDERS)] * mode.ranks


def test_processes_count_every_sample_once():
    cases = list(itertools.product([1, 2, 3, 9, 13], [1, 3]))

    def body():
        accelerator = Accelerator()
        return [[order(accelerator, accelerator.prepare(numbers(*case))) for order in ORDERS] for case in cases]

    for gathered in PROCESSES_2.run(body):
        for (count, _), found in zip(cases, gathered, strict=True):
            assert found == [list(range(count))] * len(ORDERS)


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(*MODES), ids=str)
def test_a_loop_that_was_left_counts_what_it_received(mode):
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(numbers(6 * mode.ranks - 1, 2))
        found = []
        with torch.no_grad():
            for stop in (1, 2):
                outputs = []
                for number, batch in enumerate(loader, 1):
                    outputs.append(batch)
                    if number == stop:
                        break
                found.append(sorted(accelerator.gather_for_metrics(torch.cat(outputs)).tolist()))
        return found

    for found in mode.run(body):
        assert found == [list(range(2 * mode.ranks)), list(range(4 * mode.ranks))]


def test_a_broken_training_loop_and_the_next_gather_per_step():
    def body():
        accelerator = Accelerator()
        train, evaluation = accelerator.prepare(numbers(40, 3), numbers(7, 2))
        for _ in train:
            break
        return per_step(accelerator, evaluation)

    assert THREADS_3.run(body) == [list(range(7))] * 3


def test_nested_values_and_predictions_beside_labels():
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(numbers(7, 2))
        found, with_labels = [], []
        for batch in loader:
            made = accelerator.gather_for_metrics({"double": [2 * batch], "row": (batch[:, None] * torch.ones(3),)})
            found.append(made["double"][0])
            with_labels.append(accelerator.gather_for_metrics(batch))
            assert made["row"][0].shape == (len(made["double"][0]), 3)
        return in_order(found), in_order(with_labels)

    assert THREADS_4.run(body) == [([0, 2, 4, 6, 8, 10, 12], list(range(7)))] * 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(THREADS_3, PROCESSES_2), ids=str)
def test_streams_that_end_unevenly_count_every_sample_once(mode):
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=3))
        return per_step(accelerator, loader), once_after_the_loop(accelerator, loader)

    assert mode.run(body) == [(list(range(11)),) * 2] * mode.ranks


def test_training_goes_on_while_metrics_are_gathered():
    def body():
        accelerator, network = Accelerator(), model()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(13, 2))
        counts = []
        for inputs, _, _ in loader:
            optimizer.zero_grad()
            outputs = network(inputs)
            accelerator.backward(outputs.sum(1).mean())
            optimizer.step()
            counts.append(len(accelerator.gather_for_metrics(outputs.detach())))
        return counts

    assert THREADS_3.run(body) == [[6, 6, 1]] * 3


def test_bad_counts_are_errors_and_valid_samples_are_told():
    accelerator = Accelerator(world=solo_world())
    for batch in accelerator.prepare(numbers(5, 3)):
        for values, words in (
            (
                batch[:1],
                r"values with 1 samples are, on this rank or another, those of no last few batches, which had \[3",
            ),
            ({"a": batch, "b": batch[:1]}, r"values have \[1, 3\] rows"),
        ):
            with pytest.raises(ValueError, match=words):
                accelerator.gather_for_metrics(values)
        for values, words in (
            ([batch, "text"], "values hold a str"),
            ({"loss": batch.sum(), "all": batch}, "values hold a tensor of no dimension"),
            ({}, "hold no tensor"),
        ):
            with pytest.raises(TypeError, match=words):
                accelerator.gather_for_metrics(values)
        assert accelerator.gather_for_metrics(torch.arange(9), valid_samples=4).tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="valid_samples=10"):
            accelerator.gather_for_metrics(torch.arange(9), valid_samples=10)
        break


def test_a_bad_count_on_one_rank_wakes_the_others():
    def body():
        accelerator = Accelerator()
        for batch in accelerator.prepare(numbers(4, 2)):
            accelerator.gather_for_metrics(batch[: 1 + accelerator.world.rank])

    for mode in (THREADS_2, PROCESSES_2):
        with pytest.raises(ValueError, match="samples are, on this rank or another, those of no last few batches"):
            mode.run(body)


def test_what_may_be_of_two_loops_that_count_differently_is_an_error_while_the_second_runs():
    """Four samples of the evaluation loop, of which one is repeated, or the present batch of the training loop."""

    def body():
        accelerator = Accelerator()
        evaluation, train = accelerator.prepare(DeviceLoader(numbers(7, 4), tail="pad"), numbers(8, 4))
        with torch.no_grad():
            outputs = torch.cat(list(evaluation))
        for _ in train:
            with pytest.raises(ValueError, match=r"may be those of several loops, and 4 or \d of them count here"):
                accelerator.gather_for_metrics(outputs)
        assert sorted(accelerator.gather_for_metrics(outputs).tolist()) == list(range(7))

    THREADS_2.run(body)
