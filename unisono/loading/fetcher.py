"""How samples become a batch: in the reader's thread, or in a loader worker.

*Threads:* in the parent, one thread at a time uses a fetcher. A loader worker has exclusive use of it, and so may seed
the process's random generators for each sample; in the parent the training loop uses them too, so they are left alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset, default_collate

from unisono.comm.outcome import Outcome, add_note_once
from unisono.devices.randomness import Watch, all_states, mixed, noticing_who_asks, seed_all, seeded
from unisono.loading.made_rows import collated
from unisono.loading.packing import Packed
from unisono.loading.sharding import fingerprint

_SHOWN = 8
_PROBED = 4  # batches
_latest: object = None  # the mark of the last call of any dataset's `set_epoch` in this process


class Request(NamedTuple):
    """A request for a batch: which samples, and their positions in the epoch."""

    indices: Sequence[Any]
    start: int  # the position of the first one in the epoch's order
    own: int  # how many are consecutive there; the remaining ones repeat them from the start
    epoch: int
    seed: int
    step: int = 1  # between two consecutive samples in the order of all ranks, if their samplers shard it


class Look(NamedTuple):
    """A request for a mark of samples, by which the ranks compare their datasets."""

    request: Request


class Fetcher:
    """Makes batches of a map-style dataset, `Collated` ones by a `collate_fn` of the user's. With batch_size=None a
    request is for one sample, passed to collate_fn. It is the dataset that a loader worker sees, which maps a request
    to the packed batch, or to the error."""

    def __init__(self, loader: DataLoader[Any], dim: int = 0) -> None:
        dataset: Any = loader.dataset
        self._dataset, self._collate, self._dim = dataset, loader.collate_fn, dim
        self._is_batched, self.has_rows = loader.batch_sampler is not None, has_rows(loader)
        self._fetch_many = dataset.__getitems__ if fetches_many(dataset) else None
        self._set_epoch: Any = getattr(dataset, "set_epoch", None)
        self._epoch: int | None = None
        self._epoch_mark: object = None  # the mark of this fetcher's last call of `set_epoch`
        self.draws: bool | None = None  # whether making a batch draws from the process's generators

    def __getitem__(self, request: Request | Look) -> Packed:
        if isinstance(request, Look):
            return Packed(self.look(request))
        try:
            return Packed(self.batch(request, is_seeded=True), f"the samples with indices {few(request.indices)}")
        except Exception as error:
            return Packed(error=error)

    def batch(self, request: Request, is_seeded: bool = False) -> Any:
        """Make the requested batch. `is_seeded`: the process's generators are seeded for each sample (with
        `__getitems__`, each batch) from (seed, epoch, position), so that its augmentation depends on nothing else."""
        try:
            draws = is_seeded and not self.has_rows  # which are indexed
            return self._make_seeded(request) if draws else self._make(request, False)
        except StopIteration as stop:
            raise RuntimeError(
                "the dataset or collate_fn raised StopIteration, which does not mark the end of the data"
            ) from stop

    def look(self, look: Look) -> int:
        """Read the samples twice, and return a mark of what does not differ: an augmentation by a generator that is not
        seeded does. The process's generators are seeded. An error is left to the loop, which meets it again."""
        with suppress(Exception):
            return fingerprint(self._read(look.request), self._read(look.request))
        return 0

    def _read(self, request: Request) -> Any:
        self._tell_epoch(request.epoch)
        if not self._fetch_many:
            return self._samples(request, True)
        self._seed(request, 0)
        return self._fetch_many(request.indices)

    def _make_seeded(self, request: Request) -> Any:
        """Seed the generators for each sample, which takes as long as a small sample, only if something is drawn. The
        first sample shows that, or the first batch, fetched at once; a batch in which something is drawn after all is
        made again."""
        begun: list[Any] = []
        if self.draws is None and request.indices:
            self._tell_epoch(request.epoch)
            self._seed(request, 0)
            before = all_states()
            if self._is_batched and not self._fetch_many and not self.has_rows:
                begun = self._samples(request, True, stop=1)
                self.draws = all_states() != before
            else:
                batch = self._make(request, True)
                self.draws = all_states() != before
                return batch
        if not self.draws:
            watch = Watch(mixed(request.seed, request.start))
            # An error may come from numbers drawn without this sample's seed, so it counts only if nothing was drawn.
            made = Outcome.capture(self._make, request, False, begun)
            if not watch.is_drawn_from():
                return made.unwrap()
            self.draws = True
        return self._make(request, True, begun)

    def _seed(self, request: Request, place: int) -> None:
        # A repeated sample gets the seed of the one that it repeats.
        seed_all(mixed(request.seed, request.start + place % request.own * request.step))

    def _make(self, request: Request, is_seeded: bool, begun: Sequence[Any] = ()) -> Any:
        if self._set_epoch:
            self._tell_epoch(request.epoch)  # the epoch is part of the request, so persistent workers receive it, too
        if not self._is_batched:
            return self._collate(self._samples(request, is_seeded)[0])
        if self.has_rows:
            with suppress(Exception):  # an invalid index is reported below, with its sample
                return _rows(self._dataset, request.indices)
        if self._fetch_many:
            if is_seeded:
                self._seed(request, 0)
            try:
                samples = self._fetch_many(request.indices)
            except Exception as error:
                add_note_once(error, f"while the samples with indices {few(request.indices)} were fetched")
                raise
            if self._collate is default_collate and len(samples) != len(request.indices):
                raise ValueError(
                    f"the dataset's __getitems__ returned {len(samples)} samples for {len(request.indices)} indices "
                    f"({few(request.indices)}); drop or add rows in a collate_fn instead"
                )
        else:
            samples = self._samples(request, is_seeded, begun)
        try:
            if self._collate is default_collate:
                return self._collate(samples)
            return collated(self._collate, samples, len(request.indices), self._dim)
        except Exception as error:
            add_note_once(error, f"while the samples with indices {few(request.indices)} were collated")
            raise

    def _tell_epoch(self, epoch: int) -> None:
        """Set the dataset's epoch, unless it is set and no other fetcher over the same dataset has changed it since."""
        global _latest
        if self._set_epoch and (self._epoch != epoch or self._epoch_mark is not _latest):
            self._set_epoch(epoch)
            self._epoch = epoch
            self._epoch_mark = _latest = object()

    def _samples(self, request: Request, is_seeded: bool, begun: Sequence[Any] = (), stop: int | None = None) -> Any:
        """The request's samples up to number `stop`, of which `begun` are the first."""
        dataset, samples = self._dataset, [*begun]
        indices = request.indices[len(begun) : stop]
        left = iter(indices)
        try:
            if not is_seeded:
                # It takes as long as a small sample to note each index.
                loaded = [dataset[index] for index in left]
                return samples + loaded if samples else loaded
            for place, index in enumerate(left, len(begun)):
                self._seed(request, place)
                samples.append(dataset[index])
            return samples
        except Exception as error:
            add_note_once(error, f"in the sample with index {indices[len(indices) - length_hint(left) - 1]!r}")
            raise


