"""What a loop calls to log: `init_trackers`, `log`, `end_training`.

*Threads:* as `trackers.py`.
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
        """Begin a run of all trackers, which write to `project_dir / project_name`; on other ranks than zero, nothing.

        Args:
            project_name: of the run's directory; W&B's project, MLflow's experiment.
            config: what the run was made with, in the first line of its file, and where a library shows it.
            init_kwargs: what a library takes beside, by its name: `{"wandb": {"tags": ["baseline"]}}` goes to
                `wandb.init`, "tensorboard" to torch's `SummaryWriter`, "mlflow" to `mlflow.start_run`.

        Raises:
            UnisonoError: a run has begun, and `end_training` has not ended it.
            OSError: a file cannot be made; and what a library raises.
        """
        self._trackers.open(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give values to all trackers. Rank zero's count; the others' are not looked at.

        Args:
            values: numbers, tensors of one element, and texts, by name.
            step: of the training; None leaves it to the tracker.

        Raises:
            UnisonoError: `init_trackers` was not called; ClosedError: `end_training` was.
            TypeError, ValueError: a value is something else; the message names its key.
        """
        with self.world.timeline.loop().named(LOG):
            self._trackers.log(values, step)

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the run, a file of JSON lines first; none before and after it, and on other ranks."""
        return list(self._trackers.opened)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name; on other ranks than zero, one that does nothing.

        Args:
            name: "jsonl", "tensorboard", "wandb", "mlflow", or the `name` or class of an object.
            unwrap: give the library's own object, its `tracker`: a SummaryWriter, a Run, an ActiveRun.

        Raises:
            ValueError: there is none of that name.
            UnisonoError: as for `log`.
        """
        return self._trackers.get(name, unwrap)

    def end_training(self) -> None:
        """End the run: close all trackers. Call it when all is logged; once more, it does nothing.

        Raises:
            Exception: what a tracker has raised, after the end of all others; of several, an ExceptionGroup.
        """
        self._trackers.close()
