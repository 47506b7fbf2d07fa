"""The same batch again and again."""

from __future__ import annotations

import re

import pytest
import torch

from unisono import DeviceLoader, SampleGenerator


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_loop_gives_the_very_object_that_many_times_also_within_another(count):
    data = (torch.zeros(2), "label")
    generator = SampleGenerator(data, count)
    assert len(generator) == count
    for _ in range(3):
        assert [id(each) for each in generator] == [id(data)] * count
    assert sum(1 for _ in generator for _ in generator) == count**2


def test_it_is_an_iterator_with_a_counter_of_its_own():
    generator = SampleGenerator("x", 2)
    assert next(generator) == "x"
    assert list(generator) == ["x", "x"]
    assert next(generator) == "x"
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(generator)
    assert list(generator) == ["x", "x"]


def test_it_is_a_loader():
    loader = DeviceLoader(SampleGenerator(torch.ones(4), 7))
    assert len(loader) == 7
    for _ in range(2):
        assert [len(batch) for batch in loader] == [4] * 7


@pytest.mark.parametrize(
    ("error", "words", "count"),
    [
        (TypeError, "sample_count=True is of type bool; pass an integer", True),
        (TypeError, "sample_count=2.5 is of type float", 2.5),
        (TypeError, "sample_count=None is of type NoneType", None),
        (ValueError, "sample_count=-1 is too small; pass an integer of at least 0", -1),
    ],
)
def test_a_wrong_count_is_refused(error, words, count):
    with pytest.raises(error, match=re.escape(words)):
        SampleGenerator("x", count)
