"""Trackers: one run of rank zero's, a file of JSON lines always, libraries where they are asked for, and one's own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_scripts
from faults import files_of_at_most, in_child
from modes import PROCESSES_2, SOLO, THREADS_2, Mode

from unisono import Accelerator
from unisono.errors import UnisonoError
from unisono.tracking import libraries
from unisono.tracking.libraries import JsonLines

ALL = pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)


class Noting:
    """A tracker of a user's own."""

    def __init__(self, name: str = "noting", breaks: str = "") -> None:
        self.name, self.breaks = name, breaks
        self.seen: list[Any] = []

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self.seen.append((dict(values), step))
        if "log" in self.breaks:
            raise ConnectionError(f"{self.name} has no network")

    def close(self) -> None:
        self.seen.append("closed")
        if "close" in self.breaks:
            raise OSError(f"{self.name} cannot write")


def records(directory: Path, name: str = "metrics.jsonl") -> list[Any]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def begun(directory: Path, *own: Any) -> Accelerator:
    accelerator = Accelerator(log_with=list(own), project_dir=directory)
    accelerator.init_trackers("digits")
    return accelerator


@ALL
def test_rank_zero_alone_writes_and_the_same_calls_do_nothing_elsewhere(mode: Mode, tmp_path: Path) -> None:
    def body() -> tuple[list[Any], list[str], Any]:
        own = Noting()
        accelerator = Accelerator(log_with=own, project_dir=tmp_path)
        accelerator.init_trackers("digits", {"lr": 0.1, "device": accelerator.device})
        for step in range(3):
            accelerator.log({"loss": torch.tensor(float(accelerator.process_index)), "step": step}, step)
        names = [type(each).__name__ for each in accelerator.trackers]
        accelerator.get_tracker("noting").log({"more": 1}, 7)
        accelerator.end_training()
        return own.seen, names, accelerator.trackers

    first, *others = mode.run(body)
    seen = [({"loss": 0.0, "step": step}, step) for step in range(3)]
    assert first == ([*seen, ({"more": 1}, 7), "closed"], ["JsonLines", "Noting"], [])
    assert others == [([], [], [])] * (mode.ranks - 1)
    head, *lines = records(tmp_path / "digits")
    assert head["project"] == "digits"
    assert head["config"]["lr"] == 0.1
    assert [(each["values"], each["step"]) for each in lines] == seen
    assert [each.name for each in (tmp_path / "digits").iterdir()] == ["metrics.jsonl"]


