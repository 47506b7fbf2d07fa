"""Loader workers: torch's own, reading a dataset of this package that wraps the user's.

*Threads:* the reader's, in the parent; `WorkerStart` and `RemoteFetcher` run in the workers.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from unisono.errors import BusyError, describe_exit
from unisono.loaders.fetcher import Fetcher, Request, few
from unisono.loaders.forked_workers import context_of, one_at_a_time, stack_of
from unisono.loaders.packing import Packed, pack
from unisono.loaders.shm import explain, is_tight, why_full
from unisono.outcome import Outcome, chain_of
from unisono.randomness import notice_who_asks
from unisono.torch_private import (
    AWAITED_INDEX,
    LOADER_ITERATOR,
    TASK_INFO,
    TRY_GET_DATA,
    WORKER_INFO,
    WORKER_PIDS_SET,
    WORKERS,
    loader_worker,
    remove_worker_pids,
)
from unisono.tree import map_objects

_BUSY_S = 10.0  # the longest wait for another thread to finish with the persistent workers
_LOOK_S = 0.25  # between two checks on the workers, while no batch arrives
_LONG_S = 30.0  # until a wait is logged
_ENDING_S = 1.0  # for a worker whose socket is closed to end

logger = logging.getLogger(__name__)


class RemoteFetcher:
    """The dataset that a loader worker sees: it maps a request to the batch, packed if needed, or to the error."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        try:
            batch = self._fetcher.batch(request, is_seeded=True)
            return pack(batch, f"the samples with indices {few(request.indices)}")
        except Exception as error:
            return Packed(error=error)

    def __len__(self) -> int:  # asked by samplers that are never used
        return 0


class WorkerStart:
    """The worker_init_fn of a loader whose dataset is wrapped: it shows the user's code, also their own `init`, the
    user's dataset."""

    def __init__(self, dataset: Any, init: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        torch_info = loader_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=self._dataset
        )
        use_worker_info(torch_info)
        notice_who_asks()
        if self._init is not None:
            self._init(info.id)


def use_worker_info(info: Any) -> None:
    """Let `torch.utils.data.get_worker_info()` return `info` in this loader worker from now on."""
    setattr(loader_worker, WORKER_INFO, info)


class WorkerPool:
    """The workers of a user's DataLoader over a dataset that returns packed values; always in order.

    Nothing is pinned here: memory is pinned when a batch is moved to a device that benefits.

    *Threads:* passes may overlap, since a pass that was left early may end later. Persistent workers serve the pass
    that was begun last, as torch's do; an older pass raises BusyError within `_LOOK_S`, or when it requests more.

    Args:
        loader: the user's loader, for its options.
        dataset: the dataset that the workers read.
        start: the worker_init_fn, which calls the user's.
        has_requests: whether each pass comes with requests, for a dataset that is indexed by them.
    """

    def __init__(
        self, loader: DataLoader[Any], dataset: Any, start: Callable[[int], None], has_requests: bool = False
    ) -> None:
        self._generator = torch.Generator()  # the DataLoader draws its workers' seeds from it
        self._requests = _NextPass()
        self._turn = _Turn() if loader.persistent_workers else None
        # Not passed to the DataLoader: `_Wait` applies it, and can say which sample is being read.
        self._timeout_s: float = loader.timeout
        self._copies = is_tight()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._requests if has_requests else None,
            num_workers=loader.num_workers,
            # torch's default for batch_size=None would convert arrays to tensors.
            collate_fn=_as_it_is,
            worker_init_fn=start,
            multiprocessing_context=context_of(loader.multiprocessing_context),
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def serve(
        self,
        seed: int,
        requests: Iterator[Any] | None = None,
        before: Callable[[], Any] = lambda: None,
        describe: Callable[[int], str] = lambda place: f"sample number {place} of the stream",
    ) -> Served:
        """Begin one pass; return the workers' values, unpacked. Workers are started here, in the calling thread.

        Args:
            before: called when no other pass uses the persistent workers, before they receive this one.
            describe: gives the words for the sample of the awaited batch that a worker is reading.

        Raises:
            BusyError: another pass over the persistent workers was begun at the same time.
        """
        wait = _Wait(self._timeout_s, self._turn, describe)
        if self._turn is not None:
            # Before the lock is acquired: the pass that holds it notices within `_LOOK_S`, and releases it.
            self._turn.owner = wait
        with wait.turn():
            before()
            self._forget_the_dead()
            self._generator.manual_seed(seed)
            self._requests.requests = requests or iter(())
            with one_at_a_time():
                values = iter(self._loader)
            _look_often(values, wait)
            self._requests.requests = iter(())  # else a pass left early would keep the dataset alive
        return Served(values, wait, self._copies)

    def _forget_the_dead(self) -> None:
        """Start new persistent workers if one has died. Torch would notice it only after 5 s, and in every pass."""
        iterator: Any = getattr(self._loader, LOADER_ITERATOR)
        if iterator is not None and not all(worker.is_alive() for worker in getattr(iterator, WORKERS)):
            setattr(self._loader, LOADER_ITERATOR, None)


