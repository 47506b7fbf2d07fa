"""Seeds that have nothing in common, and the process's generators, which come back as they were."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices.randomness import mixed, seed_all, seed_of, seeded

WORDS = st.integers() | st.text(alphabet="abc", max_size=3)


def states() -> list[Any]:
    _, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest]


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


@given(place=st.lists(WORDS, min_size=1, max_size=3))
def test_a_seed_is_a_function_of_its_place_that_every_generator_takes(place):
    seed = seed_of(*place)
    assert seed == seed_of(*place)
    assert 0 <= seed < 1 << 63
    torch.Generator().manual_seed(seed)


def test_a_seed_is_the_same_in_every_process():
    assert seed_of(3, 1, "samples") == 276644236280105213  # in all of them, whatever `hash` makes of a text there


def test_neighbouring_places_have_nothing_in_common():
    places = [(seed, epoch, kind) for seed in range(30) for epoch in range(30) for kind in ("samples", "workers")]
    found = [seed_of(*place) for place in places]
    assert len(set(found)) == len(found)
    assert seed_of(1, 23) != seed_of(12, 3)
    bits = [one ^ other for one, other in itertools.pairwise(found)]
    mean = sum(each.bit_count() for each in bits) / len(bits)
    assert 30 < mean < 33  # half of 63 bits change; five standard deviations are about half a bit


def test_mixing_is_the_finaliser_of_splitmix64():
    # The first outputs of Vigna's splitmix64.c for the seed 1234567, without their last bit.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mixed(1234567, place) for place in range(3)] == [number >> 1 for number in known]


def test_the_places_of_an_epoch_have_nothing_in_common():
    found = [mixed(seed_of(0, epoch, "samples"), place) for epoch in range(3) for place in range(10_000)]
    assert len(set(found)) == len(found)
    assert len({seed & 0xFFFFFFFF for seed in found}) > len(found) - 5, "numpy takes the lower half"


def test_seeding_sets_all_three_generators():
    found = []
    for seed in (7, 8, 7, (1 << 63) - 1):
        with seeded(0):
            seed_all(seed)
            found.append(draw())
    assert found[0] == found[2]
    assert len({number for each in found for number in each}) == 9


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_seeded_block_leaves_the_generators_as_they_were(ends):
    before = states()
    try:
        with seeded(5):
            first = draw()
            if ends == "badly":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert states() == before
    with seeded(5):
        assert draw() == first
    assert states() == before


def test_numpy_is_left_alone_where_it_is_not_imported(monkeypatch):
    before = states()
    monkeypatch.delitem(sys.modules, "numpy")
    with seeded(5):
        inside = random.random()
    monkeypatch.undo()
    assert states() == before
    with seeded(5):
        assert random.random() == inside
