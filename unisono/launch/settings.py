"""Settings that a script made before `spawn`, and its workers inherit: of the interpreter, the process, torch and
NumPy.

A worker is forked from another process, and would have the defaults. So the caller reads each setting of `SETTINGS`,
and a worker sets those in which it differs, before it imports the modules of `fn`. Loggers are handled separately
(`loggers.py`); the interpreter's options (`-W`, `-X`, `-O`) are on the zygote's command line.

*Threads:* the modes of torch and the context of decimal belong to a thread: they are read in the one that calls
`spawn`, and set in the one that runs `fn`.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.backends.switches import SWITCHES, Switch
from unisono.launch.loggers import Logging, read_loggers

try:
    import resource
except ImportError:  # not on Windows, where there are no workers
    _LIMITS: dict[str, int] = {}
else:
    _LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _umask() -> int | None:
    """Read without setting it, which could affect a file that another thread creates; None if the system does not
    report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:")), None)


def _set_umask(mask: int | None) -> None:
    if mask is not None:
        os.umask(mask)


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _set_nice(value: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, value)


def _affinity() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _set_affinity(cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _set_limits(limits: dict[str, tuple[int, int]]) -> None:
    for name, wanted in limits.items():
        if resource.getrlimit(_LIMITS[name]) != wanted:
            try:
                resource.setrlimit(_LIMITS[name], wanted)
            except (OSError, ValueError) as error:
                raise OSError(f"{name}={wanted}: {error}") from error


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index] # typeshed has it as a Sequence
    # Python caches which warnings were shown, and drops that cache only if it knows of the change.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _captures_warnings() -> bool:
    return logging._warnings_showwarning is not None  # type: ignore[attr-defined]


def _decimal_context() -> decimal.Context:
    return decimal.getcontext().copy()


def _stack_size() -> int:
    size = threading.stack_size()  # this call resets it
    threading.stack_size(size)
    return size


def _gc() -> tuple[bool, tuple[int, int, int]]:
    return gc.isenabled(), gc.get_threshold()


def _set_gc(value: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


def _time_zone() -> tuple[str, ...]:
    return time.tzname


def _set_time_zone(_: tuple[str, ...]) -> None:
    time.tzset()  # from the environment, which by now is the caller's


def _locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _set_locale(value: str) -> None:
    locale.setlocale(locale.LC_ALL, value)


def _start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _set_start_method(method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


def _numpy_generator() -> tuple[Any, ...] | None:
    """None if unused: NumPy imports the module on first use, to draw or to seed."""
    if "numpy.random" not in sys.modules:
        return None
    kind, words, *rest = sys.modules["numpy.random"].get_state()
    return kind, words.tobytes(), *rest


def _set_numpy_generator(state: tuple[Any, ...] | None) -> None:
    import numpy

    if state is None:  # the zygote may have imported it, and no two workers may draw the same numbers
        numpy.random.seed()
    else:
        kind, words, *rest = state
        numpy.random.set_state((kind, numpy.frombuffer(words, dtype="uint32"), *rest))


def _of_numpy(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> Switch:
    """A setting of NumPy; a caller that has not imported it has changed none."""

    def get() -> Any:
        return read(sys.modules["numpy"]) if "numpy" in sys.modules else None

    def set_(value: Any) -> None:
        if value is not None:
            import numpy

            write(numpy, value)

    return get, set_


PROCESS: dict[str, Switch] = {
    "os.umask": (_umask, _set_umask),
    "os.nice": (_nice, _set_nice),
    "os.sched_setaffinity": (_affinity, _set_affinity),
    "resource.setrlimit": (_limits, _set_limits),
}
"""Set first, so that threads and files created later get them."""

INTERPRETER: dict[str, Switch] = {
    "random.seed": (random.getstate, random.setstate),
    "numpy.random.seed": (_numpy_generator, _set_numpy_generator),
    "numpy.seterr": _of_numpy(lambda numpy: numpy.geterr(), lambda numpy, value: numpy.seterr(**value)),
    "numpy.set_printoptions": _of_numpy(
        lambda numpy: numpy.get_printoptions(), lambda numpy, value: numpy.set_printoptions(**value)
    ),
    "warnings.filterwarnings": (lambda: list(warnings.filters), _set_warning_filters),
    "logging.captureWarnings": (_captures_warnings, logging.captureWarnings),
    "decimal.setcontext": (_decimal_context, decimal.setcontext),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.setswitchinterval": (sys.getswitchinterval, sys.setswitchinterval),
    "sys.set_int_max_str_digits": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "threading.stack_size": (_stack_size, threading.stack_size),
    "gc.set_threshold": (_gc, _set_gc),
    "time.tzset": (_time_zone, _set_time_zone),
    "locale.setlocale": (_locale, _set_locale),
    "tempfile.tempdir": (lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)),
    "socket.setdefaulttimeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "multiprocessing.set_start_method": (_start_method, _set_start_method),
}

_GENERATORS = ("random.seed", "numpy.random.seed", "torch.manual_seed")

SETTINGS: dict[str, Switch] = {**PROCESS, **INTERPRETER, **SWITCHES}
"""Each setting's getter and setter, by the name under which a program sets it."""


class Value(NamedTuple):
    """A setting in transit.

    Attributes:
        data: pickled; equal bytes mean equal values.
        own: used instead of `data` for a value with classes of `__main__`, which are pickled with the call.
    """

    data: bytes
    own: Any = None


@dataclass(frozen=True)
class Settings:
    """What a worker adopts before its call.

    Attributes:
        values: by the names of `INTERPRETER` and `SWITCHES`.
        loggers: the caller's.
        seed: the seed of torch's generators; the state of the devices' generators exists in no other process.
    """

    values: dict[str, Value]
    loggers: Logging
    seed: int

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process and of the calling thread."""
        return cls(read_settings({**INTERPRETER, **SWITCHES}), read_loggers(), torch.initial_seed())


_inherited: dict[str, Value] = {}  # in a worker: the settings of the zygote when it was forked


def remember_settings() -> None:
    """In the zygote: save its workers from reading what they have inherited, which takes milliseconds in each."""
    _inherited.update(read_settings(SETTINGS))
    for name in _GENERATORS:
        _inherited.pop(name, None)  # Python's is reseeded after a fork


def read_settings(names: Iterable[str]) -> dict[str, Value]:
    """The settings of this process and of the calling thread, except those that cannot be read."""
    found = {}
    for name in names:
        with contextlib.suppress(Exception):  # torch refuses to report what was set in two ways
            value = SETTINGS[name][0]()
            data = pickle.dumps(value)
            found[name] = Value(b"", value) if b"__main__" in data else Value(data)
    return found


def adopt_settings(settings: dict[str, Value], names: Iterable[str]) -> dict[str, str]:
    """Set those of the named settings that differ.

    Returns:
        By name, why a setting could not be set.
    """
    chosen = {name: settings[name] for name in names if name in settings}
    ours = _inherited or read_settings(chosen)
    refused = {}
    for name, value in chosen.items():
        if not value.data or ours.get(name) != value:
            try:
                SETTINGS[name][1](pickle.loads(value.data) if value.data else value.own)
            except Exception as error:
                refused[name] = f"{type(error).__name__}: {error}"
    return refused
