"""`spawn(..., engine=)`: workers on machines that an engine lends, such as SLURM, Ray, or hosts by SSH.

An engine starts one of our agents per machine (`unisono/engines/machine.py`), which starts that machine's workers. A
result crosses the agent as bytes: the script's own classes are known to its workers, and to the caller.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from secrets import token_hex
from typing import Any, NoReturn
from uuid import uuid4

from unisono.arguments import check_integer
from unisono.comm.outcome import Outcome, first_cause
from unisono.comm.pickling import pickle_call
from unisono.errors import StoppedError
from unisono.launch.context import handlers_set, say_asked
from unisono.launch.job import Caller
from unisono.launch.options import Options
from unisono.launch.settings import Settings
from unisono.protocols import Engine, Run

_GROUP = "unisono.engines"
_LIBRARY = os.path.dirname(os.__file__)
_LOOK_S = 0.2
_HUNG_UP = 128 + 1  # the exit code after SIGHUP
_MARGIN_S = 10.0  # after the grace period, in which the agents of the other machines end


@dataclass(frozen=True)
class Bundle:
    """What the agent of each machine gets. The caller has the variables that the engine was asked to send; the first
    `num_first` entries of its search path precede the standard library: the script's directory, and PYTHONPATH."""

    call: bytes
    options: Options
    caller: Caller
    num_first: int = field(default_factory=lambda: [*sys.path, _LIBRARY].index(_LIBRARY))
    run_id: str = field(default_factory=lambda: uuid4().hex)
    secret: str = field(default_factory=lambda: token_hex(32), repr=False)

    def take_over(self) -> Caller:
        """Make this process, an agent, the caller of its machine's workers, with the directory and the paths that exist
        here, too."""
        with suppress(OSError):
            os.chdir(self.caller.directory)
        os.environ.update(self.caller.environ)
        path = [os.path.abspath(os.path.join(self.caller.directory, each)) for each in self.caller.path]
        first, last = (
            [each for each in part if each not in sys.path and os.path.isdir(each)]
            for part in (path[: self.num_first], path[self.num_first :])
        )
        sys.path[:] = [*first, *sys.path, *last]
        sys.argv[:] = self.caller.argv
        return replace(self.caller, environ=dict(os.environ), directory=os.getcwd(), path=list(sys.path))


def find_engine(engine: str | Engine) -> Engine:
    """The engine of this name, with its defaults, among the entry points "unisono.engines". ValueError: there is none;
    TypeError: it is not an engine; ImportError: the library that it needs is missing."""
    if not isinstance(engine, str):
        if isinstance(engine, type) or not hasattr(engine, "machines_for"):
            raise TypeError(f"engine={engine!r} is no engine; pass a name, or one such as Hosts(['node1', 'node2'])")
        return engine
    known = {each.name: each for each in entry_points(group=_GROUP)}
    if engine not in known:
        raise ValueError(f"engine={engine!r} does not exist; there are {', '.join(map(repr, sorted(known)))}")
    return known[engine].load()()  # type: ignore[no-any-return]


def spawn_on(
    engine: Engine, fn: Callable[..., Any], args: Sequence[Any], nprocs: int | None, options: Options
) -> list[Any]:
    """Call `fn(index, *args)` in workers on the engine's machines; as `spawn`."""
    if nprocs is None:
        raise ValueError("spawn(engine=) needs nprocs, the number of workers on all machines together")
    check_integer(nprocs, "nprocs", 1, "pass the number of workers on all machines together")
    options.check_ranks(nprocs)
    machines = engine.machines_for(nprocs)
    if nprocs % machines:
        raise ValueError(f"nprocs={nprocs} workers cannot be divided evenly between {machines} machines")
    caller = Caller(environ={name: os.environ[name] for name in engine.variables if name in os.environ}, columns=0)
    call = pickle_call(call_packed, (fn, tuple(args)), Settings.read())
    with _signals_raise(options.grace_s):
        run = engine.start(pickle.dumps(Bundle(call, options, caller)), machines, nprocs // machines)
        outcomes = _join(run, machines, options)
    failures = {number: each for number, each in outcomes.items() if each.error is not None}
    packed = dict(value for each in outcomes.values() for value in _results_of(each))
    if not failures or all(isinstance(each.error, StoppedError) for each in failures.values()):
        results = [Outcome.from_bytes(packed[rank]).unwrap() for rank in sorted(packed)]
        if not failures:
            return results
        raise StoppedError(results, max(each.error.steps for each in failures.values()))  # type: ignore[union-attr]
    failed = {number: each for number, each in failures.items() if not isinstance(each.error, StoppedError)}
    failed[first_cause(failed)].unwrap()
    raise AssertionError("an outcome with an error raises it")


def call_packed(index: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, bytes]:
    """Call `fn(index, *args)` in a worker; its rank, and the result as bytes."""
    return index, Outcome(value=fn(index, *args)).to_bytes()


def _results_of(outcome: Outcome[Any]) -> Sequence[tuple[int, bytes]]:
    if isinstance(outcome.error, StoppedError):
        return outcome.error.results  # type: ignore[return-value]
    return outcome.value or ()


def _join(run: Run, machines: int, options: Options) -> dict[int, Outcome[Any]]:
    """Wait for the agents. SIGTERM, and the first Ctrl-C, ask them to stop; the second one, and SIGHUP, end them."""
    outcomes: dict[int, Outcome[Any]] = {}
    deadline = float("inf")
    asked: BaseException | None = None
    try:
        while len(outcomes) < machines and time.monotonic() < deadline:
            try:
                for number, data in run.outcomes(_LOOK_S):
                    outcomes[number] = Outcome.from_bytes(data)
            except (KeyboardInterrupt, _Terminated) as error:
                if asked is not None or error.args == (_HUNG_UP,):
                    raise
                asked = error
                print("\nunisono: the workers are asked to stop; Ctrl-C again ends them now", file=sys.stderr)
                run.ask_to_stop()
            has_failed = any(not isinstance(each.error, StoppedError | None) for each in outcomes.values())
            if (has_failed or asked is not None) and deadline == float("inf"):
                deadline = time.monotonic() + options.grace_s + _MARGIN_S
    finally:
        run.kill()
    have_stopped = len(outcomes) == machines and all(isinstance(each.error, StoppedError) for each in outcomes.values())
    if asked is not None and not have_stopped:
        raise asked
    return outcomes


class _Terminated(SystemExit):
    """SIGTERM, or SIGHUP, of a closed terminal."""


@contextmanager
def _signals_raise(grace_s: float) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise in the block, where they would end this process at once."""
    names = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    is_main = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    taken = {each for each in names if is_main and signal.getsignal(each) is signal.SIG_DFL}

    def handle(signum: int, _: Any) -> NoReturn:
        if 128 + signum == _HUNG_UP:
            say_asked(signum, grace_s)
        raise _Terminated(128 + signum)

    with handlers_set(dict.fromkeys(taken, handle)):
        yield
