"""The caller's loggers in its workers: levels, and handlers that write to a standard stream or to a file.

A handler cannot be pickled: it holds a lock and an open stream. So its other attributes are sent, and a worker makes
another handler of them, for its own stdout or stderr, or appending to the same file. A handler of another kind (to a
server, to memory, or one that rotates its files) stays with the caller.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from unisono.launch.unpicklable import is_picklable

Handler = tuple[type[logging.Handler], str, dict[str, Any]]
"""A handler's class; "stdout" or "stderr", if it writes to one of them; its attributes."""

_KNOWN = (logging.StreamHandler, logging.FileHandler, logging.NullHandler)


@dataclass(frozen=True)
class Logging:
    """What a worker needs in order to log as the caller does.

    Attributes:
        attributes: of the loggers that were changed since their creation, by name: level, propagate, disabled, filters.
        handlers: by the logger's name; the handlers of other loggers stay as a worker has them.
        disabled: the level up to which nothing is logged.
    """

    attributes: dict[str, dict[str, Any]]
    handlers: dict[str, list[Handler]]
    disabled: int


def read_loggers() -> Logging:
    """Describe the loggers of this process."""
    found = Logging({}, {}, logging.root.manager.disable)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if not isinstance(logger, logging.Logger):
            continue
        is_plain = logger.level == logging.NOTSET and logger.propagate and not logger.disabled
        if is_plain and not logger.handlers and not logger.filters:
            continue
        name = logger.name
        found.attributes[name] = {
            "level": logger.level,
            "propagate": logger.propagate,
            "disabled": logger.disabled,
            "filters": [each for each in logger.filters if is_picklable(each)],
        }
        if name.partition(".")[0] == "torch":  # torch adds its own handlers wherever it is imported
            continue
        found.handlers[name] = [each for each in map(_describe_handler, logger.handlers) if each is not None]
    return found


def adopt_loggers(facts: Logging) -> None:
    """Make this process log like the one that the loggers are from."""
    if logging.root.manager.disable != facts.disabled:  # setting it visits all loggers, so only if it differs
        logging.disable(facts.disabled)
    for name, attributes in facts.attributes.items():
        logger = logging.getLogger(name)
        vars(logger).update(attributes)
        if name in facts.handlers:
            # of a library that is imported here as well
            kept = [own for own in logger.handlers if type(own) not in _KNOWN]
            logger.handlers[:] = [*map(_make_handler, facts.handlers[name]), *kept]
    logging.root.setLevel(logging.root.level)  # clears what all loggers have cached of the levels


def _describe_handler(handler: logging.Handler) -> Handler | None:
    """Describe a handler; None if a worker cannot have an equivalent one."""
    attributes = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream")}
    stream = ""
    if type(handler) is logging.StreamHandler:
        known = {id(getattr(sys, name)): name.strip("_") for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
        stream = known.get(id(handler.stream), "")
        if not stream:
            return None
    elif type(handler) is logging.FileHandler:
        # It is opened with its first record. The caller's lines are already in the file, so append.
        attributes |= {"stream": None, "mode": "a"}
    return (type(handler), stream, attributes) if type(handler) in _KNOWN and is_picklable(attributes) else None


def _make_handler(described: Handler) -> logging.Handler:
    kind, stream, attributes = described
    handler = kind.__new__(kind)
    logging.Handler.__init__(handler)  # its lock
    vars(handler).update(attributes)
    if stream:
        vars(handler)["stream"] = getattr(sys, stream)
    return handler
