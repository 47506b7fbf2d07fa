"""What torch's elastic agent is told of signals and of its workers' end: by settings or, where it lacks them, by hand.

*Threads:* the main one, or the agent could not handle signals.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

_Method = Callable[..., None]


@contextlib.contextmanager
def agent_settings(spared: signal.Signals, handled: Sequence[signal.Signals], patience_s: int) -> Iterator[Any]:
    """Let an agent that is launched in the block handle some signals, and tell of its workers' end.

    Args:
        spared: whose handler stays.
        handled: which signals end it.
        patience_s: what workers have from its signal to SIGKILL.

    Yields:
        The settings that `LaunchConfig` takes among these. Torch 2.9 takes none.
    """
    settings = {"signals_to_handle": ",".join(signum.name for signum in handled), "shutdown_timeout": patience_s}
    known = {field.name for field in fields(LaunchConfig)}
    with contextlib.ExitStack() as replaced:
        if "signals_to_handle" not in known:
            replaced.enter_context(_changed(PContext, "start", lambda start: _sparing(spared, start)))
        if "shutdown_timeout" not in known:
            replaced.enter_context(_changed(PContext, "close", lambda close: _with_patience(patience_s, close)))
        if not hasattr(SubprocessContext, "_capture_process_failures"):
            replaced.enter_context(_changed(SubprocessContext, "_close", _looking_again))
        yield {name: value for name, value in settings.items() if name in known}


@contextlib.contextmanager
def _changed(kind: type, name: str, change: Callable[[_Method], _Method]) -> Iterator[None]:
    method = getattr(kind, name)
    setattr(kind, name, change(method))
    try:
        yield
    finally:
        setattr(kind, name, method)


def _sparing(signum: signal.Signals, start: _Method) -> _Method:
    def changed(workers: PContext) -> None:
        before = signal.getsignal(signum)
        start(workers)
        signal.signal(signum, before)

    return changed


def _with_patience(patience_s: int, close: _Method) -> _Method:
    def changed(workers: PContext, death_sig: signal.Signals | None = None, timeout: int = patience_s) -> None:
        close(workers, death_sig, timeout)

    return changed


def _looking_again(close: _Method) -> _Method:
    """How the others ended counts, too: the first to be seen need not be the first that has failed."""

    def changed(workers: SubprocessContext, *args: Any, **kwargs: Any) -> None:
        close(workers, *args, **kwargs)
        for local_rank, handler in workers.subprocess_handlers.items():
            exit_code = handler.proc.poll()
            if exit_code and local_rank not in workers._failures:
                workers._failures[local_rank] = ProcessFailure(
                    local_rank, handler.proc.pid, exit_code, workers.error_files[local_rank]
                )

    return changed
