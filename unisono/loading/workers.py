"""Loader workers: torch's own, reading a dataset of this package that wraps the user's.

*Threads:* the reader's, in the parent; `start_worker` runs in the workers.
"""

from __future__ import annotations

import logging
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import takewhile
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono.comm.operations import HOST
from unisono.comm.outcome import chain_of, text_of
from unisono.comm.stacks import PACKAGE, Frame, frames_of, stack_of, tell_stack_on_request
from unisono.devices.randomness import notice_who_asks
from unisono.errors import describe_exit
from unisono.loading.forked_workers import context_of, starting
from unisono.loading.packing import explain, forget_rings, is_tight, use_ring, why_full
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

_LOOK_S = 0.25  # between two checks on the workers, while no batch arrives
_LONG_S = 30.0  # until a wait is logged
_SHOWN = 3  # files
_ENDING_S = 1.0  # for a worker whose socket is closed to end

logger = logging.getLogger(__name__)


def start_worker(dataset: Any, init: Callable[[int], None] | None, worker: int) -> None:
    """The worker_init_fn of a loader whose dataset is wrapped: it shows the user's code the user's dataset."""
    seen: Any = get_worker_info()
    use_worker_info(loader_worker.WorkerInfo(id=worker, num_workers=seen.num_workers, seed=seen.seed, dataset=dataset))
    notice_who_asks()
    if init is not None:
        init(worker)


def use_worker_info(info: Any) -> None:
    """Let `torch.utils.data.get_worker_info()` return `info` in this loader worker from now on."""
    setattr(loader_worker, WORKER_INFO, info)


class WorkerPool:
    """The workers of a user's DataLoader over a dataset that returns packed values, in order. `start` is the
    worker_init_fn, which calls the user's.

    *Threads:* any. Passes may overlap: persistent workers serve the next pass only if the one before has ended.
    """

    def __init__(self, loader: DataLoader[Any], dataset: Any, start: Callable[[int], None]) -> None:
        # Not passed to the DataLoader: `Served` applies it, and can say which samples are being read.
        self._timeout_s: float = loader.timeout
        self._copies = is_tight()
        self._is_persistent = loader.persistent_workers
        self._idle: list[DataLoader[Any]] = []  # with persistent workers that have served a pass to its end
        # A worker of a map-style dataset is asked for `prefetch_factor` batches at once, by default 2. When other
        # workers of a stream have ended, the last one is asked for theirs, too.
        slots = 0 if isinstance(dataset, IterableDataset) else (loader.prefetch_factor or 2) + 1
        self._options: dict[str, Any] = {
            "dataset": dataset,
            "batch_size": None,
            "num_workers": loader.num_workers,
            # torch's default for batch_size=None would convert arrays to tensors.
            "collate_fn": _as_it_is,
            "worker_init_fn": partial(_begin, start, slots),
            "multiprocessing_context": context_of(loader.multiprocessing_context),
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }

    @property
    def is_idle(self) -> bool:
        return bool(self._idle)

    def serve(
        self,
        seed: int,
        requests: Iterator[Any] | None = None,
        describe: Callable[[], str] = lambda: "a stream",
        skips: bool = False,
        number: int | None = None,
    ) -> Served:
        """Begin one pass, by the DataLoader's `num_workers`, or by another `number` of them; return the workers'
        values, unpacked. Workers are started here, in the calling thread. `requests` ask a map-style dataset for each
        value; `describe` names the samples of the awaited one. If it `skips`, a value that cannot be made is the
        failure, and the pass continues."""
        wait = _Wait(self._timeout_s, describe)
        number = number or self._options["num_workers"]
        loader: Any = self._idle.pop() if self._idle else None
        if loader is not None and loader.num_workers != number:
            loader = None
        is_new = loader is None or not _revive(loader)
        if is_new:
            # The DataLoader draws its workers' seeds from the generator.
            asked = None if requests is None else _NextPass()
            options = {**self._options, "num_workers": number}
            loader = _AnyNumber(**options, sampler=asked, generator=torch.Generator())
        loader.generator.manual_seed(seed)
        if requests is not None:
            loader.sampler.requests = requests
        # The user's default device, from whose generator torch would draw, is not the workers' either. Not without
        # need: a worker that is forked in a device's context is slower.
        with starting(), nullcontext() if torch.get_default_device() == HOST else HOST:
            values = iter(loader)
            _look_often(values, wait)
        if is_new:
            weakref.finalize(values, forget_rings, [worker.pid for worker in getattr(values, WORKERS)])
        if requests is not None:
            loader.sampler.requests = iter(())  # else a pass left early would keep the dataset alive
        keep = partial(self._idle.append, loader) if self._is_persistent else None
        return Served(values, wait, self._copies, keep, skips)


def _revive(loader: DataLoader[Any]) -> bool:
    """Whether the idle workers of a DataLoader can serve a pass: torch would notice a dead one only after 5 s."""
    iterator: Any = getattr(loader, LOADER_ITERATOR)
    vars(iterator).pop(TRY_GET_DATA, None)  # that of the last pass, whose time may be over
    return all(worker.is_alive() for worker in getattr(iterator, WORKERS))


class _AnyNumber(DataLoader[Any]):
    """Says nothing about many workers: the user's DataLoader has, or their number was found to help."""

    def check_worker_number_rationality(self) -> None:
        pass


class _NextPass:
    """A sampler that gives the DataLoader's next iterator the requests that were stored for it."""

    requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


