"""The batches of indices of an epoch: a function of (seed, epoch), starting at any sample.

Samplers and batch samplers keep their meaning. One with a generator draws from one that is seeded for the epoch; while
the order of another is drawn, the process's generators are seeded. One with `set_epoch` receives the epoch. If one
continues beyond its length, or the dataset's if its own is unknown, the remaining indices are drawn when needed, from
the process's generators in their current state.

No sample is loaded here, so resuming late in an epoch costs no more than drawing the order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from unisono.devices.randomness import seed_of, seeded
from unisono.loading.permutation import IndexedSampler, Permutation

_told: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The epochs of samplers with `set_epoch` as this module has left them."""

_NO_GENERATOR = object()
_END = object()
_CHUNK = 1024  # indices that are made numbers of Python's at once
_AT_ONCE = 1 << 22  # indices; some seconds and 100 MB


def epoch_asked_of(*samplers: Any) -> int | None:
    """The epoch that the user has set on one of these samplers since this module has; None if there is none."""
    for sampler in samplers:
        epoch = getattr(sampler, "epoch", None)
        with suppress(TypeError):  # it supports no weak references, or has no hash
            if callable(getattr(sampler, "set_epoch", None)) and type(epoch) is int and epoch != _told.get(sampler, 0):
                return epoch
    return None


def batches_of(
    sampler: Any, batch_sampler: Any, seed: int, epoch: int, offset: int = 0, length: int = 0
) -> tuple[Iterator[Sequence[Any]], int | None]:
    """The batches of indices of one epoch after its first `offset` samples, and the size of a complete one, if it is
    known in advance. Without a batch sampler each index is a batch of one."""
    draw = _Draw(seed_of(seed, epoch), epoch, length)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return _behind(draw(batch_sampler, list), offset), None
    size, drop_last = (1, False) if batch_sampler is None else (batch_sampler.batch_size, batch_sampler.drop_last)
    order = draw.indices(sampler)
    if isinstance(order, Permutation):
        end = len(order) - (len(order) - offset) % size if drop_last else len(order)
        # Their indices are computed by the ranks that load them.
        return (order[start : min(start + size, end)] for start in range(offset, end, size)), size
    if isinstance(order, torch.Tensor):
        order = chain.from_iterable(map(torch.Tensor.tolist, order[offset:].split(_CHUNK)))
    else:
        order = order[offset:] if isinstance(order, Sequence) else islice(order, offset, None)
    return _groups(iter(order), size, drop_last), size


def _groups(order: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(order, size)):
        if drop_last and len(batch) < size:
            return
        yield batch


def _behind(batches: Iterable[list[Any]], offset: int) -> Iterator[list[Any]]:
    """The batches, the first ones without their `offset` samples."""
    for batch in batches:
        if offset < len(batch):
            yield batch[offset:]
        offset = max(offset - len(batch), 0)


def _until(items: Iterator[Any], samples: int | None) -> Iterator[Any]:
    """The items, until they hold `samples` samples; a list counts as its length, any other item as one."""
    if samples is None:
        yield from items
        return
    # The count is checked first: an item that is drawn and not yielded would be lost to the caller.
    while samples > 0 and (item := next(items, _END)) is not _END:
        yield item
        samples -= len(item) if isinstance(item, list) else 1


class _Draw:
    """Draws the indices of samplers for one epoch."""

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        self._seed, self._epoch, self._length = seed, epoch, length

    def indices(self, sampler: Any) -> Iterable[Any]:
        """The order of a sampler of single indices; a sequence or a tensor if its end is known."""
        if type(sampler) is SequentialSampler:
            return range(len(sampler.data_source))
        if isinstance(sampler, IndexedSampler):
            return sampler.order(self._generator())
        is_plain = type(sampler) is RandomSampler and not sampler.replacement
        if is_plain and sampler.num_samples == len(sampler.data_source):
            generator = self._generator()
            return torch.randperm(sampler.num_samples, generator=generator, device=generator.device)  # as RandomSampler
        return self(sampler)

    def __call__(self, sampler: Any, read: Callable[[Any], Any] = lambda index: index) -> Iterable[Any]:
        """The items of any sampler, each converted by `read`; a list if there are no more than the sampler's length."""
        # One thread draws at a time here, so threads that share a sampler change its epoch only after it has drawn.
        with seeded(self._seed), torch.default_generator.device:  # whatever the caller's default device is
            given, sampler = sampler, self._with_generator(sampler)
            try:
                length = min(len(sampler), max(self._length, _AT_ONCE))  # an endless one may claim any
                samples = None
            except TypeError:
                length = samples = self._length
            source = map(read, sampler)
            drawn = list(islice(_until(source, samples), length))
            # One index beyond the length shows whether the sampler continues.
            more = list(islice(source, 1))
        for each in (given, getattr(given, "sampler", None)):
            with suppress(TypeError):
                _told[each] = getattr(each, "epoch", self._epoch)  # which it may have advanced itself
        return drawn if not more else chain(drawn, more, source)

    def _with_generator(self, sampler: Any) -> Any:
        """The sampler, with this epoch's generator instead of its own. The user's object is not modified."""
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(self._epoch)
        inner = getattr(sampler, "sampler", None)
        replaced = {}
        if isinstance(getattr(sampler, "generator", _NO_GENERATOR), torch.Generator | None):
            replaced["generator"] = self._generator()
        if inner is not None and (seeded_inner := self._with_generator(inner)) is not inner:
            replaced["sampler"] = seeded_inner
        if not replaced:
            return sampler
        twin = copy.copy(sampler)
        for name, value in replaced.items():
            with suppress(AttributeError):  # a property that cannot be set
                object.__setattr__(twin, name, value)  # works on a frozen dataclass, too
        return twin

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)
