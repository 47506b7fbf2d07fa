"""The caller's loggers in its workers: levels, and handlers that write to a standard stream or to a file.

A handler cannot be pickled: it holds a lock and an open stream. Instead its description is sent, and a worker makes
another handler, for its own stdout or stderr, or appending to the same file. A handler of another kind (to a server, to
memory, or one that rotates its files) stays with the caller, and `read_loggers` reports that.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.imported_modules import is_users_file
from unisono.launch.unpicklable import is_picklable

_STREAMS = ("stdout", "stderr")
_FILES = (logging.FileHandler, logging.handlers.WatchedFileHandler)
_KNOWN = (logging.StreamHandler, logging.NullHandler, *_FILES)


@dataclass(frozen=True)
class HandlerFacts:
    """The description of a handler.

    Attributes:
        kind: its class.
        stream: "stdout" or "stderr", if it writes to one of them.
        path, encoding, errors: of its file, if it writes to one.
    """

    kind: type[logging.Handler]
    level: int
    formatter: logging.Formatter | None
    filters: list[Any]
    stream: str = ""
    path: str = ""
    encoding: str | None = None
    errors: str | None = None

    def make(self) -> logging.Handler:
        """Make an equivalent handler in this process."""
        handler = self._open()
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter)
        handler.filters[:] = self.filters
        return handler

    def _open(self) -> logging.Handler:
        if self.stream:
            return logging.StreamHandler(getattr(sys, self.stream))
        if isinstance(self.kind, type) and issubclass(self.kind, logging.FileHandler):
            # Append even if the caller's handler does not: the caller's lines are already in the file.
            return self.kind(self.path, "a", self.encoding, delay=True, errors=self.errors)
        return self.kind()


@dataclass(frozen=True)
class LoggerFacts:
    """The description of a logger; `handlers` is None if the worker's handlers are to stay."""

    name: str
    level: int
    propagate: bool
    disabled: bool
    filters: list[Any]
    handlers: list[HandlerFacts] | None


@dataclass(frozen=True)
class Logging:
    """What a worker needs in order to log as the caller does.

    Attributes:
        loggers: those that were changed since their creation, the root logger first.
        disabled: the level up to which nothing is logged.
        level_names: by level, including levels that the caller has added.
        left_out: what stays with the caller, in words.
    """

    loggers: list[LoggerFacts]
    disabled: int
    level_names: dict[int, str]
    left_out: list[str] = field(default_factory=list)


def read_loggers() -> Logging:
    """Describe the loggers of this process."""
    left_out: list[str] = []
    loggers = [_describe(each, left_out) for each in _changed_loggers()]
    names = {level: name for name, level in logging.getLevelNamesMapping().items()}
    return Logging(loggers, logging.root.manager.disable, names, left_out)


def adopt_loggers(facts: Logging) -> None:
    """Make this process log like the one that the loggers are from."""
    for level, name in facts.level_names.items():
        if logging.getLevelName(level) != name:
            logging.addLevelName(level, name)
    if logging.root.manager.disable != facts.disabled:  # setting it visits all loggers, so only if it differs
        logging.disable(facts.disabled)
    for each in facts.loggers:
        logger = logging.getLogger(each.name or None)
        if logger.level != each.level:
            logger.setLevel(each.level)
        logger.propagate, logger.disabled, logger.filters[:] = each.propagate, each.disabled, each.filters
        if each.handlers is not None:
            # of a library that is imported here as well
            kept = [own for own in logger.handlers if type(own) not in _KNOWN]
            logger.handlers[:] = [*(handler.make() for handler in each.handlers), *kept]


def _changed_loggers() -> Iterator[logging.Logger]:
    yield logging.root
    for each in list(logging.root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            is_plain = each.level == logging.NOTSET and each.propagate and not each.disabled
            if not is_plain or each.handlers or each.filters:
                yield each


def _describe(logger: logging.Logger, left_out: list[str]) -> LoggerFacts:
    name = "" if logger is logging.root else logger.name
    handlers: list[HandlerFacts] | None = None
    if name.split(".")[0] != "torch":  # torch adds its own handlers wherever it is imported
        described = [(each, _describe_handler(each)) for each in logger.handlers]
        handlers = [facts for _, facts in described if facts is not None]
        owner = f"logger {name!r}" if name else "the root logger"
        if not _is_of_library(name):
            left_out += [f"the handler {each!r} of {owner}" for each, facts in described if facts is None]
    filters = [each for each in logger.filters if is_picklable(each)]
    return LoggerFacts(name, logger.level, logger.propagate, logger.disabled, filters, handlers)


def _is_of_library(name: str) -> bool:
    """Whether a logger belongs to an installed package, which adds its handlers wherever it is imported."""
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    return isinstance(file, str) and not is_users_file(file)


def _describe_handler(handler: logging.Handler) -> HandlerFacts | None:
    """Describe a handler; None if a worker cannot have an equivalent one."""
    if not (is_picklable(handler.formatter) and is_picklable(handler.filters)):
        return None
    known: dict[str, Any] = {
        "kind": type(handler),
        "level": handler.level,
        "formatter": handler.formatter,
        "filters": list(handler.filters),
    }
    if type(handler) is logging.StreamHandler:
        stream = _standard_stream(handler.stream)
        return HandlerFacts(**known, stream=stream) if stream else None
    if type(handler) in _FILES and isinstance(handler, logging.FileHandler):
        return HandlerFacts(**known, path=handler.baseFilename, encoding=handler.encoding, errors=handler.errors)
    return HandlerFacts(**known) if type(handler) is logging.NullHandler else None


def _standard_stream(stream: object) -> str | None:
    return next((name for name in _STREAMS if stream in (getattr(sys, name), getattr(sys, f"__{name}__"))), None)