class _Wait:
    """A pass's wait for its next batch, `timeout_s` at most unless that is 0; `describe` as for `WorkerPool.serve`."""

    def __init__(self, timeout_s: float, describe: Callable[[], str]) -> None:
        self._timeout_s, self._describe = timeout_s, describe
        self.begin()

    def begin(self) -> None:
        self._asked_at, self._has_warned = time.monotonic(), False

    def look(self, values: Any) -> None:
        """Check the wait, when nothing has arrived for a while: warn once after `_LONG_S`; RuntimeError if the user's
        timeout has expired."""
        waited_s = time.monotonic() - self._asked_at
        if waited_s > _LONG_S and not self._has_warned:
            self._has_warned = True
            logger.warning("no batch has come for %.0f s: %s", waited_s, self._where(values))
        if 0 < self._timeout_s <= waited_s:
            raise RuntimeError(f"DataLoader timed out after {self._timeout_s:g} seconds: {self._where(values)}")

    def _where(self, values: Any) -> str:
        """The loader worker that is awaited, and its samples, in words."""
        number = getattr(values, TASK_INFO)[getattr(values, AWAITED_INDEX)][0]
        pid = getattr(values, WORKERS)[number].pid
        return f"loader worker {number} (pid {pid}) reads {self._describe()}; {where_is(pid)}"


def where_is(pid: int) -> str:
    """Where in the user's code a loader worker is, which files it has open, and its stack, in words."""
    files: list[str] = []
    with suppress(psutil.Error):
        shared = {each.path for each in psutil.Process().open_files()}
        files = [each.path for each in psutil.Process(pid).open_files() if each.path not in shared]
    opened = f", with {', '.join(files[-_SHOWN:])} open" if files else ""
    frames = frames_of(stack_of(pid))
    if not frames:
        return f"it does not say where{opened}: `py-spy dump --pid {pid}` may show it"
    return in_words(frames, opened)


def in_words(frames: list[Frame], opened: str = "") -> str:
    """Where the user's code is, and its stack, in words."""
    # What is below is torch's and this package's.
    own = [*takewhile(lambda frame: not frame.file.startswith(PACKAGE), frames)] or frames
    place = next((each for each in own if each.is_users), own[0])
    return f"it is in {place}{opened}; the most recent call first:\n" + "\n".join(f"  {each}" for each in own)


class Served:
    """The values of one pass, unpacked, in the order in which the loader workers serve them; copies of those in shared
    memory, if that is tight. At the regular end, `keep` is called."""

    def __init__(
        self, values: Iterator[Any], wait: _Wait, copies: bool, keep: Callable[[], None] | None, skips: bool
    ) -> None:
        self._values, self._wait, self._copies, self._keep, self._skips = values, wait, copies, keep, skips

    def __iter__(self) -> Served:
        return self

    def __next__(self) -> Any:
        try:
            outcome = self._receive()
            if self._skips and outcome.error is not None:
                explain(outcome.error)
                return outcome
            batch = outcome.unwrap()
            if not self._copies:
                return batch
            return map_objects(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
        except StopIteration:
            self._values = iter(())  # those of persistent workers continue in the next pass
            if self._keep is not None:
                self._keep()
                self._keep = None
            raise
        except Exception as error:
            explain(error)
            self._values = iter(())  # a kept error keeps this object, but must not keep the workers
            self._keep = None
            _free(error)
            raise

    def _receive(self) -> Any:
        self._wait.begin()
        try:
            return next(self._values)
        except (EOFError, OSError, RuntimeError) as error:
            # torch's text for an error in worker_init_fn, and the text of this package's timeout
            if text_of(error).startswith(("Caught ", "DataLoader timed out")):
                raise
            dead = _dead_worker(self._values, 0 if isinstance(error, RuntimeError) else _ENDING_S)
            if dead is None and isinstance(error, RuntimeError):
                raise
            how, code = (
                ("died", 0) if dead is None else (f"(pid {dead.pid}) {describe_exit(dead.exitcode)}", dead.exitcode)
            )
            why = "unless it was killed on purpose, the usual reason is a lack of memory"
            if code > 0:
                why = "what it has printed says why"
            elif code == -signal.SIGBUS:
                why = why_full()
            raise RuntimeError(f"a DataLoader worker {how} before its batch was received; {why}") from error


def _look_often(values: Any, wait: _Wait) -> None:
    """Let the reading thread notice within `_LOOK_S` that a worker has died. Torch does so in a signal handler, which
    raises wherever the main thread is, or when nothing has arrived for 5 s."""
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


def _dead_worker(values: Any, within_s: float) -> Any:
    """The first worker with a nonzero exit code, else None. One that is just ending, whose sockets close before it, is
    awaited for `within_s` seconds."""
    workers = getattr(values, WORKERS, ())
    if within_s and not any(worker.exitcode for worker in workers):
        for sentinel in wait([worker.sentinel for worker in workers], within_s):
            next(worker for worker in workers if worker.sentinel == sentinel).join(within_s)
    return next((worker for worker in workers if worker.exitcode), None)


def _free(error: BaseException) -> None:
    """Clear the frames of an error, and of its chain: torch's hold the workers, and the error itself in a cycle, which
    the garbage collector would break only by waiting 5 s for each worker."""
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)


# Functions of the module, since spawned workers have to unpickle them.
def _begin(start: Callable[[int], None], slots: int, worker: int) -> None:
    tell_stack_on_request()
    use_ring(slots)
    start(worker)


def _as_it_is(data: Any) -> Any:
    return data
