"""How samples become a batch: in the reader's thread, or in a loader worker.

Everything about one batch happens in one place, so that whatever fails there is told whole: a loader worker sends the
batch ready pickled, or the error with the lines it came from, and the parent raises it in its own type. (torch sends
an error as text, and rebuilds it only if its class takes one argument; a batch that cannot be pickled it drops, and
waits for it for ever.)

*Threads:* in the parent, one thread at a time uses a fetcher. A loader worker has it to itself, and so may seed the
process's random generators for each sample; in the parent they belong to the training loop too, and are left alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from unisono.errors import UnpicklableError
from unisono.outcome import Outcome
from unisono.randomness import mixed, seed_all

_SHOWN = 8


class Request(NamedTuple):
    """A batch to be made: which samples, and where in the epoch they stand.

    Attributes:
        indices: of the samples in the dataset.
        start: the position of the first one in the epoch's order.
        own: so many stand in a row there; those behind repeat them from the start.
        epoch, seed: the epoch, and its seed.
    """

    indices: Sequence[Any]
    start: int
    own: int
    epoch: int
    seed: int


class Fetcher:
    """Makes batches of a map-style dataset, in whichever process it finds itself.

    Args:
        loader: whose dataset and collate_fn it uses. One with batch_size=None makes no batches: a request is for one
            sample, which its collate_fn gets by itself.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset: Any = loader.dataset
        self._collate = loader.collate_fn
        self._is_batched = loader.batch_sampler is not None
        self._fetch_many = getattr(loader.dataset, "__getitems__", None)
        self._set_epoch = getattr(loader.dataset, "set_epoch", None)
        self._epoch: int | None = None

    def batch(self, request: Request, is_seeded: bool = False) -> Any:
        """The batch asked for.

        Args:
            is_seeded: seed the process's generators for each sample from (seed, epoch, position), so that what a
                sample is augmented with depends on nothing else; a dataset with `__getitems__`, for each batch.
        """
        try:
            return self._make(request, is_seeded)
        except StopIteration as stop:
            raise RuntimeError("the dataset or collate_fn raised StopIteration, which is no end of the data") from stop

    def _make(self, request: Request, is_seeded: bool) -> Any:
        if self._set_epoch is not None and self._epoch != request.epoch:
            self._set_epoch(request.epoch)  # it comes with the request, so persistent workers hear of it too
            self._epoch = request.epoch
        if not self._is_batched:
            return self._collate(self._sample(request, 0, is_seeded))
        if self._fetch_many:
            if is_seeded:
                seed_all(mixed(request.seed, request.start))
            try:
                samples = self._fetch_many(request.indices)
            except Exception as error:
                error.add_note(f"while the samples with indices {_few(request.indices)} were fetched")
                raise
        elif is_seeded:
            samples = [self._sample(request, place, True) for place in range(len(request.indices))]
        else:
            samples = self._plain_samples(request.indices)
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"while the samples with indices {_few(request.indices)} were collated")
            raise

    def _sample(self, request: Request, place: int, is_seeded: bool) -> Any:
        index = request.indices[place]
        if is_seeded:
            seed_all(mixed(request.seed, request.start + place % request.own))
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"in the sample with index {index!r}")
            raise

    def _plain_samples(self, indices: Sequence[Any]) -> list[Any]:
        dataset, index = self._dataset, None
        try:
            return [dataset[index := each] for each in indices]
        except Exception as error:
            error.add_note(f"in the sample with index {index!r}")
            raise


class RemoteFetcher:
    """The dataset that a loader worker sees: a request gives the packed batch, or the packed error."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> bytes:
        return packed(lambda: self._fetcher.batch(request, is_seeded=True), lambda: _few(request.indices))

    def __len__(self) -> int:  # asked by samplers that are never used
        return 0


class WorkerStart:
    """The worker_init_fn of a loader whose dataset is wrapped: shows the user's code the user's dataset.

    Args:
        dataset: what `torch.utils.data.get_worker_info().dataset` is to be.
        init: the user's own worker_init_fn.
    """

    def __init__(self, dataset: Any, init: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        set_worker_info(info.id, info.num_workers, info.seed, self._dataset)
        if self._init is not None:
            self._init(info.id)


def set_worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> None:
    """What `torch.utils.data.get_worker_info()` gives in this loader worker from now on."""
    torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, num_workers=num_workers, seed=seed, dataset=dataset)


def packed(make: Callable[[], Any], whose: Callable[[], str]) -> bytes:
    """What `make` returns or raises, as bytes; tensors go through shared memory. `whose` names the samples.

    Raises:
        SystemExit, KeyboardInterrupt: what ends a loader worker.
    """
    try:
        value = make()
    except Exception as error:
        return b"!" + Outcome.failure(error).to_bytes()
    try:
        stream = io.BytesIO(b"=")
        stream.seek(1)
        ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()
    except Exception as reason:
        refusal = UnpicklableError(
            f"a batch, a {type(value).__name__} of the samples with indices {whose()}, cannot be sent from a loader "
            f"worker ({type(reason).__name__}: {reason}); return tensors, arrays, numbers or other picklable data, or "
            "pass num_workers=0"
        )
        refusal.__cause__ = reason
        return b"!" + Outcome.failure(refusal).to_bytes()


def unpacked(data: bytes) -> Outcome[Any]:
    """What was packed in a loader worker: the batch, or the error that was raised there, in its own type.

    Raises:
        EOFError, OSError: the worker is gone, and the memory that it shared.
    """
    content = memoryview(data)[1:]
    return Outcome(pickle.loads(content)) if data[:1] == b"=" else Outcome.from_bytes(bytes(content))


def worker_loader(
    loader: DataLoader[Any],
    dataset: Any,
    start: WorkerStart,
    generator: Any,
    sampler: Iterable[Any] | None = None,
) -> DataLoader[Any]:
    """A DataLoader with the user's workers over a dataset that gives packed batches; in order, whatever the user's is.

    Nothing is pinned here: it is done where a batch is moved to a device that gains by it.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=_as_it_is,
        timeout=loader.timeout,
        worker_init_fn=start,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _as_it_is(data: Any) -> Any:
    return data


def _few(indices: Sequence[Any]) -> str:
    more = len(indices) - _SHOWN
    return ", ".join(map(repr, indices[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