class FetcherBeside:
    """Makes batches in the loop's thread as a loader worker does: by seeds of their own, though the loop's generators
    stay as they are. They are saved for the first batches of a loop, which takes longer than a cheap batch. A dataset
    that draws gets a loader worker.

    Attributes:
        fewest: how many loader workers the dataset needs at least.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self._left = fetcher, _PROBED
        self.fewest = 0

    def begin(self) -> None:
        """A loop begins."""
        self._left = _PROBED

    def make(self, request: Request | Look) -> Any:
        """The batch, or what is seen of it."""
        fetcher = self._fetcher
        if isinstance(request, Look):
            with seeded(0):
                return fetcher.look(request)
        if self._left:
            self._left -= 1
            return self._make_seeded(request)
        before = random.getstate(), torch.get_rng_state()
        batch = fetcher.batch(request)
        if random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1]):
            return batch
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        return self._make_seeded(request)

    def _make_seeded(self, request: Request) -> Any:
        with seeded(0), noticing_who_asks():
            batch = self._fetcher.batch(request, is_seeded=True)
        self.fewest = int(self._fetcher.draws is not False and not self._fetcher.has_rows)
        return batch


def has_rows(loader: DataLoader[Any]) -> bool:
    """Whether batches are rows of plain tensors, of a TensorDataset or its Subset, to be indexed at once: in a fifth of
    the time of fetching and collating sample by sample."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or loader.collate_fn is not default_collate or loader.batch_sampler is None:
        return False
    return all(type(each) is torch.Tensor and each.layout is torch.strided for each in dataset.tensors)


def _rows(dataset: Any, indices: Sequence[Any]) -> list[torch.Tensor]:
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    places = torch.as_tensor(indices, device=torch.default_generator.device)
    # Booleans, for example, are indices to a list, but a mask to a tensor.
    if places.dtype != torch.int64 or places.ndim != 1:
        raise TypeError("these are no plain indices")
    return [tensor[places] for tensor in dataset.tensors]


def fetches_many(dataset: Any) -> bool:
    """Whether a dataset has its own method to fetch many samples; torch's Subset and StackDataset forward it."""
    if type(dataset) is Subset:
        return fetches_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(fetches_many, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def few(indices: Sequence[Any]) -> str:
    """Format the first indices for a message."""
    more = len(indices) - _SHOWN
    return ", ".join(map(repr, indices[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
