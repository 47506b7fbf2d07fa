"""Outcome: a value, or an error and where it happened. The one envelope at every boundary between threads or processes.

Invariants:
1. `capture` lets no exception escape, not even `KeyboardInterrupt` and `SystemExit`: the caller of `unwrap` decides.
2. `to_bytes` never raises. A value that cannot be pickled becomes an error that names it.
3. `from_bytes` never raises. An exception class that cannot be rebuilt here becomes a `RemoteError` with the same text.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

from unisono.comm.pickling import dumps
from unisono.comm.stacks import fold_frames
from unisono.errors import BrokenWorldError, RemoteError, RemoteTraceback, UnpicklableError, WorkerDiedError

K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")

# Excludes SIGABRT, since a transport may end the peers of a failed rank with it.
_DEADLY = [-each for each in signal.Signals if each.name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")]
_CAUSED = "The above exception was the direct cause of the following exception:"
_SUGGESTION = r"Did you .*\?"  # Python's, after the message of an error
_set = BaseException.__setattr__  # an error that is a frozen dataclass refuses its own
_NEWS_S = 1.0  # the longest delay until the death of a worker is noticed


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of one piece of work."""

    value: T | None = None  # that it returned; meaningless if `error` is set
    error: BaseException | None = None  # that it raised
    where: str = ""  # the place in words, added to the error as a note when it is unwrapped
    at: float = 0.0  # when it ended, by `time.monotonic()`; comparable among the processes of one machine
    is_secondary: bool = False  # whether the error, or one in its chain, only reports that a peer broke the world

    @classmethod
    def capture(cls, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
        """Call `fn` and keep its value or its exception."""
        try:
            value = fn(*args, **kwargs)
        except BaseException as error:
            return cls.failure(error)
        return cls(value=value, at=time.monotonic())

    @classmethod
    def failure(cls, error: BaseException, where: str = "") -> Outcome[T]:
        """The outcome of work that has just raised `error`."""
        is_secondary = any(isinstance(link, BrokenWorldError) for link in chain_of(error))
        return cls(error=error, where=where, at=time.monotonic(), is_secondary=is_secondary)

    def unwrap(self) -> T:
        """Return the value, or raise the error with a note saying where it happened."""
        if self.error is None:
            return cast(T, self.value)
        add_note_once(self.error, self.where)
        raise self.error

    def to_bytes(self) -> bytes:
        """Serialize for another process; the traceback is sent as text."""
        if self.error is not None:
            return self._pack_error(self.error)
        storages: list[pickle.PickleBuffer] = []
        try:
            payload = dumps(self.value, storages.append)
        except Exception as reason:
            refusal = UnpicklableError(
                f"the result, a {type(self.value).__name__}, cannot be sent to the calling process "
                f"({type(reason).__name__}: {text_of(reason)}); return tensors, numbers or other picklable data"
            )
            return self._pack_error(refusal)
        # Apart: `where` and `at` can be read even if the value cannot be rebuilt, and what is large is copied once.
        parts: list[bytes | memoryview] = [payload, *(each.raw() for each in storages)]
        fields = pickle.dumps({"where": self.where, "at": self.at, "sizes": [len(each) for each in parts]})
        return b"".join((fields, *parts))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Outcome[Any]:
        """Rebuild an outcome; the `__cause__` of an error that was raised is a `RemoteTraceback` with its text."""
        fields = pickle.loads(data)
        where, at = fields["where"], fields["at"]
        if "traceback" in fields:
            try:
                error = _load_error(fields["payload"])  # None, if it could not be pickled
            except Exception:
                error = remote = RemoteError(f"{fields['type']}: {fields['message']}")
                remote.sent = {name: fields[name] for name in ("payload", "type", "message")}
            if fields["traceback"]:
                text = fields["traceback"]
                # Python shows the error itself again, after it.
                shown = fold_frames(text).removesuffix("".join(traceback.format_exception_only(error))).rstrip()
                cause = RemoteTraceback(text, shown.removesuffix(_CAUSED).rstrip() + "\n")
                _set(error, "__cause__", cause)
            return Outcome(error=error, where=where, at=at, is_secondary=fields["is_secondary"])
        ends = itertools.accumulate(reversed(fields["sizes"]), initial=0)
        last = len(data)
        parts = [memoryview(data)[last - end : last - start] for start, end in itertools.pairwise(ends)]
        payload, *storages = reversed(parts)
        try:
            return Outcome(value=pickle.loads(payload, buffers=storages), where=where, at=at)
        except Exception as reason:
            refusal = UnpicklableError(
                f"the result cannot be rebuilt in the calling process ({type(reason).__name__}: {text_of(reason)}); "
                "its class must be importable there"
            )
            refusal.__cause__ = reason
            return Outcome(error=refusal, where=where, at=at)

    def _pack_error(self, error: BaseException) -> bytes:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        sent = error.sent if isinstance(error, RemoteError) else None
        text = traceback_of(error)  # first: it adds notes, which are sent with the error
        fields = {
            **(sent or {"payload": _pickle_error(error), "type": kind, "message": text_of(error)}),
            "traceback": text,
            "where": self.where,
            "at": self.at,
            "is_secondary": self.is_secondary,
        }
        return pickle.dumps(fields)


def this_process(pid: int | None = None) -> str:
    """Describe a process of this machine, by default the current one, for a note: its pid and its node."""
    return f"pid {os.getpid() if pid is None else pid} on {platform.node()}"


def first_cause(failures: Mapping[K, Outcome[Any]]) -> K:
    """Whose failure came first: the earliest one that is not secondary, else the earliest.

    A process that was ended by an external signal comes before others that failed up to a second earlier: its peers
    learn of it sooner than its parent does, and may have raised errors that do not mention it.
    """

    def order(name: K) -> tuple[bool, float]:
        return failures[name].is_secondary, failures[name].at

    first = min(failures, key=order)
    # Ranks that have called different collectives: one of the fewest.
    odd = [name for name in getattr(failures[first].error, "odd_ranks", ()) if name in failures]
    first = next((name for name in odd if type(failures[name].error) is type(failures[first].error)), first)
    limit = failures[first].at + _NEWS_S
    killed = [
        name
        for name, each in failures.items()
        if isinstance(each.error, WorkerDiedError) and each.error.exit_code in _DEADLY and each.at <= limit
    ]
    return min(killed, key=order) if killed else first


def add_note_once(error: BaseException, note: str) -> None:
    """Add a note unless it is empty or already there: one error can pass several boundaries, or one boundary twice."""
    if not note:
        return
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, list):  # Python accepts anything there, and does not add to it
        notes = [] if notes is None else [_repr_of(notes)]
        _set(error, "__notes__", notes)
    if note not in notes:
        error.add_note(note)


