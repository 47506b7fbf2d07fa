"""Settings that a script made before `spawn`, and its workers inherit: what changes numbers, warnings, and loggers.

A worker is forked from another process, and would have the defaults. So the caller reads each setting of `SETTINGS`,
and a worker sets those that differ from its own, before it imports the modules of `fn`. The interpreter's options
(`-W`, `-X`, `-O`) are on the zygote's command line. Anything else that a script changes, it has to change in `fn`, too.

A handler of `logging` cannot be pickled: it holds a lock and an open stream. So its other attributes are sent, and a
worker makes another one of them, for its own stdout or stderr, or appending to the same file. A handler of another kind
(to a server, to memory, or one that rotates its files) stays with the caller.

*Threads:* the modes of torch belong to a thread: they are read in the one that calls `spawn`, and set in the one that
runs `fn`.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unisono.comm.pickling import is_picklable
from unisono.devices.switches import SWITCHES, Switch
from unisono.protocols import Backend

Handler = tuple[type[logging.Handler], str, dict[str, Any]]
"""A handler's class; "stdout" or "stderr", if it writes to one of them; its attributes."""

_HANDLERS = (logging.StreamHandler, logging.FileHandler, logging.NullHandler)


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index] # typeshed has it as a Sequence
    # Python caches which warnings were shown, and drops that cache only if it knows of the change.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _numpy_generator() -> tuple[Any, ...] | None:
    """None if unused: NumPy imports the module on first use, to draw or to seed."""
    return sys.modules["numpy.random"].get_state() if "numpy.random" in sys.modules else None


def _set_numpy_generator(state: tuple[Any, ...] | None) -> None:
    if state is not None:
        import numpy

        numpy.random.set_state(state)
    elif "numpy" in sys.modules:  # the zygote has imported it, and no two workers may draw the same numbers
        sys.modules["numpy"].random.seed()


SETTINGS: dict[str, Switch] = {
    "random.seed": (random.getstate, random.setstate),
    "numpy.random.seed": (_numpy_generator, _set_numpy_generator),
    "warnings.filterwarnings": (lambda: list(warnings.filters), _set_warning_filters),
    "logging.captureWarnings": (
        lambda: logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        logging.captureWarnings,
    ),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "tempfile.tempdir": (lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)),
    "multiprocessing.set_start_method": (
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    ),
    **SWITCHES,
}
"""Each setting's getter and setter, by the name under which a program sets it."""


@dataclass(frozen=True)
class Settings:
    """What a worker adopts before its call."""

    values: dict[str, Any]  # by the names of `SETTINGS`
    # The caller's that were changed since their creation, by name; no handlers of those that a worker has itself.
    loggers: dict[str, tuple[dict[str, Any], list[Handler] | None]]
    seed: int  # of torch's generators; the state of the devices' generators exists in no other process

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process and of the calling thread, except those that cannot be sent to another one."""
        values = {name: each for name, each in _read_values().items() if is_picklable(each)}
        return cls(values, read_loggers(), torch.initial_seed())

    def adopt(self, backend: Backend) -> dict[str, str]:
        """Set, in a worker of that device family, what differs. Returns, by name, why a setting could not be set."""
        # First: it also reseeds the CPU's generator, whose exact state is among the settings.
        if backend.moves_in_background:  # it has its own generator, which may not even exist in the caller
            torch.manual_seed(self.seed)
        own = _read_values()
        refused = {}
        for name, value in self.values.items():
            # NumPy's is set in any case: without a state to set, it gets another seed than in the other forks.
            if name == "numpy.random.seed" or name not in own or own[name] != value:
                try:
                    SETTINGS[name][1](value)
                except Exception as error:
                    refused[name] = f"{type(error).__name__}: {error}"
        _adopt_loggers(self.loggers)
        return refused


def _read_values() -> dict[str, Any]:
    found = {}
    for name, (read, _) in SETTINGS.items():
        with suppress(Exception):  # torch refuses to report what was set in two ways
            found[name] = read()
    return found


def read_loggers() -> dict[str, tuple[dict[str, Any], list[Handler] | None]]:
    found: dict[str, tuple[dict[str, Any], list[Handler] | None]] = {}
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if not isinstance(logger, logging.Logger):
            continue
        if logger.level or not logger.propagate or logger.disabled or logger.handlers:
            attributes = {"level": logger.level, "propagate": logger.propagate, "disabled": logger.disabled}
            handlers: list[Handler] | None = None
            if logger.name.partition(".")[0] != "torch":  # torch adds its own wherever it is imported
                handlers = list(filter(None, map(_describe_handler, logger.handlers)))
            found[logger.name] = attributes, handlers
    return found


def _adopt_loggers(loggers: dict[str, tuple[dict[str, Any], list[Handler] | None]]) -> None:
    for name, (attributes, handlers) in loggers.items():
        logger = logging.getLogger(name)
        vars(logger).update(attributes)
        if handlers is not None:
            kept = [own for own in logger.handlers if type(own) not in _HANDLERS]  # of a library, also imported here
            logger.handlers[:] = [*map(_make_handler, handlers), *kept]
    logging.root.setLevel(logging.root.level)  # clears what all loggers have cached of the levels


def _describe_handler(handler: logging.Handler) -> Handler | None:
    """Describe a handler; None if a worker cannot have an equivalent one."""
    attributes = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream")}
    stream = ""
    if type(handler) is logging.StreamHandler:
        known = {id(getattr(sys, name)): name.strip("_") for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
        if not (stream := known.get(id(handler.stream), "")):
            return None
    elif type(handler) is logging.FileHandler:
        # It is opened with its first record. The caller's lines are already in the file, so append.
        attributes |= {"stream": None, "mode": "a"}
    return (type(handler), stream, attributes) if type(handler) in _HANDLERS and is_picklable(attributes) else None


def _make_handler(described: Handler) -> logging.Handler:
    kind, stream, attributes = described
    handler = kind.__new__(kind)
    logging.Handler.__init__(handler)  # its lock
    vars(handler).update(attributes | ({"stream": getattr(sys, stream)} if stream else {}))
    return handler
