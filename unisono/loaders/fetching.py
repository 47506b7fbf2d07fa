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
import resource
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from unisono.errors import BusyError, UnpicklableError, describe_exit
from unisono.outcome import Outcome, chain_of
from unisono.randomness import Watch, all_states, mixed, notice_who_asks, seed_all
from unisono.tree import leaves, tree_map

_SHOWN = 8
_BUSY_S = 10.0
_LOOK_S = 0.25
_WAITING = 16
_SENDABLE = (int, float, str, bytes, bool, type(None))


class Request(NamedTuple):
    """A batch to be made: which samples, and where in the epoch they stand.

    Attributes:
        indices: of the samples in the dataset.
        start: the position of the first one in the epoch's order.
        own: so many stand in a row there; those behind repeat them from the start.
        epoch, seed: the epoch, and its seed.
        step: how far apart two neighbours are in the order of all ranks, where their samplers cut it.
    """

    indices: Sequence[Any]
    start: int
    own: int
    epoch: int
    seed: int
    step: int = 1


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
        self._fetch_many = loader.dataset.__getitems__ if _fetches_many(loader.dataset) else None  # type: ignore[attr-defined]
        self._has_rows = has_rows(loader)
        self._set_epoch = getattr(loader.dataset, "set_epoch", None)
        self._epoch: int | None = None
        self._draws: bool | None = None  # whether making a batch draws from the process's generators
        self._seeded: tuple[object, ...] | None = None  # where they stood behind the last seed, while that is unknown

    def batch(self, request: Request, is_seeded: bool = False) -> Any:
        """The batch asked for.

        Args:
            is_seeded: seed the process's generators for each sample from (seed, epoch, position), so that what a
                sample is augmented with depends on nothing else; a dataset with `__getitems__`, for each batch.
        """
        try:
            return self._make_seeded(request) if is_seeded else self._make(request, False)
        except StopIteration as stop:
            raise RuntimeError("the dataset or collate_fn raised StopIteration, which is no end of the data") from stop

    def _make_seeded(self, request: Request) -> Any:
        """Seed the generators for each sample, which takes as long as a small sample, only where something is drawn.

        That is seen in the first batch, sample by sample. If nothing is, the next ones are made without seeds, and one
        in which something is drawn after all is made again.
        """
        if self._draws is False:
            watch = Watch(mixed(request.seed, request.start))
            made = Outcome.capture(self._make, request, False)
            if not watch.is_drawn_from():
                return made.unwrap()
            self._draws = True
        is_first = self._draws is None
        batch = self._make(request, True)
        if is_first:
            self._see_draws()
            self._draws = bool(self._draws)
        return batch

    def _seed(self, request: Request, place: int) -> None:
        if self._draws is None:
            self._see_draws()
        seed = mixed(request.seed, request.start + place % request.own * request.step)
        seed_all(seed)
        if self._draws is None:
            self._seeded = all_states()

    def _see_draws(self) -> None:
        """Whether something was drawn since the seed before."""
        if self._seeded is not None and all_states() != self._seeded:
            self._draws = True

    def _make(self, request: Request, is_seeded: bool) -> Any:
        if self._set_epoch is not None and self._epoch != request.epoch:
            self._set_epoch(request.epoch)  # it comes with the request, so persistent workers hear of it too
            self._epoch = request.epoch
        if not self._is_batched:
            return self._collate(self._sample(request, 0, is_seeded))
        if self._has_rows:
            with suppress(Exception):  # what is wrong with an index is told below, with its sample
                return _rows(self._dataset, request.indices)
        if self._fetch_many:
            if is_seeded:
                self._seed(request, 0)
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
            self._seed(request, place)
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


def has_rows(loader: DataLoader[Any]) -> bool:
    """Whether its batches are rows of plain tensors, which can be taken at once: a TensorDataset, or a Subset of one.

    The values are those of fetching and collating sample by sample, in a fifth of the time.
    """
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or loader.collate_fn is not default_collate or loader.batch_sampler is None:
        return False
    return all(type(each) is torch.Tensor and each.layout is torch.strided for each in dataset.tensors)


