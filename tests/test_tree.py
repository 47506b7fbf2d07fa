"""Mapping, measuring and cutting nested batches, against plain twins."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from batches import Encoding, FrozenSample, Lazy, Point, Row, Sample, ones, same
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from unisono.tree import batch_size, can_cut, leaves, nbytes, take, tree_map
from unisono.tree import tensors as tensors_of


def plus_one(leaf: Any) -> Any:
    return leaf + 1 if isinstance(leaf, torch.Tensor) else leaf


def plain_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The twin: rebuilds every container, and knows no sharing."""
    if isinstance(tree, Mapping):
        return type(tree)({key: plain_map(fn, value) for key, value in tree.items()})
    if isinstance(tree, Point):
        return Point(*(plain_map(fn, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(plain_map(fn, value) for value in tree)
    if dataclasses.is_dataclass(tree):
        return type(tree)(*(plain_map(fn, getattr(tree, field.name)) for field in dataclasses.fields(tree)))
    return fn(tree)


def plain_leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    plain_map(found.append, tree)
    return found


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return same(one, other)


tensors = st.builds(lambda rows, number: torch.full((rows, 2), float(number)), st.integers(0, 3), st.integers(0, 9))
plain = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.floats(allow_nan=False), st.booleans())
keys = st.text("abc", max_size=2)
trees = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(UserDict),
        st.builds(Point, inner, inner),
        st.builds(Sample, inner, inner, inner),
        st.builds(FrozenSample, inner, inner),
    ),
    max_leaves=12,
)


# Mapping.


@given(trees)
def test_a_tree_whose_leaves_all_stay_is_returned_as_it_is(tree):
    assert tree_map(lambda leaf: leaf, tree) is tree


@given(trees)
def test_mapping_agrees_with_the_plain_twin_and_leaves_the_source_alone(tree):
    before = copy.deepcopy(tree)
    assert equal(tree_map(plus_one, tree), plain_map(plus_one, before))
    assert equal(tree, before)


@given(trees)
def test_leaves_come_in_order_each_object_once(tree):
    once = {id(leaf): leaf for leaf in plain_leaves(tree)}
    assert [id(leaf) for leaf in leaves(tree)] == list(once)


def test_a_shared_leaf_is_visited_once_and_stays_shared():
    visited: list[Any] = []

    def visit(each):
        visited.append(each)
        return plus_one(each)

    leaf = ones()
    mapped = tree_map(visit, {"a": leaf, "b": [leaf], "c": Sample(leaf, leaf)})
    assert [each for each in visited if each is leaf] == [leaf]
    assert mapped["a"] is mapped["b"][0] is mapped["c"].image is mapped["c"].label


def test_values_a_mapping_makes_on_demand_are_not_confused_with_each_other():
    mapped = tree_map(lambda leaf: leaf[0].item() + 1, Lazy())  # each tensor is gone when the next is made
    assert [mapped[key] for key in range(8)] == list(range(1, 9))


def test_a_packed_sequence_a_class_and_a_text_are_leaves():
    tree = [pack_sequence([torch.ones(2)]), Sample, "text", b"bytes", range(3)]
    assert [id(leaf) for leaf in leaves(tree)] == [id(each) for each in tree]


# Looking into objects.


class Plain:
    def __init__(self, *held: Any) -> None:
        self.held = held
        self.own = self  # a cycle


class Slotted:
    __slots__ = ("__hidden", "unset")

    def __init__(self, held: Any) -> None:
        self.__hidden = held


class Modelled(torch.utils.data.Dataset):
    def __init__(self, held: Any) -> None:
        self.held = held


