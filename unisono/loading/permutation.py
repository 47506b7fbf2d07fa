"""A shuffled order whose parts are computed where they are needed, in memory that does not depend on its length.

`torch.randperm(10**10)` takes 80 GB on each of 16,384 ranks. Here index number i is a function of (i, key): a Feistel
network (Luby and Rackoff, 1988) permutes the 2**b numbers of b bits, the fewest bits that hold the length n, and cycle
walking (Black and Rogaway, 2002) makes that a permutation of the first n.

*Proof that each index comes exactly once, for every n and key.* A round replaces (left, right) by (left ^ f(right),
right), or the other half likewise; whatever f is, it is its own inverse, so the network P is a bijection of
range(2**b). Let x < n, and walk x, P(x), P(P(x)), ...: since P is a bijection of a finite set, the walk comes back to
x, so it does meet a first number below n after x. Call that Q(x). If Q(x) = Q(y) after j <= k steps, then x is where y
is after k - j steps; x is below n, and y's walk ends at the first such number, so k = j, and x = y. Hence Q is
injective on range(n), and so a permutation of it.

More than half of the 2**b numbers are below n, unless n is small, so a walk has fewer than two steps on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import chain
from typing import Any, overload

import numpy
import numpy.typing
import torch
from numpy import uint64
from torch.utils.data import Sampler

from unisono.devices.randomness import mixed

_ROUNDS = 8  # four are enough for wide halves, as Luby and Rackoff show; the halves of a short order are narrow
_CHUNK = 8192  # places that are computed at once: all of it stays in the cache of a core
_LEAST_BITS = 6  # an order of few: the halves of fewer bits have too few functions, and not all orders would come
_Numbers = numpy.typing.NDArray[uint64]

# Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_FIRST, _SECOND = uint64(0xBF58476D1CE4E5B9), uint64(0x94D049BB133111EB)
_SHIFT, _HALF = uint64(29), uint64(32)


class Permutation(Sequence[int]):
    """The numbers below `length` in the order of a key. Slices are permutations' parts, computed when they are read.

    Args:
        length: of the whole order.
        key: 63 bits; another key is another order.
        places: which of the order's places this part has; None: all.
    """

    def __init__(self, length: int, key: int, places: range | None = None) -> None:
        self._length, self._key = length, key
        self._places = range(length) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Permutation: ...
    def __getitem__(self, place: int | slice) -> int | Permutation:
        if isinstance(place, slice):
            return Permutation(self._length, self._key, self._places[place])
        return int(self._walk(numpy.array([self._places[place]], uint64))[0])

    def __iter__(self) -> Iterator[int]:
        chunks = (self._places[begin : begin + _CHUNK] for begin in range(0, len(self), _CHUNK))
        numbers = (numpy.arange(each.start, each.stop, each.step).astype(uint64) for each in chunks)
        return chain.from_iterable(self._walk(each).tolist() for each in numbers)

    def _walk(self, ends: _Numbers) -> _Numbers:
        bits = max((self._length - 1).bit_length(), _LEAST_BITS)
        keys = [uint64(mixed(self._key, step)) for step in range(_ROUNDS)]
        walking: Any = slice(None)
        while len(numbers := ends[walking]):
            ends[walking] = numbers = _network(numbers, bits, keys)
            walking = numpy.flatnonzero(ends >= uint64(self._length))
        return ends


def _network(numbers: _Numbers, bits: int, keys: Sequence[uint64]) -> _Numbers:
    """The permutation of all numbers of `bits` bits."""
    low = uint64(bits // 2)
    masks = uint64((1 << (bits - bits // 2)) - 1), uint64((1 << bits // 2) - 1)
    halves = numbers >> low, numbers & masks[1]
    for step, key in enumerate(keys):
        changed = halves[step % 2]
        changed ^= _hashed(halves[1 - step % 2], key) & masks[step % 2]
    return (halves[0] << low) | halves[1]


def _hashed(half: _Numbers, key: uint64) -> _Numbers:
    """32 bits, each of which depends on all of both; arithmetic of numpy's arrays wraps."""
    state = (half + key) * _FIRST
    state ^= state >> _SHIFT
    state *= _SECOND
    return state >> _HALF


class IndexedSampler(Sampler[int]):
    """Shuffles like torch's RandomSampler, but holds no list of all indices: for datasets of any length.

    A rank computes the indices of its own batches only, at any position of the epoch, in a few microseconds each. As
    with RandomSampler, each index comes exactly once, the order depends on (seed, epoch) alone, and it can be resumed
    at any position with another number of ranks; it is another order than RandomSampler's.

        loader = DeviceLoader(DataLoader(dataset, batch_size=64, sampler=IndexedSampler(dataset)))

    Args:
        data_source: the dataset, or anything of its length.
        generator: as RandomSampler's: a plain DataLoader draws from it in each epoch, and a loader of this package
            takes its seed.
    """

    def __init__(self, data_source: Sized, generator: torch.Generator | None = None) -> None:
        self.data_source = data_source
        self.generator = generator

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.generator))

    def order(self, generator: torch.Generator | None) -> Permutation:
        """The order of an epoch, whose key is drawn from a generator; None: from torch's own."""
        generator = generator or torch.default_generator
        key: Any = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        return Permutation(len(self), key.item())
