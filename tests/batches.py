"""Batches of every shape that a dataset may give."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: str
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    image: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    image: torch.Tensor
    label: str


class Encoding(UserDict):
    """A mapping with an attribute of its own, as tokenizers return."""

    def __init__(self, data: Any = None, source: str = "") -> None:
        super().__init__(data)
        self.source = source


class Row(MutableMapping):
    """A mapping of one's own, which keeps its items in an attribute."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Lazy(Mapping):
    """Makes its tensors when they are asked for, and keeps none."""

    def __init__(self, items: Mapping[int, torch.Tensor] | None = None) -> None:
        self._items = items

    def __getitem__(self, key: int) -> torch.Tensor:
        return torch.full((4,), float(key)) if self._items is None else self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class TensorList(list):
    """A list with an attribute, which its `__init__` asks for."""

    def __init__(self, name: str, *held: Any) -> None:
        super().__init__(held)
        self.name = name


def ones() -> torch.Tensor:
    return torch.ones(2, 3)


# For each container: how to make one, and how to look at what it holds, in order.
CONTAINERS: dict[str, tuple[Any, Any]] = {
    "a tensor": (ones, lambda moved: [moved]),
    "list": (lambda: [ones(), "a", None, 1.5], list),
    "tuple": (lambda: (ones(), "a"), list),
    "list subclass": (lambda: TensorList("boxes", ones(), 1), lambda moved: [*moved, moved.name]),
    "named tuple": (lambda: Point(ones(), "a"), lambda moved: [moved.x, moved.y]),
    "dict": (lambda: {"b": ones(), "a": 1}, lambda moved: [*moved, *moved.values()]),
    "OrderedDict": (lambda: OrderedDict(b=ones(), a=1), lambda moved: [*moved, *moved.values()]),
    "defaultdict": (
        lambda: defaultdict(list, b=ones()),
        lambda moved: [*moved, *moved.values(), moved.default_factory],
    ),
    "Counter": (lambda: Counter(a=2, b=1), lambda moved: [*moved, *moved.values()]),
    "UserDict": (lambda: UserDict(b=ones(), a=1), lambda moved: [*moved, *moved.values()]),
    "UserDict subclass": (
        lambda: Encoding({"ids": ones()}, "corpus"),
        lambda moved: [*moved, *moved.values(), moved.source],
    ),
    "a mapping of one's own": (lambda: Row(b=ones(), a=1), lambda moved: [*moved, *moved.values()]),
    "a read-only mapping": (lambda: MappingProxyType({"b": ones()}), lambda moved: [*moved, *moved.values()]),
    "dataclass": (lambda: Sample(ones(), "a"), lambda moved: [moved.image, moved.label, moved.extra]),
    "frozen dataclass": (lambda: FrozenSample(ones(), "a"), lambda moved: [moved.image, moved.label]),
    "slotted dataclass": (lambda: SlottedSample(ones(), "a"), lambda moved: [moved.image, moved.label]),
    "set": (lambda: {ones()}, list),
    "frozenset": (lambda: frozenset([ones()]), list),
    "nested": (
        lambda: {"points": [Point(ones(), ()), ([], {})], "sample": Sample(ones(), "a", {"deep": (ones(),)})},
        lambda moved: [moved["points"][0].x, moved["points"][1], moved["sample"].extra["deep"][0]],
    ),
}


def same(one: Any, other: Any) -> bool:
    """Whether two looks at a container show the same, tensors by value."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other
