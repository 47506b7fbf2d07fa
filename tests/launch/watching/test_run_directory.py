"""The run directory: what it holds, what a reader finds at any moment, and what a bad place is answered with."""

from __future__ import annotations

import logging
import os
import re
import threading
from datetime import UTC, datetime, timedelta

import pytest
import torch
from recorded_runs import read_run

from unisono.errors import WorkerDiedError
from unisono.launch.options import Output
from unisono.launch.spawn import spawn
from unisono.launch.watching.run_directory import RunDirectory


def test_a_run_is_named_by_time_and_process_and_latest_leads_to_it(tmp_path):
    run = RunDirectory.create(tmp_path / "logs" / "here", {})
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_\d{{6}}_{os.getpid()}", run.path.name)
    assert run.path.parent == tmp_path / "logs" / "here"
    assert os.readlink(run.path.parent / "latest") == run.path.name
    assert (run.samples, run.log(3, "stderr")) == (run.path / "samples.jsonl", run.path / "rank-3.stderr")


def test_runs_of_the_same_second_have_directories_of_their_own(tmp_path):
    runs = [RunDirectory.create(tmp_path, {"number": number}) for number in range(5)]
    assert [read_run(run.path).facts["number"] for run in runs] == list(range(5))
    assert (tmp_path / "latest").resolve() == runs[-1].path
    assert len(list(tmp_path.iterdir())) == 6


def test_facts_state_and_times_are_told_while_it_runs_and_after(tmp_path):
    run = RunDirectory.create(str(tmp_path), {"argv": ["train.py"], "nprocs": 4, "directory": tmp_path})
    begun = read_run(run.path)
    assert begun.facts | {"started_at": ""} == {
        "argv": ["train.py"],
        "nprocs": 4,
        "directory": str(tmp_path),
        "state": "running",
        "started_at": "",
        "ended_at": None,
    }
    assert abs(datetime.fromisoformat(begun.facts["started_at"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert begun.samples == []
    run.finish("failed", first_cause=2)
    ended = read_run(run.path).facts
    assert (ended["state"], ended["first_cause"], ended["nprocs"]) == ("failed", 2, 4)
    assert ended["started_at"] == begun.facts["started_at"] <= ended["ended_at"]


def test_a_reader_finds_whole_facts_at_any_moment(tmp_path):
    run = RunDirectory.create(tmp_path, {"text": "x" * 100_000})
    has_read = threading.Event()

    def write() -> None:
        while not has_read.is_set():
            run.finish("finished", text="y" * 100_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        texts = {read_run(run.path).facts["text"] for _ in range(200)}
    finally:
        has_read.set()
        writer.join()
    assert texts <= {"x" * 100_000, "y" * 100_000}


def test_a_log_dir_that_is_a_file_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=rf"log_dir='{log_dir}' cannot hold .* pass a directory"):
            RunDirectory.create(log_dir, {})


def test_a_log_dir_that_cannot_be_made_is_refused_in_the_error_s_own_type():
    with pytest.raises(PermissionError, match=r"log_dir='/sys/logs' cannot hold .*; pass a directory"):
        RunDirectory.create("/sys/logs", {})


def test_something_else_by_the_name_of_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    run = RunDirectory.create(tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.path.name, "latest"]
    assert not (tmp_path / "latest").is_symlink()


def test_a_directory_that_cannot_be_written_any_more_is_told_once_and_ends_nothing(tmp_path, caplog):
    run = RunDirectory.create(tmp_path, {})
    (run.path / ".run.json").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        run.note(pids=[1])
        run.finish("finished")
    assert [record.getMessage() for record in caplog.records] == [
        f"{run.path} is incomplete from here on, the run continues: [Errno 28] No space left on device"
    ]


def test_a_run_says_its_versions_its_end_and_its_exit_code(tmp_path):
    with pytest.raises(WorkerDiedError):
        spawn(lambda index: os._exit(3), nprocs=2, output=Output(tmp_path))
    run = read_run(tmp_path / "latest")
    assert run.facts["versions"]["torch"] == torch.__version__
    assert run.facts["exit_code"] == 3
    spawn(lambda index: None, nprocs=2, output=Output(tmp_path))
    run = read_run(tmp_path / "latest")
    assert (run.facts["exit_code"], run.facts["state"]) == (0, "finished")
