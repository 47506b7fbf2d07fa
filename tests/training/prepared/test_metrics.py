"""`gather_for_metrics`: each sample exactly once, whatever was padded or repeated, in every order of calls."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, THREADS_4, scaling
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from unisono import Accelerator, DeviceLoader, Mean, SampleGenerator
from unisono.world import solo_world, use_world

MODES = [SOLO, THREADS_2, THREADS_3, THREADS_4]


def numbers(count, batch):
    return DataLoader(torch.arange(count, device=HOST), batch_size=batch)


def in_order(gathered):
    return sorted(torch.cat([each.reshape(-1) for each in gathered]).tolist())


def per_step(accelerator, loader):
    with torch.no_grad():
        return in_order([accelerator.gather_for_metrics(batch) for batch in loader])


def kept_until_the_end(accelerator, loader):
    with torch.no_grad():
        kept = torch.cat([batch[: loader.valid_samples] for batch in loader])
    return in_order([accelerator.gather_for_metrics(kept, valid_samples=len(kept))])


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
            gathered = per_step(accelerator, loader)
    assert in_order(found) == list(range(17))
    return gathered


KNOWN = [per_step, kept_until_the_end, inside_a_training_loop]
ORDERS = [*KNOWN, once_after_the_loop, after_a_training_loop]  # these two are errors where a sample is repeated
UNKNOWN = "it is unknown which of these"


def told(order, accelerator, loader):
    try:
        return order(accelerator, loader)
    except ValueError as error:
        return str(error)


@settings(max_examples=12)
@given(st.integers(1, 21), st.integers(1, 4), st.sampled_from(MODES), st.sampled_from(["split", "pad"]))
def test_every_sample_comes_once_in_every_order_of_calls(count, batch, mode, tail):
    with use_world(solo_world()):  # in which no example before has left a loop
        check_all_orders(mode, count, batch, tail)


def test_computed_values_that_may_be_of_another_loop_or_batch_are_an_error():
    def body():
        accelerator = Accelerator()
        uneven, short, even, large = (
            accelerator.prepare(DeviceLoader(numbers(*size), tail="pad")) for size in ((11, 3), (5, 2), (12, 3), (8, 4))
        )

        def is_unknown(values):
            with pytest.raises(ValueError, match=UNKNOWN):
                accelerator.gather_for_metrics(values)

        with torch.no_grad():
            whole = torch.cat(list(short))
            for _ in large:
                is_unknown(whole)
            for one, other in zip(uneven, even, strict=True):
                accelerator.gather_for_metrics(other)
                last = one
            is_unknown(last + 0)
            found = accelerator.gather_for_metrics(last)
            drawn = list(uneven)
            assert len(accelerator.gather_for_metrics(drawn[0])) == 6
            is_unknown(drawn[0] + 0)
        return found.tolist(), accelerator.gather_for_metrics(last + 0, valid_samples=2).tolist()

    assert THREADS_2.run(body) == [([6, 7, 8, 9, 10], [6, 7, 9, 10])] * 2


def test_a_loop_of_which_a_mean_was_taken_makes_the_next_one_not_doubtful():
    def body():
        accelerator, mean = Accelerator(), Mean()
        first, second = (accelerator.prepare(DeviceLoader(numbers(11, 3), tail="pad")) for _ in range(2))
        with torch.no_grad():
            for batch in first:
                mean.update(batch.float(), batch)
            return mean.compute(), in_order([accelerator.gather_for_metrics(batch + 0) for batch in second])

    assert THREADS_2.run(body) == [(5.0, list(range(11)))] * 2


def check_all_orders(mode, count, batch, tail):
    def body():
        accelerator = Accelerator()
        loaders = [accelerator.prepare(DeviceLoader(numbers(count, batch), tail=tail)) for _ in ORDERS]
        return [told(order, accelerator, loader) for order, loader in zip(ORDERS, loaders, strict=True)]

    for found in mode.run(body):
        assert found[: len(KNOWN)] == [list(range(count))] * len(KNOWN)
        assert all(each == list(range(count)) or each.startswith(UNKNOWN) for each in found[len(KNOWN) :])
        if count % (batch * mode.ranks) == 0:  # the first of these is known as well
            assert found[len(KNOWN)] == list(range(count))


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_4, PROCESSES_2), ids=str)
@pytest.mark.parametrize("tail", ["split", "pad"])
def test_every_sample_comes_once_of_a_short_last_round(mode, tail):
    check_all_orders(mode, 13, 3, tail)


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_3, PROCESSES_2), ids=str)
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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(THREADS_3, PROCESSES_2), ids=str)
def test_streams_that_end_unevenly_count_every_sample_once(mode):
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=3))
        return per_step(accelerator, loader), kept_until_the_end(accelerator, loader)

    assert mode.run(body) == [(list(range(11)),) * 2] * mode.ranks


def test_bad_counts_are_errors_and_valid_samples_are_told():
    accelerator = Accelerator(world=solo_world())
    for batch in accelerator.prepare(numbers(5, 3)):
        with pytest.raises(ValueError, match=r"values have \[1, 3\] rows"):
            accelerator.gather_for_metrics({"a": batch, "b": batch[:1]})
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


def ahead(batches, number):
    """As prefetchers do: a batch comes when so many further ones were drawn."""
    held = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > number:
            yield held.popleft()
    yield from held


def doubling(accelerator):
    with HOST:
        network = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(network.weight, 2.0)
    return accelerator.prepare(network)


def of_labels(accelerator, network, batch):
    return accelerator.gather_for_metrics(batch)


def of_outputs(accelerator, network, batch):
    return accelerator.gather_for_metrics({"pairs": [network(batch[:, None]).detach()]})["pairs"][0][:, 0] / 2


def of_a_nesting(accelerator, network, batch):
    _, (labels,) = accelerator.gather_for_metrics((network(batch[:, None].double()).argmax(1), [batch]))
    return labels


def floats(count, batch):
    return DataLoader(torch.arange(count, device=HOST).double(), batch_size=batch)


@pytest.mark.parametrize(
    ("mode", "tail", "has_gradients"),
    [
        (SOLO, "pad", False),
        (THREADS_2, "split", True),
        (THREADS_3, "pad", True),
        (PROCESSES_2, "pad", False),
        (THREADS_2, "split", False),
    ],
    ids=str,
)
def test_labels_and_outputs_count_once_however_far_ahead_batches_are_drawn(mode, tail, has_gradients):
    def body():
        accelerator = Accelerator()
        network = doubling(accelerator)
        found = []
        for count, number, values in itertools.product((13, 18, 19), (0, 2, 99), (of_labels, of_outputs, of_a_nesting)):
            loader = accelerator.prepare(DeviceLoader(floats(count, 3), tail=tail))
            with torch.set_grad_enabled(has_gradients):
                gathered = [values(accelerator, network, batch).detach() for batch in ahead(loader, number)]
            found.append(in_order(gathered) == list(range(count)))
        return found

    assert mode.run(body) == [[True] * 27] * mode.ranks


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_in_any_order_of_calls_labels_count_once(mode):
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DeviceLoader(numbers(13, 3), tail="pad"))
        next(iter(loader))
        with torch.no_grad():
            drawn = list(loader)
            for _ in loader:
                backwards = in_order([accelerator.gather_for_metrics(batch) for batch in reversed(drawn)])
            twice = in_order([accelerator.gather_for_metrics(batch) for batch in drawn * 2])
        return backwards, twice

    once = list(range(13))
    assert mode.run(body) == [(once, sorted(once * 2))] * mode.ranks


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_labels_of_two_loaders_side_by_side_count_as_their_own_do(mode):
    def body():
        accelerator = Accelerator()
        first, second = (accelerator.prepare(DeviceLoader(numbers(*size), tail="pad")) for size in ((12, 3), (11, 3)))
        with torch.no_grad():
            pairs = list(zip(first, second, strict=True))
        return [in_order([accelerator.gather_for_metrics(pair[place]) for pair in pairs]) for place in (0, 1)]

    assert mode.run(body) == [[list(range(12)), list(range(11))]] * mode.ranks


def test_values_of_unequally_counting_batches_are_an_error_on_all_ranks():
    def body():
        accelerator = Accelerator()
        first, second = (accelerator.prepare(DeviceLoader(numbers(*size), tail="pad")) for size in ((12, 3), (11, 3)))
        *_, pair = zip(first, second, strict=True)
        with pytest.raises(ValueError, match=r"come from several batches.*pass valid_samples"):
            accelerator.gather_for_metrics(pair)
        return len(accelerator.gather_for_metrics(pair, valid_samples=1)[0])

    assert THREADS_2.run(body) == [2] * 2


def test_training_metrics_count_once_while_evaluation_runs_inside():
    def body():
        accelerator = Accelerator()
        network = doubling(accelerator)
        train, evaluation = (
            accelerator.prepare(DeviceLoader(floats(*size), tail="pad")) for size in ((13, 3), (11, 3))
        )
        seen = []
        for batch in ahead(train, 1):
            outputs = network(batch[:, None])
            with torch.no_grad():
                assert in_order([of_labels(accelerator, None, each) for each in evaluation]) == list(range(11))
                assert in_order(of_outputs(accelerator, network, each) for each in evaluation) == list(range(11))
            seen.append(accelerator.gather_for_metrics(outputs.detach()) / 2)
        return in_order(seen)

    assert THREADS_2.run(body) == [list(range(13))] * 2


@settings(max_examples=40)
@given(
    st.integers(1, 19),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(MODES[:3]),
    st.sampled_from(["split", "pad"]),
)
def test_computed_values_count_once_or_are_an_error_that_names_the_way_out(count, batch, number, every, mode, tail):
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DeviceLoader(numbers(count, batch), tail=tail))
        gathered, held = [], []
        try:
            with torch.no_grad():
                for each in ahead(loader, number):
                    held.append(each + 0)
                    if len(held) == every:
                        gathered.append(accelerator.gather_for_metrics(torch.cat(held)))
                        held = []
                if held:
                    gathered.append(accelerator.gather_for_metrics(torch.cat(held)))
        except ValueError as error:
            assert number or every > 1, "in a straight loop all is known"
            return str(error)
        return in_order(gathered)

    with use_world(solo_world()):  # in which no example before has left a loop
        results = mode.run(body)
    for found in results:
        assert found == list(range(count)) or "pass valid_samples" in found


@pytest.mark.parametrize("mode", [SOLO, THREADS_3], ids=str)
def test_batches_of_the_same_tensors_count_once_or_are_an_error(mode):
    """The last round of one sample has it on the first rank; on the others, the same tensor does not count."""

    def body():
        accelerator = Accelerator()
        with HOST:
            loader = accelerator.prepare(SampleGenerator(torch.ones(1), 7))
        with torch.no_grad():
            straight = len(torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]))
            drawn = list(loader)
            try:
                at_last = len(torch.cat([accelerator.gather_for_metrics(batch) for batch in drawn]))
            except ValueError as error:
                return straight, str(error)
        return straight, at_last

    for straight, at_last in mode.run(body):
        assert straight == 7
        assert at_last == 7 or ("pass valid_samples" in at_last and mode.ranks > 1)
