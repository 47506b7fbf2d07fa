"""Trackers as Accelerate's scripts use them: their own, those of libraries, and where those write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modes import SOLO, THREADS_2

from unisono.compat.accelerate import Accelerator, utils
from unisono.compat.accelerate.tracking import GeneralTracker, on_main_process


class Own(GeneralTracker):
    name, requires_logging_directory, tracker = "own", False, None

    def __init__(self) -> None:
        super().__init__()
        self.tracker: list[Any] = []

    def start(self) -> None:
        self.tracker.append("start")

    def store_init_configuration(self, values: Any) -> None:
        self.tracker.append(values)

    def log(self, values: Any, step: int | None, **options: Any) -> None:
        self.tracker.append((values, step))

    def finish(self) -> None:
        self.tracker.append("finish")


def test_a_tracker_of_the_scripts_own_gets_its_calls(tmp_path: Path) -> None:
    own = Own()
    accelerator = Accelerator(log_with=own, project_dir=str(tmp_path))
    accelerator.log({"loss": 0.5})  # before a run it goes nowhere
    accelerator.init_trackers("run", {"lr": 1})
    assert accelerator.trackers == [own]
    assert accelerator.get_tracker("own", unwrap=True) is own.tracker
    accelerator.log({"loss": 1.0}, step=2)
    with pytest.raises(ValueError, match=r"log with the library's own object, accelerator.get_tracker\(name, unwrap"):
        accelerator.log({"loss": 1.0}, log_kwargs={"own": {"x": 1}})
    accelerator.end_training()
    assert own.tracker == ["start", {"lr": 1}, ({"loss": 1.0}, 2), "finish"]
    with pytest.raises(NotImplementedError, match="GeneralTracker has no name, requires_logging_directory, tracker"):
        GeneralTracker()


def test_a_tracker_written_as_in_their_guide_runs_on_rank_zero(tmp_path: Path) -> None:
    class Guided(GeneralTracker):
        name, requires_logging_directory = "guided", False

        @on_main_process
        def __init__(self, run: str) -> None:
            self.run = [run]

        @property
        def tracker(self) -> Any:
            return self.run

        @on_main_process
        def store_init_configuration(self, values: Any) -> None:
            self.run.append(values)

        @on_main_process
        def log(self, values: Any, step: int | None = None) -> None:
            self.run.append((values, step))

    def body() -> list[Any] | None:
        accelerator = Accelerator(log_with=(own := Guided("first")), project_dir=str(tmp_path))
        accelerator.init_trackers("run", {"lr": 1})
        own.log({"loss": 0.5})
        accelerator.log({"loss": 1.0}, step=2)
        accelerator.end_training()
        return getattr(own, "run", None)

    assert THREADS_2.run(body) == [["first", {"lr": 1}, ({"loss": 0.5}, None), ({"loss": 1.0}, 2)], None]


def test_a_tracker_that_logs_on_each_rank_is_refused_on_several(tmp_path: Path) -> None:
    class Each(Own):
        main_process_only = False

    def body() -> None:
        Accelerator(log_with=Each(), project_dir=str(tmp_path)).init_trackers("run")

    with pytest.raises(ValueError, match=r"Each has main_process_only=False.* log accelerator\.gather\(values\)"):
        THREADS_2.run(body)
    SOLO.run(body)


def test_trackers_write_to_the_logging_directory(tmp_path: Path) -> None:
    config = utils.ProjectConfiguration(project_dir=str(tmp_path / "project"), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(project_config=config)
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert (accelerator.logging_dir, accelerator.project_dir) == (str(tmp_path / "logs"), str(tmp_path / "project"))
    assert [each.name for each in tmp_path.rglob("*.jsonl")] == ["metrics.jsonl"]
    assert (tmp_path / "logs" / "run" / "metrics.jsonl").is_file()


def test_the_tensorboard_tracker_exposes_its_writer_for_diffusers_scripts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    for tracker in accelerator.trackers:
        assert tracker.name == "tensorboard"
        tracker.writer.add_images("validation", np.zeros((1, 8, 8, 3), "uint8"), 1, dataformats="NHWC")
        tracker.log({"loss": 1.0}, step=1)
    assert accelerator.get_tracker("tensorboard").writer is accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.end_training()
    assert len([*tmp_path.rglob("events.out.tfevents.*")]) == 1
