"""The trackers of one Accelerator, from `init_trackers` to `end_training`: which ones, and in which order.

Ownership: `Trackers` owns the trackers that it creates, and closes the user's along with them. Ranks other than zero
have none, and every method does nothing there.

*Threads:* the thread of the rank's loop.

Invariants:

1. Each tracker gets every `log` and every `close`, even if others raise; the errors are raised afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.errors import ClosedError, UnisonoError
from unisono.tracking.jsonl import JsonLines
from unisono.tracking.libraries import LIBRARIES, is_installed
from unisono.tracking.tracker import Tracker, name_of, plain_step, plain_values

logger = logging.getLogger(__name__)

LogWith = str | Tracker | Sequence[str | Tracker] | None

_DIRECTORY = "runs"


class Trackers:
    """The trackers of one Accelerator, those in `opened` while they are open. Raises the errors of
    `Accelerator(log_with=)`."""

    def __init__(self, log_with: LogWith, project_dir: str | os.PathLike[str] | None, is_main_process: bool) -> None:
        self._names, self._own = _choose(log_with)
        self._is_default = project_dir is None
        self._given = "" if project_dir is None else os.fspath(project_dir)
        self._directory = Path(self._given or _DIRECTORY)
        self._is_main_process = is_main_process
        self._has_ended = False
        self.opened: list[Tracker] = []

    def open(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """See `Accelerator.init_trackers`."""
        if not self._is_main_process:
            return
        config, options = _check_run(project_name, config, init_kwargs)
        if self.opened:
            raise UnisonoError(
                f"init_trackers({project_name!r}), but trackers are open already; end their run by end_training() first"
            )
        if self._has_ended and self._own:
            raise ClosedError(
                f"end_training() has closed {', '.join(map(name_of, self._own))}; pass new ones to a new Accelerator"
            )
        if "://" in self._given:
            raise ValueError(f"project_dir={self._given!r} is a URL, and trackers write files; pass a path for them")
        directory = self._directory / project_name
        if self._is_default:
            logger.info("trackers write to %s; pass project_dir= for another place", directory.absolute())
        try:
            self.opened.append(JsonLines(directory, project_name, config))
            for name in self._names:
                self.opened.append(LIBRARIES[name](directory, project_name, config, options.get(name, {})))
            self.opened.extend(self._own)
        except BaseException:
            opened, self.opened = self.opened, []
            _for_each(opened, lambda tracker: tracker.close())
            raise

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """See `Accelerator.log`."""
        if self._is_main_process:
            self._check_open("log")
            plain, number = plain_values(values), plain_step(step)
            # A copy for each, which a user's tracker may modify.
            _for_each(self.opened, lambda tracker: tracker.log(dict(plain), number))

    def get(self, name: str, unwrap: bool) -> Any:
        """See `Accelerator.get_tracker`."""
        if not self._is_main_process:
            return Nowhere()
        self._check_open("get_tracker")
        for tracker in self.opened:
            if name_of(tracker) == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        names = ", ".join(map(repr, map(name_of, self.opened)))
        raise ValueError(f"there is no tracker {name!r}; there are {names}; pass log_with= for others")

    def close(self) -> None:
        """See `Accelerator.end_training`."""
        # Emptied first: after a tracker's error, another call must not close the others twice.
        opened, self.opened = self.opened, []
        self._has_ended = self._has_ended or bool(opened)
        _for_each(opened, lambda tracker: tracker.close())

    def _check_open(self, called: str) -> None:
        if self.opened:
            return
        if self._has_ended:
            raise ClosedError(f"{called} after end_training(); call init_trackers(project_name) to begin another run")
        raise UnisonoError(f"{called} before init_trackers(); call accelerator.init_trackers(project_name) first")


class Nowhere:
    """What `get_tracker` returns on ranks without trackers: a tracker whose methods do nothing."""

    name = "nowhere"

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _choose(log_with: Any) -> tuple[list[str], list[Tracker]]:
    """The names of libraries, each once, and the user's own trackers."""
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
    names: dict[str, None] = {}
    own: list[Tracker] = []
    for each in asked:
        if isinstance(each, str):
            names.update(dict.fromkeys(_libraries_of(each)))
        elif isinstance(each, Tracker) and not isinstance(each, type):
            own.append(each)
        else:
            what = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            raise TypeError(
                f"log_with holds {what}; pass {_choices()}, or an object with the methods log(values, step) and close()"
            )
    taken = [*names, JsonLines.name]
    for tracker in own:
        if name_of(tracker) in taken:
            raise ValueError(f"log_with holds two trackers called {name_of(tracker)!r}; give one another `name`")
        taken.append(name_of(tracker))
    return list(names), own


def _libraries_of(name: str) -> list[str]:
    name = name.lower()
    if name == "all":
        return list(filter(is_installed, LIBRARIES))
    if name == JsonLines.name:  # always present
        return []
    if name not in LIBRARIES:
        raise ValueError(
            f"log_with={name!r} is unknown; pass {_choices()}, or an object with the methods log(values, step) and "
            "close()"
        )
    if not is_installed(name):
        raise ImportError(f"log_with={name!r} needs a package that is not installed; pip install {name}", name=name)
    return [name]


def _choices() -> str:
    return ", ".join(map(repr, [*LIBRARIES, JsonLines.name, "all"]))


def _check_run(
    project_name: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Mapping[str, Any]] | None
) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    if not isinstance(project_name, str) or not project_name:
        raise TypeError(f"project_name={project_name!r}; pass the name of the project, a string")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            f"config is of type {type(config).__name__}; pass a mapping: vars(config), for an argparse.Namespace"
        )
    options = init_kwargs or {}
    if unknown := [name for name in options if name not in LIBRARIES]:
        raise ValueError(
            f"init_kwargs has options for {unknown[0]!r}; it takes those of {', '.join(map(repr, LIBRARIES))}"
        )
    return config or {}, options


def _for_each(trackers: Sequence[Tracker], act: Callable[[Tracker], None]) -> None:
    """Call `act` with each tracker, then raise the errors: a single one as it is, several as a group."""
    errors: list[Exception] = []
    for tracker in trackers:
        try:
            act(tracker)
        except Exception as error:
            error.add_note(f"in the tracker {name_of(tracker)!r}")
            errors.append(error)
    if len(errors) == 1:
        raise errors.pop()
    if errors:
        raise ExceptionGroup(f"{len(errors)} trackers failed", errors)
