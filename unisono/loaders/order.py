"""The batches of indices of an epoch: a function of (seed, epoch), from any sample on.

The samplers of torch, and samplers and batch samplers of one's own, keep their meaning. One that draws from a generator
draws from one that is seeded for the epoch; one that draws from the process's generators finds them seeded so, while
its order is drawn; one with `set_epoch` is told the epoch. Nothing is loaded here, so a late beginning costs no more
than drawing the order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from unisono.randomness import seed_of, seeded

_NO_GENERATOR = object()


class Batches:
    """The sequence of batches of indices of one epoch, drawn once.

    Attributes:
        nominal: the size of a complete batch; None where it is not known before.
        samples: the number of samples in all its batches; None where it is not known before.
        left_out: how many samples of the order its drop_last leaves out.
    """

    def __init__(self, sampler: Any, batch_sampler: Any, seed: int, epoch: int) -> None:
        """`batch_sampler` is None for a loader without batches: each index is one."""
        draw = _Draw(seed_of(seed, epoch), epoch)
        self.nominal: int | None = None
        self.samples: int | None = None
        self.left_out = 0
        self._order: Sequence[Any] | torch.Tensor | None = None
        self._lists: Iterable[Sequence[Any]] = ()
        if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
            self._lists = draw(batch_sampler)
            return
        size, drop_last = (batch_sampler.batch_size, batch_sampler.drop_last) if batch_sampler else (1, False)
        self.nominal = size
        order = draw.indices(sampler)
        if isinstance(order, Sequence | torch.Tensor):
            self.left_out = len(order) % size if drop_last else 0
            self.samples = len(order) - self.left_out
            self._order = order
        else:
            self._lists = BatchSampler(order, size, drop_last)

    def start(self, offset: int = 0) -> Iterator[list[Any]]:
        """The batches behind the first `offset` samples. A batch that this cuts loses its first samples."""
        if self._order is None:
            yield from _behind(self._lists, offset)
            return
        assert self.samples is not None
        assert self.nominal is not None
        for start in range(offset, self.samples, self.nominal):
            some = self._order[start : min(start + self.nominal, self.samples)]
            yield some.tolist() if isinstance(some, torch.Tensor) else list(some)


def _behind(batches: Iterable[Sequence[Any]], offset: int) -> Iterator[list[Any]]:
    for batch in batches:
        if offset < len(batch):
            yield list(batch)[offset:]
        offset = max(offset - len(batch), 0)


class _Draw:
    """Draws what samplers give in one epoch."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch

    def indices(self, sampler: Any) -> Iterable[Any]:
        """The order of a sampler of single indices; as a sequence or a tensor where it has an end."""
        if type(sampler) is SequentialSampler:
            return range(len(sampler.data_source))
        if (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return torch.randperm(sampler.num_samples, generator=self._generator())  # as the sampler draws it
        return self(sampler)

    def __call__(self, sampler: Any) -> Iterable[Any]:
        """What any sampler gives: a list where it tells its length, and no more than that comes."""
        source: Iterator[Any]
        sampler = self._seeded(sampler)
        try:
            length = len(sampler)
        except TypeError:
            source = iter(sampler)
            return source
        with seeded(self._seed):
            source = iter(sampler)
            drawn = list(islice(source, length))
            more = list(islice(source, 1))
        return drawn if not more else chain(drawn, more, source)

    def _seeded(self, sampler: Any) -> Any:
        """The sampler, with this epoch's generator in place of its own; the user's object is not touched."""
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(self._epoch)
        inner = getattr(sampler, "sampler", None)
        replaced = {}
        if isinstance(getattr(sampler, "generator", _NO_GENERATOR), torch.Generator | None):
            replaced["generator"] = self._generator()
        if inner is not None and (seeded_inner := self._seeded(inner)) is not inner:
            replaced["sampler"] = seeded_inner
        if not replaced:
            return sampler
        twin = copy.copy(sampler)
        for name, value in replaced.items():
            setattr(twin, name, value)
        return twin

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)