def copy_error(error: BaseException) -> BaseException:
    """Copy an exception, with its type and content, so that two threads never raise the same object.

    Raising writes to the object (`__traceback__`, `__context__`), which two threads must not do at once. An exception
    that cannot be copied is returned itself.
    """
    twin = error
    for make in (copy.copy, lambda error: _rebuild(type(error), error.args, error.__dict__)):
        with contextlib.suppress(Exception):
            if _is_twin(made := make(error), error):
                twin = made
                break
    if twin is error:
        return error
    # The copy shares the list of notes, and each thread adds its own.
    if "__notes__" in twin.__dict__:
        _set(twin, "__notes__", list(error.__notes__))
    # These are not in `__dict__`, so no copy has them.
    _set(twin, "__cause__", error.__cause__)
    _set(twin, "__suppress_context__", error.__suppress_context__)
    for name in ("name", "obj") if isinstance(error, NameError | AttributeError) else ():
        with contextlib.suppress(AttributeError):  # Python's "Did you mean" needs them
            setattr(twin, name, getattr(error, name))
    return twin.with_traceback(error.__traceback__)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, its cause, and so on, as in Python's traceback; each once, even if an error is its own cause."""
    link: BaseException | None = error
    seen = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__context__ if link.__cause__ is None and not link.__suppress_context__ else link.__cause__


def traceback_of(error: BaseException) -> str:
    """The traceback as text; "" if it was never raised. A forwarded error keeps that of the process that raised it.

    Python's suggestions become notes of the error and its causes.
    """
    if error.__traceback__ is None and isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.text
    _note_suggestions(error)
    was_raised = error.__traceback__ or error.__cause__ or error.__context__
    text = "".join(traceback.format_exception(error)) if was_raised else ""
    return re.sub(rf"\. ({_SUGGESTION})\n(?=(?:.*\n)*\1\n)", "\n", text)


def _note_suggestions(error: BaseException) -> None:
    """Add Python's "Did you mean" as a note to an error and its causes: Python finds it where it prints an uncaught
    error, by the frames and objects of the process that raised it; Python 3.11's `traceback` does not."""
    links = [link for link in chain_of(error) if isinstance(link, NameError | AttributeError | ImportError)]
    if not links:
        return
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(error), error, error.__traceback__)
    for link in links:
        found = re.search(rf"{re.escape(text_of(link))}\. ({_SUGGESTION})$", printed.getvalue(), re.MULTILINE)
        add_note_once(link, found[1] if found else "")


def text_of(error: BaseException) -> str:
    """The message of an error; its arguments, if its own `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return _repr_of(error.args)


def _repr_of(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def _is_twin(made: BaseException, error: BaseException) -> bool:
    """Whether `made` is a faithful copy: an `__init__` that formats its message would format it a second time."""
    return type(made) is type(error) and text_of(made) == text_of(error)


def _pickle_error(error: BaseException) -> bytes | None:
    """Pickle an exception, so that `_load_error` makes one of the same type; None if that is impossible.

    If plain pickling does not survive (other arguments of `__init__`, a lock), its class, `args` and attributes are
    pickled one by one, and those that cannot be pickled are replaced by their repr.
    """
    found = None
    args = tuple(_portable(value) for value in error.args)
    state = {name: _portable(value) for name, value in error.__dict__.items()}
    for attempt in (error, (type(error), args, state)):
        try:
            data = dumps(attempt)
            loaded = _load_error(data)
        except Exception:
            continue
        if _is_twin(loaded, error):
            return data
        found = data if type(loaded) is type(error) else found  # the text may hold the address of an object
    return found


def _portable(value: Any) -> Any:
    try:
        pickle.loads(dumps(value))
    except Exception:
        return _repr_of(value)
    return value


def _load_error(data: bytes) -> BaseException:
    loaded = pickle.loads(data)
    return loaded if isinstance(loaded, BaseException) else _rebuild(*loaded)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Create an exception without running its `__init__`, which may require other arguments than `args`."""
    error = kind.__new__(kind, *args)
    _set(error, "args", args)
    error.__dict__.update(state)
    return error