def ragged(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A nested tensor, which shares the memory of the first one."""
    return torch.nested.nested_tensor_from_jagged(first.view(-1), torch.tensor([0, 2, first.numel()]))


def in_itself(first: torch.Tensor, second: torch.Tensor) -> Any:
    items: list[Any] = [first, second]
    items.append(items)
    return Plain(items)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda one, other: Plain(one, {"deep": [other]}), 2),
        (lambda one, other: {"batch": Slotted(Plain(one)), "more": other}, 2),
        (lambda one, other: [Plain(Sample(one, "text")), Plain(Encoding({"ids": other}))], 2),
        (lambda one, other: Plain(deque([one]), SimpleNamespace(found=other)), 2),
        (lambda one, other: Plain(one, Row(items=other)), 2),
        (lambda one, other: PackedSequence(one.view(-1), torch.tensor([one.numel()])), 1),
        (lambda one, other: Plain(ragged(one, other)), 1),
        (in_itself, 2),
        (lambda one, other: (one, Plain(Modelled(other))), 1),
        (lambda one, other: (one, Plain(torch.nn.ParameterList([other]))), 1),
        (lambda one, other: (one, Plain([Plain() for _ in range(20_000)], other)), 1),
        (lambda one, other: (one, Sample, Plain(Sample), lambda: other), 1),
    ],
)
def test_tensors_are_found_in_objects_but_not_in_models_or_datasets(make, count):
    held = (ones(), ones())
    addresses = {each.untyped_storage().data_ptr() for each in tensors_of(make(*held)) if not each.is_nested}
    assert [each.untyped_storage().data_ptr() in addresses for each in held] == [True, count == 2]


def test_objects_stay_leaves_to_everything_else():
    held = Plain(ones())
    assert leaves([held]) == [held]
    assert tree_map(plus_one, [held])[0] is held
    assert (batch_size(held), can_cut(held), nbytes(held)) == (None, False, 0)


# Measuring.


@given(trees, st.integers(-2, 2))
def test_the_size_is_what_all_tensors_with_the_dimension_agree_on(tree, dim):
    sizes = {leaf.shape[dim] for leaf in plain_leaves(tree) if isinstance(leaf, torch.Tensor) and -2 <= dim < 2}
    assert batch_size(tree, dim) == (sizes.pop() if len(sizes) == 1 else None)


# Cutting.


@st.composite
def cuts(draw: Any) -> tuple[dict[str, Any], int, list[int]]:
    """A batch of `size` samples along dim 0, and the borders of a partition of it."""
    size = draw(st.integers(1, 7))
    width = draw(st.integers(1, 3))
    batch = {
        "images": torch.arange(size * width).reshape(size, width),
        "labels": torch.arange(size),
        "arrays": numpy.arange(size),
        "names": [f"sample {index}" for index in range(size)],
        "pairs": Point(torch.arange(size), tuple(range(size))),
        "sample": FrozenSample(torch.arange(size), "the whole batch's"),
        "scale": torch.tensor(2.0),
    }
    borders = draw(st.lists(st.integers(0, size), max_size=4))
    return batch, size, [0, *sorted(borders), size]


@given(cuts())
def test_the_parts_of_a_partition_add_up_to_the_batch(cut):
    batch, size, borders = cut
    parts = [take(batch, slice(start, stop)) for start, stop in itertools.pairwise(borders)]
    assert [batch_size(part) for part in parts] == [stop - start for start, stop in itertools.pairwise(borders)]
    assert torch.equal(torch.cat([part["images"] for part in parts]), batch["images"])
    assert torch.equal(torch.cat([part["labels"] for part in parts]), batch["labels"])
    assert numpy.concatenate([part["arrays"] for part in parts]).tolist() == list(range(size))
    assert [name for part in parts for name in part["names"]] == batch["names"]
    assert [number for part in parts for number in part["pairs"].y] == list(range(size))
    assert torch.equal(torch.cat([part["pairs"].x for part in parts]), batch["labels"])
    assert torch.equal(torch.cat([part["sample"].image for part in parts]), batch["labels"])
    for part in parts:  # what has no samples belongs to the whole batch
        assert (list(part), part["sample"].label) == (list(batch), "the whole batch's")
        assert part["scale"] is batch["scale"]


@pytest.mark.parametrize("dim", [1, -1])
def test_a_batch_is_cut_along_the_dimension_that_is_named(dim):
    batch = {"images": torch.arange(6).reshape(2, 3), "names": ["one", "two", "three"]}
    part = take(batch, slice(1, 3), dim)
    assert part["images"].tolist() == [[1, 2], [4, 5]]
    assert part["names"] == batch["names"]  # a list has its samples along dim 0


PACKED = pack_sequence([torch.ones(3), torch.ones(2)])

DOUBTFUL = {
    "text": "text",
    "no tensors": ["a", "b"],
    "a number": torch.tensor(1.0),
    "a plain number": {"loss": 1.5},
    "packed, after": [torch.zeros(2), PACKED],
    "packed, before": [PACKED, torch.zeros(2)],
    "sparse": [torch.zeros(2), torch.eye(2).to_sparse()],
    "an unknown object": [torch.zeros(2), object()],
    "one tensor a sample": [torch.zeros(5), torch.zeros(7), torch.zeros(3)],
    "as many tensors alike as samples": [torch.zeros(2), torch.ones(2)],
    "one dict a sample": (torch.zeros(2, 4), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}]),
    "two sizes": {"images": torch.zeros(4, 1), "classes": torch.zeros(5)},
}


@pytest.mark.parametrize("batch", DOUBTFUL.values(), ids=DOUBTFUL)
def test_a_batch_that_does_not_tell_what_a_sample_is_cannot_be_cut(batch):
    assert not can_cut(batch)
    with pytest.raises(ValueError, match=r"cannot be split: it does not say what one sample is"):
        take(batch, slice(0, 1))


# Bytes.

SHARED = torch.zeros(4)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (None, 0),
        ([object(), "text", b"12345"], 0),
        (numpy.zeros((2, 3)), 48),
        ((torch.zeros(10)[:3], torch.zeros(3, dtype=torch.int64), torch.zeros(0, 5)), 12 + 24),
        ({"x": SHARED, "again": [SHARED]}, 16),
        ({"x": [torch.zeros(2), {"y": numpy.zeros(1)}], "name": "abc"}, 8 + 8),
        (Sample(torch.zeros(2), "label", {"more": torch.zeros(1)}), 8 + 4),
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), 20),
        ([torch.eye(3).to_sparse(), torch.zeros(2)], 8),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_batchs_size_sums_its_leaves_and_counts_a_shared_one_once(batch, size):
    assert nbytes(batch) == size