class _NextPass:
    """A sampler that gives the DataLoader's next iterator the requests that were stored for it."""

    requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


class _Turn:
    """Which pass owns the persistent workers: the one begun last. One thread at a time communicates with them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: object = None


class _Wait:
    """A pass's wait for its next batch, `timeout_s` at most unless that is 0. `turn` is shared by the passes if the
    workers are persistent; `describe` is as for `WorkerPool.serve`."""

    def __init__(self, timeout_s: float, turn: _Turn | None, describe: Callable[[int], str]) -> None:
        self.describe = describe
        self.timeout_s = timeout_s
        self.asked_at = 0.0
        self.has_warned = False
        self._turn = turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let only this pass communicate with the workers during the block; BusyError if a later pass owns them, or
        another thread has kept waiting for them for `_BUSY_S`."""
        self.asked_at, self.has_warned = time.monotonic(), False
        if self._turn is None:
            yield
            return
        if not self._turn.lock.acquire(timeout=_BUSY_S):
            raise BusyError(
                "another thread has been waiting for a batch of this loader's persistent workers all the time"
            )
        try:
            self.check_turn()
            yield
        finally:
            self._turn.lock.release()

    def check_turn(self) -> None:
        """Raise BusyError if a later pass owns the workers."""
        if self._turn is not None and self._turn.owner is not self:
            raise BusyError(
                "this loop's persistent workers have begun another loop over the same loader, and they serve one at a "
                "time; end a loop before the next begins, or pass persistent_workers=False"
            )

    def look(self, values: Any) -> None:
        """Check the wait, when nothing has arrived for a while; warn once after `_LONG_S`.

        Raises:
            BusyError: as `check_turn`.
            RuntimeError: the user's timeout has expired.
        """
        self.check_turn()
        waited_s = time.monotonic() - self.asked_at
        if 0 < self.timeout_s <= waited_s:
            raise RuntimeError(
                f"DataLoader timed out after {self.timeout_s:g} seconds: {where_stuck(values, self.describe)}"
            )
        if waited_s > _LONG_S and not self.has_warned:
            self.has_warned = True
            logger.warning("no batch has come for %.0f s: %s", waited_s, where_stuck(values, self.describe))