def _rows(dataset: Any, indices: Sequence[Any]) -> list[torch.Tensor]:
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    places = torch.as_tensor(indices)
    if places.dtype != torch.int64 or places.ndim != 1:
        raise TypeError("these are no plain indices")
    return [tensor[places] for tensor in dataset.tensors]


class RemoteFetcher:
    """The dataset that a loader worker sees: a request gives the batch, packed where that is needed, or the error."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        try:
            batch = self._fetcher.batch(request, is_seeded=True)
        except Exception as error:
            return Packed(error=error)
        if can_surely_be_sent(batch):
            return batch
        return Packed(batch, f"the samples with indices {_few(request.indices)}")

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
        torch_info = torch_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=self._dataset
        )
        use_worker_info(torch_info)
        notice_who_asks()
        if self._init is not None:
            self._init(info.id)


def use_worker_info(info: Any) -> None:
    """Let `torch.utils.data.get_worker_info()` give that in this loader worker from now on."""
    torch_worker._worker_info = info


def can_surely_be_sent(value: Any) -> bool:
    """Whether it is plain tensors, texts and numbers in plain containers, which torch can send as they are."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.requires_grad
    if kind in (list, tuple):
        return all(map(can_surely_be_sent, value))
    if kind is dict:
        return all(type(key) in _SENDABLE for key in value) and all(map(can_surely_be_sent, value.values()))
    return kind in _SENDABLE


class Packed:
    """A batch of `whose`, or what was raised instead, pickled already; it arrives in the parent as an `Outcome`.

    Tensors go through shared memory that ends with the loader worker, so it is unpacked as soon as it is received, also
    when other batches come before it.
    """

    def __init__(self, value: Any = None, whose: str = "", error: Exception | None = None) -> None:
        self._data = b"" if error is not None else b"="
        try:
            if error is None:
                stream = io.BytesIO()
                ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
                self._data += stream.getbuffer()
        except Exception as reason:
            error = UnpicklableError(
                f"a batch of {whose} cannot be sent from a loader worker ({type(reason).__name__}: {reason}); return "
                "tensors, arrays, numbers or other picklable data, or pass num_workers=0"
            )
            error.__cause__ = reason
        if error is not None:
            self._data = b"!" + Outcome.failure(error).to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._data,)


def _unpacked(data: bytes) -> Outcome[Any]:
    content = memoryview(data)[1:]
    return Outcome(pickle.loads(content)) if data[:1] == b"=" else Outcome.from_bytes(bytes(content))


class WorkerPool:
    """The workers of a user's DataLoader over a dataset that gives packed values; in order, whatever the user's is.

    Nothing is pinned here: it is done where a batch is moved to a device that gains by it.

    *Threads:* passes may overlap, since one that was left early ends in its own time. Persistent workers serve one pass
    at a time, so there the next pass waits for that end.

    Args:
        loader: the user's, for its options.
        dataset: what the workers read.
        start: the worker_init_fn, which calls the user's.
        has_requests: whether each pass comes with requests, for a dataset that is indexed by them.
    """

    def __init__(
        self, loader: DataLoader[Any], dataset: Any, start: Callable[[int], None], has_requests: bool = False
    ) -> None:
        self._generator = torch.Generator()  # from which the DataLoader seeds its workers
        self._requests = _NextPass()
        self._persistent = threading.Lock() if loader.persistent_workers else None
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._requests if has_requests else None,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            timeout=loader.timeout,
            worker_init_fn=start,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def serve(
        self, seed: int, requests: Iterator[Any] | None = None, before: Callable[[], Any] = lambda: None
    ) -> Served:
        """What the workers make in one pass, unpacked. They are started here, in the calling thread.

        Args:
            before: called when no other pass has the persistent workers, before they hear of this one.

        Raises:
            BusyError: the persistent workers serve another pass.
        """
        if self._persistent is not None and not self._persistent.acquire(timeout=_BUSY_S):
            raise BusyError(
                "this loader's persistent workers serve another loop, and they serve one at a time; end that loop "
                "first, or pass persistent_workers=False"
            )
        try:
            before()
            self._forget_the_dead()
            self._generator.manual_seed(seed)
            self._requests.requests = requests or iter(())
            values = iter(self._loader)
            _look_often(values)
            self._requests.requests = iter(())  # in a pass that is left early they would hold the dataset
        except BaseException:
            if self._persistent is not None:
                self._persistent.release()
            raise
        return Served(values, self._persistent)

    def _forget_the_dead(self) -> None:
        """Let new persistent workers start where one has died, which would be noticed after 5 s, in pass after pass."""
        iterator: Any = self._loader._iterator
        if iterator is not None and not all(worker.is_alive() for worker in iterator._workers):
            self._loader._iterator = None


