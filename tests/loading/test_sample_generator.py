"""The same batch again and again."""

from __future__ import annotations

import pytest
import torch

from unisono import SampleGenerator


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_loop_yields_the_same_object_count_times_even_when_nested(count):
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


@pytest.mark.parametrize(("error", "count"), [(TypeError, 2.5), (ValueError, -1)])
def test_a_wrong_count_is_refused(error, count):
    with pytest.raises(error, match=f"sample_count={count} is "):
        SampleGenerator("x", count)