class Served:
    """The values of one pass, unpacked, in the order in which the loader workers serve them; copies of those in shared
    memory, if that is tight."""

    def __init__(self, values: Iterator[Any], wait: _Wait, copies: bool) -> None:
        self._values = values
        self._wait = wait
        self._copies = copies

    def __iter__(self) -> Served:
        return self

    def __next__(self) -> Any:
        try:
            value = self._receive()
            batch = value.unwrap() if isinstance(value, Outcome) else value
            return map_objects(_in_plain_memory, batch) if self._copies else batch
        except StopIteration:
            self._values = iter(())  # those of persistent workers continue in the next pass
            raise
        except Exception as error:
            explain(error)
            self._values = iter(())  # a kept error keeps this object, but must not keep the workers
            _free(error)
            raise

    def _receive(self) -> Any:
        try:
            with self._wait.turn():
                return next(self._values)
        except (EOFError, OSError, RuntimeError) as error:
            # torch's text for an error in worker_init_fn, and the text of this package's timeout
            if str(error).startswith(("Caught ", "DataLoader timed out")):
                raise
            dead = _dead_worker(self._values, 0 if isinstance(error, RuntimeError) else _ENDING_S)
            if dead is None and isinstance(error, RuntimeError):
                raise
            how = "died" if dead is None else f"(pid {dead.pid}) {describe_exit(dead.exitcode)}"
            code = None if dead is None else dead.exitcode
            why = "unless it was killed on purpose, the usual reason is a lack of memory"
            if code == -signal.SIGBUS:
                why = why_full()
            elif code is not None and code > 0:
                why = (
                    "what it has printed says why; with a multiprocessing_context that is not 'fork', the script runs "
                    "there once more, and its calls must stand below `if __name__ == '__main__':`"
                )
            raise RuntimeError(f"a DataLoader worker {how} before its batch was received; {why}") from error


def _in_plain_memory(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _look_often(values: Any, wait: _Wait) -> None:
    """Let the reading thread notice within `_LOOK_S` that a worker has died, or that a later pass owns the workers.

    Torch notices a death in a signal handler, which raises at whatever point the main thread is executing, or when
    nothing has arrived for 5 s.
    """
    if getattr(values, WORKER_PIDS_SET):
        remove_worker_pids(id(values))
        setattr(values, WORKER_PIDS_SET, False)
    itself = weakref.ref(values)  # a strong reference would be a cycle
    # From the class: persistent workers keep one iterator, on which a later pass must not wrap this wrapper.
    look = getattr(type(values), TRY_GET_DATA)

    def try_get_data(timeout: float = _LOOK_S) -> Any:
        found = look(itself(), timeout)
        if not found[0]:
            wait.look(itself())
        return found

    setattr(values, TRY_GET_DATA, try_get_data)


def where_stuck(values: Any, describe: Callable[[int], str]) -> str:
    """Describe in words the loader worker that is awaited: its sample and its stack."""
    info = getattr(values, TASK_INFO).get(getattr(values, AWAITED_INDEX))
    if info is None:
        return "persistent workers have not ended the previous pass"
    number = info[0]
    worker = getattr(values, WORKERS)[number]
    place = getattr(worker, "place", None)
    at = "" if place is None else f" is at {describe(place)}"
    return f"loader worker {number} (pid {worker.pid}){at}{stack_of(worker)}"


def _dead_worker(values: Any, within_s: float) -> Any:
    """The first worker with a nonzero exit code, else None. One that is just ending is awaited for `within_s` seconds.

    Its sockets close before the process ends, and until then, persistent workers would get the next pass as if it were
    alive.
    """
    workers = getattr(values, WORKERS, ())
    if within_s and not any(worker.exitcode for worker in workers):
        for sentinel in wait([worker.sentinel for worker in workers], within_s):
            next(worker for worker in workers if worker.sentinel == sentinel).join(within_s)
    return next((worker for worker in workers if worker.exitcode), None)


def _free(error: BaseException) -> None:
    """Clear the frames of an error, and of its chain.

    In an error of a DataLoader with workers these frames are torch's. They hold the workers, and they hold the error
    itself in a reference cycle; the garbage collector would break it only by waiting 5 s for each worker.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)


# A function of the module, since spawned workers have to unpickle it.
def _as_it_is(data: Any) -> Any:
    return data
