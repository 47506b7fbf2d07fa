"""Trackers for a file of JSON lines, and for TensorBoard, Weights & Biases and MLflow, each imported when a run begins
with it.

Ownership: each tracker owns the run that it starts in its library, and ends it in `close`.

*Threads:* the thread of the loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from io import FileIO
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from unisono.tracking.tracker import Tracker, Value


class JsonLines:
    """The file `metrics.jsonl` of a run, at `tracker`; `metrics-2.jsonl` and so on if earlier runs have left theirs.

    The first line describes the run, and each `log` adds one::

        {"project": "digits", "config": {"lr": 0.1}, "started": "2026-01-31T12:00:00+00:00"}
        {"step": 1, "time": 0.734, "values": {"loss": 2.31}}

    Numbers that JSON cannot represent are written as strings: "NaN", "Infinity", "-Infinity". When `log` returns, its
    line has been passed to the operating system: killing the process loses no line. A line that was only partly
    written, because the disk was full, spoils no other.
    """

    name = "jsonl"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.tracker, self._file = _create(directory)
        self._is_torn = False
        self._began = monotonic()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"project": project, "config": _name_non_finite(config), "started": started})

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Write one line; OSError if the line cannot be written."""
        elapsed_s = round(monotonic() - self._began, 3)
        self._write({"step": step, "time": elapsed_s, "values": _name_non_finite(values)})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, default=str, allow_nan=False)
        line = b"\n" * self._is_torn + text.encode() + b"\n"
        self._is_torn = True
        # FileIO is not buffered, and may write only a part.
        while line:
            line = line[self._file.write(line) :]
        self._is_torn = False


class TensorBoard:
    """Event files in the run's directory, by torch's SummaryWriter, which is `tracker`; strings are shown as text, the
    configuration as hyperparameters."""

    name = "tensorboard"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        writer: Any = import_module("torch.utils.tensorboard")
        self.tracker = writer.SummaryWriter(**{"log_dir": str(directory), **options})
        if config:
            self.tracker.add_hparams(dict(flat(config)), {}, run_name=".")  # in the same directory, not a subdirectory
            self.tracker.flush()

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Add a scalar for each number, and a text for each string."""
        for key, value in values.items():
            add = self.tracker.add_text if isinstance(value, str) else self.tracker.add_scalar
            add(key, value, global_step=step)
        self.tracker.flush()

    def close(self) -> None:
        self.tracker.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `tracker` is its Run."""

    name = "wandb"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        given = {"project": project, "config": dict(config), "dir": str(directory), **options}
        wandb: Any = import_module("wandb")
        self.tracker = wandb.init(**given)

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        self.tracker.log(dict(values), step=step)

    def close(self) -> None:
        self.tracker.finish()


class MLflow:
    """MLflow's active run, `tracker`, in the experiment named after the project. Strings are logged as tags, which keep
    the latest value.

    The run is stored where MLflow's tracking URI points, not in the run's directory.
    """

    name = "mlflow"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._mlflow.set_experiment(project)
        self.tracker = self._mlflow.start_run(**options)
        for key, value in flat(config):
            self._mlflow.log_param(key, str(value))

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Log a metric for each number, and a tag for each string."""
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        self._mlflow.log_metrics({key: float(value) for key, value in values.items() if key not in texts}, step=step)
        self._mlflow.set_tags(texts)

    def close(self) -> None:
        self._mlflow.end_run()


Library = Callable[[Path, str, Mapping[str, Any], Mapping[str, Any]], Tracker]

LIBRARIES: dict[str, Library] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""The trackers of libraries, by the names that `log_with` accepts, which are the packages' names."""


def is_installed(name: str) -> bool:
    """Whether that library is installed, without importing it."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a directory of that name, which W&B creates, has none


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Flatten a configuration: entries of inner mappings get dotted names, and values of other types become strings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            is_list = isinstance(value, list | tuple)
            shown = json.dumps(value, default=str) if is_list else str(value)
            yield f"{prefix}{key}", value if isinstance(value, Value) else shown


def _create(directory: Path) -> tuple[Path, FileIO]:
    for number in count(1):
        path = directory / ("metrics.jsonl" if number == 1 else f"metrics-{number}.jsonl")
        with suppress(FileExistsError):
            # "x" creates the file or fails, so runs that start at once do not share one.
            return path, FileIO(path, "xb")
    raise AssertionError("unreachable")


def _name_non_finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with their names, and keys with strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _name_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(each) for each in value]
    return value
