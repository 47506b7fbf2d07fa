"""Loader workers: those of torch, with a dataset of this package's in them.

*Threads:* the reader's, in the parent; `WorkerStart` and `RemoteFetcher` live in the workers.
"""

from __future__ import annotations

import math
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

try:
    import resource
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

from unisono.errors import BusyError, describe_exit
from unisono.loaders.fetching import Fetcher, Request, few
from unisono.loaders.forking import context_of, one_at_a_time
from unisono.loaders.sending import Packed, can_surely_be_sent
from unisono.loaders.shm import Room, explain, share, why_full
from unisono.outcome import Outcome, chain_of
from unisono.randomness import notice_who_asks
from unisono.tree import leaves, tree_map

_BUSY_S = 10.0
_LOOK_S = 0.25
_ENDING_S = 1.0
_WAITING = 16


class RemoteFetcher:
    """The dataset that a loader worker sees: a request gives the batch, packed where that is needed, or the error."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        try:
            batch = self._fetcher.batch(request, is_seeded=True)
            if can_surely_be_sent(batch):
                share(batch)
                return batch
        except Exception as error:
            return Packed(error=error)
        return Packed(batch, f"the samples with indices {few(request.indices)}")

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
        self._room = Room(loader.num_workers, loader.prefetch_factor, _WAITING)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._requests if has_requests else None,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            timeout=loader.timeout,
            worker_init_fn=start,
            multiprocessing_context=context_of(loader.multiprocessing_context),
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
            self._room.look()
            with one_at_a_time():
                values = iter(self._loader)
            _look_often(values)
            self._requests.requests = iter(())  # in a pass that is left early they would hold the dataset
        except BaseException:
            if self._persistent is not None:
                self._persistent.release()
            raise
        return Served(values, self._persistent, self._room)

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

    def __init__(self, values: Iterator[Any], lock: threading.Lock | None, room: Room) -> None:
        self._values = values
        self._lock = lock
        self._room = room
        self._is_freed: bool | None = None

    def __iter__(self) -> Served:
        return self

    def __next__(self) -> Any:
        try:
            value = self._receive()
            batch = value.unwrap() if isinstance(value, Outcome) else value
            self._room.check(batch)
            return self._freed(batch)
        except Exception as error:
            explain(error)
            self._values = iter(())  # whoever keeps the error keeps this, and must not keep the workers
            _free(error)
            raise

    def _freed(self, value: Any) -> Any:
        """The batch, out of shared memory where those that wait for the loop, up to a dozen, would exhaust it.

        Or the descriptors, of which each shared tensor holds one.
        """
        if self._is_freed is None:
            limit = math.inf if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
            self._is_freed = self._room.is_tight or tensors * _WAITING > limit / 2
        if not self._is_freed:
            return value
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)

    def _receive(self) -> Any:
        try:
            return next(self._values)
        except (EOFError, OSError, RuntimeError) as error:
            if str(error).startswith("Caught "):  # torch's words for what worker_init_fn has raised there
                raise
            dead = _dead_worker(self._values, 0 if isinstance(error, RuntimeError) else _ENDING_S)
            if dead is None and isinstance(error, RuntimeError):
                raise
            how = "died" if dead is None else f"(pid {dead.pid}) {describe_exit(dead.exitcode)}"
            is_full = dead is not None and dead.exitcode == -signal.SIGBUS
            why = why_full() if is_full else "where nobody killed it, the usual reason is a lack of memory"
            raise RuntimeError(f"a DataLoader worker {how} before its batch was received; {why}") from error

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


def _dead_worker(values: Any, within_s: float) -> Any:
    """The first worker that did not end by itself; None where each did. One that is just ending has some time for it.

    Its sockets close first, and until it is gone persistent workers would be asked for the next pass as if it lived.
    """
    workers = getattr(values, "_workers", ())
    if within_s and not any(worker.exitcode for worker in workers):
        for sentinel in wait([worker.sentinel for worker in workers], within_s):
            next(worker for worker in workers if worker.sentinel == sentinel).join(within_s)
    return next((worker for worker in workers if worker.exitcode), None)


def _free(error: BaseException) -> None:
    """Free what the frames of an error hold.

    In an error of a DataLoader with workers they are torch's own; they hold the workers, and the error in a circle with
    itself, which the garbage collector would resolve by waiting 5 s for each worker.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)


def _as_it_is(data: Any) -> Any:
    return data
