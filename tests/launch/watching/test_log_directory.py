"""The directory of a run: its name, its link, and what a bad place is answered with."""

from __future__ import annotations

import os
import re

import pytest

from unisono.launch.watching.log_directory import log_file, make_log_directory, name_run


def test_a_run_is_named_by_time_and_process_and_latest_leads_to_the_last_one(tmp_path):
    paths = [make_log_directory(tmp_path / "logs" / "here", name) for name in ("", name_run("a"), "")]
    assert make_log_directory(tmp_path / "logs" / "here", paths[2].name) == paths[2], "of another machine of the run"
    assert len({*paths}) == 3
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_\d{{6}}\.\d{{6}}_a_{os.getpid()}", paths[1].name)
    assert {path.parent for path in paths} == {tmp_path / "logs" / "here"}
    assert os.readlink(tmp_path / "logs" / "here" / "latest") == paths[2].name
    assert log_file(paths[0], 3, "stderr") == paths[0] / "rank-3.stderr"


def test_a_log_dir_that_cannot_be_is_refused_in_the_error_s_own_type_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=rf"log_dir='{log_dir}' cannot hold .* pass a directory"):
            make_log_directory(log_dir)
    with pytest.raises(PermissionError, match=r"log_dir='/sys/logs' cannot hold .*; pass a directory"):
        make_log_directory("/sys/logs")


def test_something_else_by_the_name_of_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    path = make_log_directory(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "latest"]
    assert not (tmp_path / "latest").is_symlink()
