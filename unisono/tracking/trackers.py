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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.arguments import check_type
from unisono.comm.outcome import add_note_once
from unisono.errors import UnisonoError
from unisono.report.timeline import LOG
from unisono.tracking.libraries import LIBRARIES, JsonLines, flat, is_installed
from unisono.tracking.tracker import Tracker, name_of, plain_step, plain_values
from unisono.world import World

logger = logging.getLogger(__name__)

LogWith = str | Tracker | Sequence[str | Tracker] | None


class Trackers:
    """The trackers of one Accelerator, those in `opened` while they are open. TypeError, ValueError or ImportError if
    `log_with` names none."""

    def __init__(self, log_with: LogWith, project_dir: str | os.PathLike[str] | None, is_main_process: bool) -> None:
        self._names, self._own = _choose(log_with)
        self._directory = os.fspath(project_dir or "runs")
        self.is_main_process = is_main_process
        self.opened: list[Tracker] = []

    def open(self, project_name: str, config: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin a run; raises as `Accelerator.init_trackers`."""
        check_type(project_name, "project_name", "pass the name of the project", str)
        check_type(config, "config", "pass a mapping: vars(config), for an argparse.Namespace", Mapping)
        if unknown := [name for name in options if name not in LIBRARIES]:
            raise ValueError(f"init_kwargs has options for {unknown[0]!r}; it takes those of {', '.join(LIBRARIES)}")
        if self.opened:
            raise UnisonoError(
                f"init_trackers({project_name!r}), but trackers are open already; end their run by end_training() first"
            )
        if "://" in self._directory:
            raise ValueError(f"project_dir={self._directory!r} is a URL, and trackers write files; pass a path")
        directory = Path(self._directory) / project_name
        logger.info("trackers write to %s", directory.absolute())
        try:
            self.opened.append(JsonLines(directory, project_name, config))
            for name in self._names:
                self.opened.append(LIBRARIES[name](directory, project_name, config, options.get(name, {})))
            self.opened.extend(self._own)
        except BaseException:
            opened, self.opened = self.opened, []
            _for_each(opened, lambda tracker: tracker.close())
            raise

    def found(self, called: str) -> list[Tracker]:
        """The open trackers; UnisonoError if there are none."""
        if not self.opened:
            raise UnisonoError(f"{called} outside a run; call accelerator.init_trackers(project_name) first")
        return self.opened


class Tracked:
    """The logging methods of an Accelerator. The subclass sets `world` and `_trackers`."""

    world: World
    _trackers: Trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run of all trackers, which write to `project_dir / project_name`. Does nothing on ranks other than
        zero.

        Args:
            project_name: the name of the run's directory; also W&B's project, MLflow's experiment.
            config: the run's configuration, written to the first line of its file and shown where a library supports
                it.
            init_kwargs: further arguments for a library, by its name: `{"wandb": {"tags": ["baseline"]}}` goes to
                `wandb.init`, "tensorboard" to torch's `SummaryWriter`, "mlflow" to `mlflow.start_run`.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind, or `init_kwargs` names no library.
            UnisonoError: a run is open; `end_training` ends it.
            OSError: a file cannot be created.
            Exception: the error of a library.
        """
        if self._trackers.is_main_process:
            self._trackers.open(project_name, {} if config is None else config, init_kwargs or {})
            self.world.timeline.settings = {"project": project_name, **dict(flat(config or {}))}

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass values to all trackers. Only rank zero's values are used; those of other ranks are ignored.

        Args:
            values: numbers, tensors of one element, and strings, by name; None is left out.
            step: the training step; None leaves it to the tracker.

        Raises:
            UnisonoError: no run is open: `init_trackers` was not called, or `end_training` was.
            TypeError, ValueError: a value is of the wrong kind; the message names its key.
        """
        if not self._trackers.is_main_process:
            return
        with self.world.timeline.loop().named(LOG):
            plain, number = plain_values(values), plain_step(step)
            self.world.timeline.logged.append((time.perf_counter_ns(), number, plain))
            self.world.timeline.last_logged = plain
            # A copy for each, which a user's tracker may modify.
            _for_each(self._trackers.found("log"), lambda tracker: tracker.log(dict(plain), number))

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the run, the JSON lines file first; empty before and after the run, and on other ranks."""
        return list(self._trackers.opened)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of that name; on ranks other than zero, one that does nothing.

        Args:
            name: "jsonl", "tensorboard", "wandb", "mlflow", or the `name` or class name of an object.
            unwrap: return the library's own object, the tracker's `tracker`: a SummaryWriter, a Run, an ActiveRun.

        Raises:
            ValueError: there is no tracker of that name.
            UnisonoError: as for `log`.
        """
        if not self._trackers.is_main_process:
            return Nowhere()
        found = {name_of(tracker): tracker for tracker in self._trackers.found("get_tracker")}
        if name not in found:
            raise ValueError(f"there is no tracker {name!r}; there are {', '.join(found)}; pass log_with= for others")
        return getattr(found[name], "tracker", found[name]) if unwrap else found[name]

    def end_training(self) -> None:
        """End the run: close all trackers. Call it when everything is logged. Idempotent.

        Raises:
            Exception: the error of a tracker, after all trackers were closed; an ExceptionGroup if several failed.
        """
        # Emptied first: after a tracker's error, another call must not close the others twice.
        opened, self._trackers.opened = self._trackers.opened, []
        _for_each(opened, lambda tracker: tracker.close())


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
    names: list[str] = []
    own: list[Tracker] = []
    for each in asked:
        name = each.lower() if isinstance(each, str) else None
        if name == "all":
            names += filter(is_installed, LIBRARIES)
        elif name in LIBRARIES:
            if not is_installed(name):
                raise ImportError(f"log_with={name!r} needs a package that is not installed; pip install {name}")
            names.append(name)
        elif name is None and isinstance(each, Tracker) and not isinstance(each, type):
            own.append(each)
        elif name != JsonLines.name:  # which is always present
            raise (TypeError if name is None else ValueError)(
                f"log_with={each!r} is no tracker; pass {', '.join([*LIBRARIES, JsonLines.name, 'all'])}, or an object "
                "with the methods log(values, step) and close()"
            )
    return list(dict.fromkeys(names)), own


def _for_each(trackers: Sequence[Tracker], act: Callable[[Tracker], None]) -> None:
    """Call `act` with each tracker, then raise the errors: a single one as it is, several as a group."""
    errors: list[Exception] = []
    for tracker in trackers:
        try:
            act(tracker)
        except Exception as error:
            add_note_once(error, f"in the tracker {name_of(tracker)!r}")
            errors.append(error)
    if len(errors) == 1:
        raise errors.pop()
    if errors:
        raise ExceptionGroup(f"{len(errors)} trackers failed", errors)
