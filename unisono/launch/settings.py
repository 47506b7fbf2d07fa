"""Settings that a script made before `spawn`, and its workers inherit: what changes numbers, and warnings.

A worker is forked from another process, and would have the defaults. So the caller reads each setting of `SETTINGS`,
and a worker sets those in which it differs, before it imports the modules of `fn`. Loggers are handled separately
(`loggers.py`); the interpreter's options (`-W`, `-X`, `-O`) are on the zygote's command line. Whatever else a script
changes in its process, it changes in `fn`, too.

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
from dataclasses import dataclass, replace
from typing import Any

import torch

from unisono.backends.switches import SWITCHES, Switch
from unisono.launch.loggers import Logging, adopt_loggers, read_loggers
from unisono.launch.unpicklable import is_picklable
from unisono.protocols import Backend


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index] # typeshed has it as a Sequence
    # Python caches which warnings were shown, and drops that cache only if it knows of the change.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _captures_warnings() -> bool:
    return logging._warnings_showwarning is not None  # type: ignore[attr-defined]


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
    if state is not None:
        import numpy

        kind, words, *rest = state
        numpy.random.set_state((kind, numpy.frombuffer(words, dtype="uint32"), *rest))
    elif "numpy" in sys.modules:  # the zygote has imported it, and no two workers may draw the same numbers
        sys.modules["numpy"].random.seed()


SETTINGS: dict[str, Switch] = {
    "random.seed": (random.getstate, random.setstate),
    "numpy.random.seed": (_numpy_generator, _set_numpy_generator),
    "warnings.filterwarnings": (lambda: list(warnings.filters), _set_warning_filters),
    "logging.captureWarnings": (_captures_warnings, logging.captureWarnings),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "tempfile.tempdir": (lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)),
    "multiprocessing.set_start_method": (_start_method, _set_start_method),
    **SWITCHES,
}
"""Each setting's getter and setter, by the name under which a program sets it."""


@dataclass(frozen=True)
class Settings:
    """What a worker adopts before its call.

    Attributes:
        values: by the names of `SETTINGS`.
        loggers: the caller's.
        seed: the seed of torch's generators; the state of the devices' generators exists in no other process.
    """

    values: dict[str, Any]
    loggers: Logging
    seed: int

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process and of the calling thread, except those that cannot be sent to another one."""
        settings = cls(_read_values(), read_loggers(), torch.initial_seed())
        if is_picklable(settings.values):
            return settings
        return replace(settings, values={name: each for name, each in settings.values.items() if is_picklable(each)})

    def adopt(self, backend: Backend) -> dict[str, str]:
        """Set, in a worker of that device family, what differs. Returns, by name, why a setting could not be set."""
        # First: it also reseeds the CPU's generator, whose exact state is among the settings.
        if backend.moves_in_background:  # it has its own generator, which may not even exist in the caller
            torch.manual_seed(self.seed)
        own = _read_values()
        refused = {}
        for name, value in self.values.items():
            # NumPy's is set in any case: without a state to set, it gets another seed than in the other forks.
            if name not in own or own[name] != value or name == "numpy.random.seed":
                try:
                    SETTINGS[name][1](value)
                except Exception as error:
                    refused[name] = f"{type(error).__name__}: {error}"
        adopt_loggers(self.loggers)
        return refused


def _read_values() -> dict[str, Any]:
    found = {}
    for name, (read, _) in SETTINGS.items():
        try:
            found[name] = read()
        except Exception:  # torch refuses to report what was set in two ways
            continue
    return found