def test_numbers_texts_and_one_element_tensors_are_logged_as_plain_values(tmp_path: Path) -> None:
    own = Noting()
    accelerator = begun(tmp_path, own)
    values = {
        "tensor": torch.ones(1, 1, requires_grad=True),
        "whole": torch.tensor(3, dtype=torch.int32),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "float32": np.float32(0.25),
        "bool": np.bool_(False),
        "array": np.array([2]),
        "text": "best",
        "nan": float("nan"),
        "low": -float("inf"),
        "unknown yet": None,  # diffusers' `ema_model.cur_decay_value` before the first optimizer step
    }
    accelerator.log(values, torch.tensor(4))
    accelerator.end_training()
    (plain, step), _ = own.seen
    expected = {"tensor": 1.0, "whole": 3, "half": 0.5, "flag": True, "float32": 0.25, "bool": False, "array": 2}
    assert {key: plain[key] for key in expected} == expected
    assert {type(each) for each in plain.values()} == {float, int, bool, str}
    assert "unknown yet" not in plain
    assert (plain["text"], step, type(step)) == ("best", 4, int)
    _, line = records(tmp_path / "digits")
    assert line["values"] == {**expected, "text": "best", "nan": "NaN", "low": "-Infinity"}


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"fine": 1, "loss": torch.ones(3)}, ValueError, r"'loss' of shape \(3,\).*loss\.mean\(\)"),
        ({"loss": {"train": 1.0}}, TypeError, "'loss' of type dict.*its own key"),
        ({3: 1.0}, TypeError, "key=3 is of type int; keys are strings"),
        ([("loss", 1.0)], TypeError, "is of type list; pass a mapping from names to values"),
    ],
    ids=["many", "dict", "key", "no mapping"],
)
def test_an_unloggable_value_is_refused_by_its_key_and_nothing_is_written(
    values: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    own = Noting()
    accelerator = begun(tmp_path, own)
    with pytest.raises(error, match=words):
        accelerator.log(values)
    with pytest.raises(TypeError, match=r"step=1\.5 is of type float"):
        accelerator.log({"loss": 1.0}, 1.5)  # type: ignore[arg-type]
    accelerator.end_training()
    assert own.seen == ["closed"]
    assert len(records(tmp_path / "digits")) == 1


def test_calls_out_of_order_are_errors_that_say_what_to_call(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    accelerator.end_training()
    for _ in range(2):  # before the first run, and after it
        for call in (lambda: accelerator.log({"loss": 1.0}), lambda: accelerator.get_tracker("jsonl")):
            with pytest.raises(UnisonoError, match=r"outside a run; call accelerator\.init_trackers"):
                call()
        accelerator.init_trackers("digits")
        with pytest.raises(UnisonoError, match=r"trackers are open already; end their run by end_training\(\)"):
            accelerator.init_trackers("digits")
        with pytest.raises(ValueError, match="there is no tracker 'wandb'; there are jsonl"):
            accelerator.get_tracker("wandb")
        accelerator.end_training()
        accelerator.end_training()


def test_another_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    accelerator = begun(tmp_path)
    accelerator.log({"run": 1})
    accelerator.end_training()
    accelerator.init_trackers("digits", {"run": 2})
    assert accelerator.get_tracker("jsonl", unwrap=True) == tmp_path / "digits" / "metrics-2.jsonl"
    accelerator.end_training()
    assert records(tmp_path / "digits")[1]["values"] == {"run": 1}
    assert [each["config"] for each in records(tmp_path / "digits", "metrics-2.jsonl")] == [{"run": 2}]


def test_a_tracker_that_fails_reaches_the_user_and_hides_no_other(tmp_path: Path) -> None:
    first, second, third = Noting("first", "log"), Noting("second", "log close"), Noting("third", "close")
    accelerator = begun(tmp_path, first, second, third)
    with pytest.raises(ExceptionGroup) as several:
        accelerator.log({"loss": 1.0}, 1)
    assert [str(each) for each in several.value.exceptions] == ["first has no network", "second has no network"]
    assert third.seen == [({"loss": 1.0}, 1)], "it is given what the others have failed to take"
    assert len(records(tmp_path / "digits")) == 2
    with pytest.raises(ExceptionGroup) as several:
        accelerator.end_training()
    assert [str(each) for each in several.value.exceptions] == ["second cannot write", "third cannot write"]
    assert [each.seen[-1] for each in (first, second, third)] == ["closed"] * 3
    assert accelerator.trackers == []
    alone = begun(tmp_path, Noting("alone", "close"), Noting("other"))
    with pytest.raises(OSError, match="alone cannot write") as error:
        alone.end_training()
    assert error.value.__notes__ == ["in the tracker 'alone'"]


def test_a_full_disk_is_an_error_and_spoils_one_line_only(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, "digits", {})
    before = lines.tracker.stat().st_size
    with files_of_at_most(before + 10), pytest.raises(OSError, match="too large"):
        lines.log({"loss": 1.0}, 1)
    lines.log({"loss": 2.0}, 2)
    lines.close()
    head, torn, last = lines.tracker.read_text().splitlines()
    assert len(torn) == 10
    assert (json.loads(head)["project"], json.loads(last)["values"]) == ("digits", {"loss": 2.0})


def test_what_was_logged_is_read_after_the_process_was_killed(tmp_path: Path) -> None:
    def body() -> None:
        accelerator = begun(tmp_path)
        for step in range(100):
            accelerator.log({"loss": 1 / (1 + step)}, step)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(body) == -signal.SIGKILL
    _, *lines = records(tmp_path / "digits")
    assert [(each["step"], each["values"]["loss"]) for each in lines] == [(s, 1 / (1 + s)) for s in range(100)]


def test_each_accelerator_of_a_process_has_trackers_of_its_own(tmp_path: Path) -> None:
    def body() -> None:
        one, other = begun(tmp_path / "one"), begun(tmp_path / "other")
        one.log({"number": 1})
        other.log({"number": 2})
        other.end_training()
        one.log({"number": 3})
        one.end_training()

    THREADS_2.run(body)
    lines = [records(tmp_path / name / "digits")[1:] for name in ("one", "other")]
    found = [[each["values"]["number"] for each in some] for some in lines]
    assert found == [[1, 3], [2]]


class Half:
    def log(self, values: Mapping[str, Any], step: int | None) -> None: ...


@pytest.mark.parametrize(
    ("log_with", "error", "words"),
    [
        ("comet_ml", ValueError, "'comet_ml' is no tracker; pass tensorboard, wandb, mlflow, jsonl, all, or an"),
        (Half(), TypeError, r"Half.* is no tracker; .*log\(values, step\) and close\(\)"),
        ([Noting], TypeError, "Noting'> is no tracker"),
    ],
    ids=["unknown", "half of one", "a class"],
)
def test_what_is_no_tracker_is_refused_at_once(log_with: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Accelerator(log_with=log_with)


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is found is a directory of that name, as W&B leaves it where it has run: no package.
    monkeypatch.setattr(libraries, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(ImportError, match="log_with='wandb' needs a package that is not installed; pip install wandb"):
        Accelerator(log_with=["jsonl", "wandb"])
    assert Accelerator(log_with="all").trackers == []


def test_a_run_is_described_by_a_mapping_and_options_are_for_libraries(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    with pytest.raises(TypeError, match=r"config=\[1\] is of type list; pass a mapping: vars\(config\)"):
        accelerator.init_trackers("digits", [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="project_name=3"):
        accelerator.init_trackers(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_kwargs has options for 'wandv'"):
        accelerator.init_trackers("digits", init_kwargs={"wandv": {}})
    assert not list(tmp_path.iterdir())


def test_a_library_that_cannot_begin_leaves_nothing_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    own = Noting()
    accelerator = Accelerator(log_with=["tensorboard", own], project_dir=tmp_path)
    with pytest.raises(TypeError, match="no_such_option"):
        accelerator.init_trackers("digits", init_kwargs={"tensorboard": {"no_such_option": 1}})
    assert (accelerator.trackers, own.seen) == ([], [])
    accelerator.init_trackers("digits")
    accelerator.end_training()


LOGGING = """
import sys, torch
from unisono import Accelerator
accelerator = Accelerator(log_with=sys.argv[1], project_dir=sys.argv[2], cpu=True)
accelerator.init_trackers("digits", {"lr": 0.1, "optimizer": {"name": "sgd", "betas": [0.9, 0.99]}})
for step in range(3):
    accelerator.log({"loss": torch.tensor(1 / (1 + step)), "note": f"step {step}"}, step)
accelerator.end_training()
"""


def log_with(library: str, directory: Path, **environ: str) -> None:
    """In a process of its own, since it leaves services, files and variables."""
    pytest.importorskip(library)
    (directory / "script.py").write_text(LOGGING)
    done = warm_scripts.complete(directory / "script.py", library, str(directory), environ={**os.environ, **environ})
    assert done[0] == 0, done
    assert len(records(directory / "digits")) == 4


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    log_with("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("loss")]
    assert found == [(step, pytest.approx(1 / (1 + step))) for step in range(3)]
    texts = [each.tensor_proto.string_val[0] for each in events.Tensors("note/text_summary")]
    assert texts == [b"step 0", b"step 1", b"step 2"]
    shown = str(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    assert "optimizer.name" in shown
    assert "sgd" in shown


@pytest.mark.slow
def test_wandb_keeps_what_was_logged(tmp_path: Path) -> None:
    log_with("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (kept,) = (tmp_path / "digits").glob("wandb/offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for words in (b"digits", b"optimizer", b"loss", b"0.3333", *(b'"step %d"' % step for step in range(3))):
        assert words in content


@pytest.mark.slow
def test_mlflow_keeps_what_was_logged(tmp_path: Path) -> None:
    place = tmp_path / "mlruns"
    log_with("mlflow", tmp_path, MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI=place.as_uri())
    (losses,) = place.glob("*/*/metrics/loss")
    found = [(int(line.split()[2]), float(line.split()[1])) for line in losses.read_text().splitlines()]
    assert found == [(step, pytest.approx(1 / (1 + step))) for step in range(3)]
    run = losses.parent.parent
    assert (run / "tags" / "note").read_text() == "step 2"
    assert (run / "params" / "optimizer.betas").read_text() == "[0.9, 0.99]"
    assert "name: digits" in (run.parent / "meta.yaml").read_text()
    assert "status: 3" in (run / "meta.yaml").read_text(), "it has finished"


def test_trackers_may_have_a_directory_of_their_own(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path / "project", logging_dir=tmp_path / "logs", cpu=True)
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert [each.name for each in tmp_path.iterdir()] == ["logs"]
    with pytest.raises(TypeError, match="logging_dir=3 is of type int; pass a path, or None"):
        Accelerator(logging_dir=3)
