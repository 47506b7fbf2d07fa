"""The logging methods that a loop calls: `init_trackers`, `log`, `end_training`.

*Threads:* as for `trackers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.timeline import LOG
from unisono.tracking.tracker import Tracker
from unisono.tracking.trackers import Trackers
from unisono.world import World


class Tracked:
    """An Accelerator's trackers. The subclass sets `world` and `_trackers`."""

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
            UnisonoError: a run is open; `end_training` ends it.
            OSError: a file cannot be created.
            Exception: the error of a library.
        """
        self._trackers.open(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass values to all trackers. Only rank zero's values are used; those of other ranks are ignored.

        Args:
            values: numbers, tensors of one element, and strings, by name.
            step: the training step; None leaves it to the tracker.

        Raises:
            UnisonoError: `init_trackers` was not called.
            ClosedError: `end_training` was called.
            TypeError, ValueError: a value is of another kind; the message names its key.
        """
        with self.world.timeline.loop().named(LOG):
            self._trackers.log(values, step)

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
        return self._trackers.get(name, unwrap)

    def end_training(self) -> None:
        """End the run: close all trackers. Call it when everything is logged. Idempotent.

        Raises:
            Exception: the error of a tracker, after all trackers were closed; an ExceptionGroup if several failed.
        """
        self._trackers.close()
