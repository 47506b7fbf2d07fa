"""The caller's loggers in its workers: levels, and handlers that write to a standard stream or to a file.

A handler cannot be pickled: it holds a lock and an open stream. So its other attributes are sent, and a worker makes
another handler of them, for its own stdout or stderr, or appending to the same file. A handler of another kind (to a
server, to memory, or one that rotates its files) stays with the caller, and `read_loggers` reports that.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.launch.imported_modules import is_users_file
from unisono.launch.unpicklable import is_picklable

_STREAMS = ("stdout", "stderr")
_FILES = (logging.FileHandler, logging.handlers.WatchedFileHandler)
_KNOWN = (logging.StreamHandler, logging.NullHandler, *_FILES)


class HandlerFacts(NamedTuple):
    """The description of a handler.

    Attributes:
        kind: its class.
        stream: "stdout" or "stderr", if it writes to one of them.
        attributes: the others.
    """

    kind: type[logging.Handler]
    stream: str
    attributes: dict[str, Any]

    def make(self) -> logging.Handler:
        """Make an equivalent handler in this process."""
        handler = self.kind.__new__(self.kind)
        logging.Handler.__init__(handler)  # its lock
        vars(handler).update(self.attributes)
        if self.stream:
            vars(handler)["stream"] = getattr(sys, self.stream)
        return handler


@dataclass(frozen=True)
class Logging:
    """What a worker needs in order to log as the caller does.

    Attributes:
        attributes: of the loggers that were changed since their creation, by name: level, propagate, disabled, filters.
        handlers: by the logger's name; the handlers of other loggers stay as a worker has them.
        disabled: the level up to which nothing is logged.
        level_names: by level, including levels that the caller has added.
        left_out: what stays with the caller, in words.
    """

    attributes: dict[str, dict[str, Any]]
    handlers: dict[str, list[HandlerFacts]]
    disabled: int
    level_names: dict[int, str]
    left_out: list[str]


def read_loggers() -> Logging:
    """Describe the loggers of this process."""
    attributes, handlers, left_out = {}, {}, []
    for logger in _changed_loggers():
        name = logger.name
        attributes[name] = {
            "level": logger.level,
            "propagate": logger.propagate,
            "disabled": logger.disabled,
            "filters": [each for each in logger.filters if is_picklable(each)],
        }
        if name.partition(".")[0] == "torch":  # torch adds its own handlers wherever it is imported
            continue
        described = [(each, _describe_handler(each)) for each in logger.handlers]
        handlers[name] = [facts for _, facts in described if facts is not None]
        if not _is_of_library(name):
            left_out += [f"the handler {each!r} of logger {name!r}" for each, facts in described if facts is None]
    names = {level: name for name, level in logging.getLevelNamesMapping().items()}
    return Logging(attributes, handlers, logging.root.manager.disable, names, left_out)


def adopt_loggers(facts: Logging) -> None:
    """Make this process log like the one that the loggers are from."""
    for level, level_name in facts.level_names.items():
        if logging.getLevelName(level) != level_name:
            logging.addLevelName(level, level_name)
    if logging.root.manager.disable != facts.disabled:  # setting it visits all loggers, so only if it differs
        logging.disable(facts.disabled)
    for name, attributes in facts.attributes.items():
        logger = logging.getLogger(name)
        vars(logger).update(attributes)
        if name in facts.handlers:
            # of a library that is imported here as well
            kept = [own for own in logger.handlers if type(own) not in _KNOWN]
            logger.handlers[:] = [*(handler.make() for handler in facts.handlers[name]), *kept]
    logging.root.setLevel(logging.root.level)  # clears what all loggers have cached of the levels


def _changed_loggers() -> Iterator[logging.Logger]:
    yield logging.root
    for each in list(logging.root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            is_plain = each.level == logging.NOTSET and each.propagate and not each.disabled
            if not is_plain or each.handlers or each.filters:
                yield each


def _is_of_library(name: str) -> bool:
    """Whether a logger belongs to an installed package, which adds its handlers wherever it is imported."""
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    return isinstance(file, str) and not is_users_file(file)


def _describe_handler(handler: logging.Handler) -> HandlerFacts | None:
    """Describe a handler; None if a worker cannot have an equivalent one."""
    attributes = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream")}
    if type(handler) not in _KNOWN or not is_picklable(attributes):
        return None
    if type(handler) is logging.StreamHandler:
        stream = _standard_stream(handler.stream)
        return HandlerFacts(logging.StreamHandler, stream, attributes) if stream else None
    if isinstance(handler, logging.FileHandler):
        # It is opened with its first record. The caller's lines are already in the file, so append.
        attributes |= {"stream": None, "mode": "a"}
    return HandlerFacts(type(handler), "", attributes)


def _standard_stream(stream: object) -> str | None:
    return next((name for name in _STREAMS if stream in (getattr(sys, name), getattr(sys, f"__{name}__"))), None)
