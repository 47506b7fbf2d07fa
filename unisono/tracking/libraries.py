"""Trackers over TensorBoard, Weights & Biases and MLflow, each imported when a run begins with it.

Who owns what: each owns the run that it has begun with its library, and ends it in `close`.

*Threads:* the one of the loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.tracking.tracker import Tracker, Value


class TensorBoard:
    """Event files in the run's directory; texts are shown as texts, the configuration as hyperparameters.

    Attributes:
        tracker: torch's SummaryWriter.
    """

    name = "tensorboard"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        module = import_module("torch.utils.tensorboard")
        self.tracker = module.SummaryWriter(**{"log_dir": str(directory), **options})
        if config:
            self.tracker.add_hparams(dict(flat(config)), {}, run_name=".")  # into the same directory
            self.tracker.flush()

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Add a scalar for each number, a text for each text."""
        for key, value in values.items():
            add = self.tracker.add_text if isinstance(value, str) else self.tracker.add_scalar
            add(key, value, global_step=step)
        self.tracker.flush()

    def close(self) -> None:
        """Close the event file."""
        self.tracker.close()


class WeightsAndBiases:
    """A run of Weights & Biases.

    Attributes:
        tracker: its Run.
    """

    name = "wandb"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        given = {"project": project, "config": dict(config), "dir": str(directory), **options}
        self.tracker = import_module("wandb").init(**given)

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Log the values."""
        self.tracker.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.tracker.finish()


class MLflow:
    """A run of MLflow, the active one, in the experiment of the project's name; texts are tags, the latest stays.

    It is kept where MLflow's tracking URI says, and not in the run's directory.

    Attributes:
        tracker: its ActiveRun.
    """

    name = "mlflow"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        self._mlflow.set_experiment(project)
        self.tracker = self._mlflow.start_run(**options)
        self._run_id = self.tracker.info.run_id
        pairs = list(flat(config))
        for start in range(0, len(pairs), _MOST_PARAMETERS):
            some = pairs[start : start + _MOST_PARAMETERS]
            self._client.log_batch(self._run_id, params=[self._entity("Param", key, str(value)) for key, value in some])

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Log a metric for each number, a tag for each text."""
        now_ms = int(time.time() * 1000)
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        numbers = {key: float(value) for key, value in values.items() if not isinstance(value, str)}
        metrics = [self._entity("Metric", key, value, now_ms, step or 0) for key, value in numbers.items()]
        tags = [self._entity("RunTag", key, value) for key, value in texts.items()]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()

    def _entity(self, kind: str, *content: Any) -> Any:
        return getattr(self._mlflow.entities, kind)(*content)


_MOST_PARAMETERS = 100  # that MLflow takes at once

Library = Callable[[Path, str, Mapping[str, Any], Mapping[str, Any]], Tracker]

LIBRARIES: dict[str, Library] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""By the names that `log_with` takes, which are those of their packages."""


def is_installed(name: str) -> bool:
    """Whether that library is there; it is not imported."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a directory of that name, as W&B makes one, has no origin


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """The entries of a configuration, those of inner mappings by dotted names; what is no number is its text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            is_plain = isinstance(value, bool | int | float | str)
            is_list = isinstance(value, list | tuple)
            shown = value if is_plain else json.dumps(value, default=str) if is_list else str(value)
            yield f"{prefix}{key}", shown
