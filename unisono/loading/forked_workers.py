"""Forking loader workers from a multithreaded process, without a worker that waits forever for a lock.

A lock that another thread held at the fork stays locked in the process forever. torch's loader workers begin with
`torch.manual_seed` and `numpy.random.seed`, and send tensors through shared memory; any thread that draws, seeds or
shares a tensor holds one of the locks that these need, for example a replica that seeds and begins its loop.

So each worker renews the locks that it can reach, acquires the others once, takes a token that its parent has left for
it, reports, and begins. The parent awaits reports when it has forked all of a pass. Where none comes, it takes the
token back, so that the worker cannot begin any more, kills it, and forks it again: one that has begun may hold the lock
of a queue, which its successor needs. One thread at a time starts workers.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import context
from typing import Any

import torch
import torch.utils.data.graph_settings

from unisono.devices.seeding import seeding_locks
from unisono.torch_private import share_memory_lock, share_memory_map

PATIENCE_S = (1.0, 3.0, 10.0, 16.0)  # for each fork; a slow machine may exceed the first ones, without harm

_RENEW = "_at_fork_reinit"  # of locks, as Python's own modules call it

_Process: Any = getattr(context, "ForkProcess", object)  # Windows has none
_Context: Any = getattr(context, "ForkContext", object)

_one_at_a_time = threading.Lock()  # those of another thread would inherit half-made pipes
_awaited: dict[Any, tuple[Any, dict[str, Any]]] = {}  # workers that have not begun yet: their Popen, and what they run

_forking: set[int] = set()  # the thread that forks a worker, if one does


def _wait_for_draws() -> None:
    """Wait for a thread that draws. Right before the fork: what stands between may let that thread run, and draw again,
    as the creation of a pipe does."""
    if threading.get_ident() in _forking:
        torch.default_generator.get_state()


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(before=_wait_for_draws)


class LoaderWorker(_Process):  # type: ignore[misc]
    """A forked process that begins once it has acquired the locks that it needs, at the end of the `starting` block."""

    _line: tuple[socket.socket, socket.socket]  # the parent's end, and its own, for the token and its report

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        popen = _fork(process)
        _awaited[process] = popen, {name: getattr(process, name) for name in ("_target", "_args", "_kwargs")}
        return popen

    def run(self) -> None:
        """Renew or acquire each lock that is needed before the user's code runs, report, and begin."""
        for lock in (share_memory_lock, *seeding_locks()):
            getattr(lock, _RENEW)()
        share_memory_map.clear()  # left by threads that do not exist here
        if (numpy := sys.modules.get("numpy")) is not None:
            getattr(numpy.random.get_bit_generator().lock, _RENEW)()
            numpy.random.seed(0)  # no state is left half-written; torch seeds each worker again
        torch.manual_seed(0)  # not the generator's alone: it acquires whatever torch does again after the report
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        handlers = [each for logger in loggers for each in getattr(logger, "handlers", ())]
        logs = [each.stream for each in handlers if isinstance(each, logging.StreamHandler)]
        for stream in (sys.stdout, sys.stderr, *logs):
            if not getattr(stream, "closed", True):
                stream.flush()  # acquires the stream's lock, which a thread that printed or logged may have held
        own = self._line[1]
        for each in (self, *_awaited):
            each._line[0].close()  # or the parent's death would not end the wait for a token that was taken back
        token = b""
        with own, contextlib.suppress(OSError):  # the parent has died, or awaits no report any more
            token = own.recv(1)
            own.send(token)
        if token:
            super().run()


class Context(_Context):  # type: ignore[misc]
    """multiprocessing's "fork" context, with processes that report before they begin."""

    Process = LoaderWorker


def context_of(given: Any) -> Any:
    """The multiprocessing context for a DataLoader whose own is `given`: None, a name, or a context."""
    method = given if isinstance(given, str) else (given or multiprocessing).get_start_method()
    if "numpy" in sys.modules:
        import numpy.random  # noqa: F401 - else each worker would, in 20 ms
    return Context() if method == "fork" else given


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """In this block, loader workers are forked; at its end all have begun, or, after an error, have ended.

    Raises:
        RuntimeError: one was stuck each time that it was forked.
    """
    with _one_at_a_time:
        try:
            yield
            for process in [*_awaited]:
                _await(process)
        finally:
            for process in _awaited:  # after an error
                process.kill()
                process.join()
                _close(process)
            _awaited.clear()


def _fork(process: Any) -> Any:
    """Fork the process; return its Popen."""
    from multiprocessing.popen_fork import Popen  # here: Windows has none

    process._line = socket.socketpair()
    process._line[0].send(b".")
    try:
        _forking.add(threading.get_ident())
        return Popen(process)
    finally:
        _forking.clear()


def _close(process: Any) -> None:
    for end in process._line:
        end.close()


def _has_begun(process: Any, patience_s: float) -> bool:
    """Whether the process has reported, or died, within the time, or could not be held back after it."""
    popen, _ = _awaited[process]
    waiting = select.poll()  # `select.select` refuses descriptors from 1,024 on
    for each in (process._line[0], popen.sentinel):
        waiting.register(each, select.POLLIN)
    if not waiting.poll(1000 * patience_s):
        with contextlib.suppress(BlockingIOError):  # the process has taken it
            return not process._line[1].recv(1, socket.MSG_DONTWAIT)
    return True


def _await(process: Any) -> None:
    """Await the report of the process; if it is stuck, kill it, and fork it again."""
    for attempt, patience_s in enumerate(PATIENCE_S):
        popen, runs = _awaited[process]
        if attempt:
            popen.kill()
            popen.wait()
            _close(process)
            vars(process).update(runs)  # `start` has removed it
            popen = _fork(process)
            vars(process).update(_popen=popen, _sentinel=popen.sentinel)
            for name in runs:
                delattr(process, name)
            _awaited[process] = popen, runs
        if _has_begun(process, patience_s):
            _close(process)
            del _awaited[process]
            return
    raise RuntimeError(
        f"a loader worker was forked {len(PATIENCE_S)} times and did not begin: each time another thread held a "
        "lock that it needs (of torch's generators, of stdout, stderr or a log); let no thread draw or print "
        "continuously while the loop runs, or pass multiprocessing_context='forkserver', or num_workers=0"
    )