class _NextPass:
    """A sampler that hands the next iterator of the DataLoader the requests laid ready for it."""

    requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


class Served:
    """The values of one pass, as the loader workers send them; when it goes, persistent workers are free."""

    def __init__(self, values: Iterator[Any], lock: threading.Lock | None) -> None:
        self._values = values
        self._lock = lock
        self._is_scattered: bool | None = None

    def __iter__(self) -> Served:
        return self

    def __next__(self) -> Any:
        try:
            value = self._receive()
            return self._freed(value.unwrap() if isinstance(value, Outcome) else value)
        except Exception as error:
            self._values = iter(())  # whoever keeps the error keeps this, and must not keep the workers
            _free(error)
            raise

    def _freed(self, value: Any) -> Any:
        """The batch, out of shared memory where it is of so many tensors that those that wait exhaust the descriptors.

        Each shared tensor holds one, and up to a dozen batches wait for the loop.
        """
        if self._is_scattered is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
            self._is_scattered = tensors * _WAITING > limit // 2
        if not self._is_scattered:
            return value
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)

    def _receive(self) -> Any:
        try:
            return next(self._values)
        except (EOFError, OSError, RuntimeError) as error:
            if str(error).startswith("Caught "):  # torch's words for what worker_init_fn has raised there
                raise
            dead = _dead_workers(self._values)
            if not dead and isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"a DataLoader worker {dead or 'died'} before its batch was received; where nobody killed it, the "
                "usual reason is a lack of memory"
            ) from error

    def __del__(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _look_often(values: Any) -> None:
    """Let the thread that reads notice a dead worker, and soon.

    Torch notices it in a signal handler, which raises wherever the main thread just is, or when nothing has come for
    5 s. Where the user has set a time-out, it waits that long in one go, so there the handler stays.
    """
    if values._timeout > 0 or not values._worker_pids_set:
        return
    signal_handling._remove_worker_pids(id(values))  # type: ignore[attr-defined]
    values._worker_pids_set = False
    itself = weakref.ref(values)
    look = type(values)._try_get_data
    values._try_get_data = lambda timeout=_LOOK_S: look(itself(), timeout)  # not bound: that would be a circle


def _dead_workers(values: Any) -> str:
    """How the first worker that did not end by itself has ended; empty where none has."""
    for worker in getattr(values, "_workers", ()):
        if worker.exitcode:
            return f"(pid {worker.pid}) {describe_exit(worker.exitcode)}"
    return ""


def _free(error: BaseException) -> None:
    """Free what the frames of an error hold.

    In an error of a DataLoader with workers they are torch's own; they hold the workers, and the error in a circle with
    itself, which the garbage collector would resolve by waiting 5 s for each worker.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)


def _as_it_is(data: Any) -> Any:
    return data


def _fetches_many(dataset: Any) -> bool:
    """Whether a dataset has a way of its own to fetch many samples.

    Torch's Subset and StackDataset pass that on, and go sample by sample where there is none, as is done here anyway.
    """
    if type(dataset) is Subset:
        return _fetches_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(_fetches_many, parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def _few(indices: Sequence[Any]) -> str:
    more = len(indices) - _SHOWN
    return ", ".join(map(repr, indices[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
