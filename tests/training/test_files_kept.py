"""What a replay keeps: files that are there cannot be changed by the script, in whatever way, and new ones can."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unisono.training.replay import Replay, files_kept

WAYS: dict[str, Callable[[Path], object]] = {
    "write": lambda path: path.write_text("new"),
    "append": lambda path: path.open("a").close(),
    "update": lambda path: os.close(os.open(path, os.O_RDWR)),
    "torch": lambda path: torch.save(1, path),
    "remove": lambda path: path.unlink(),
    "rename": lambda path: path.rename(path.with_name("other")),
    "replace": lambda path: os.replace(path.parent / "fresh", path),
    "truncate": lambda path: os.truncate(path, 1),
    "tree": lambda path: shutil.rmtree(path.parent),
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file below the directory that is kept."""
    (tmp_path / "below").mkdir()
    (path := tmp_path / "below" / "losses.txt").write_text("old")
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_there_is_kept(way: str, old: Path, tmp_path: Path) -> None:
    with files_kept(str(tmp_path)), pytest.raises(PermissionError, match=r"the script would change .*below.*--cwd DIR"):
        (old.parent / "fresh").write_text("fresh")
        WAYS[way](old)
    assert old.read_text() == "old"
    (old.parent / "fresh").write_text("fresh")
    WAYS[way](old)  # afterwards, nothing is refused


def test_a_link_from_elsewhere_leads_to_a_file_that_is_kept(old: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "elsewhere" / "link").symlink_to(old)
    with files_kept(str(tmp_path / "below")), pytest.raises(PermissionError):
        link.write_text("new")


def test_new_empty_and_hidden_files_can_be_written_and_all_can_be_read(old: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    for name in ("elsewhere", ".cache/file"):
        (tmp_path / name).write_text("old")
    (lock := tmp_path / "below" / "lock").touch()
    with files_kept(str(tmp_path / "below")):
        (tmp_path / "elsewhere").write_text("new")
    with files_kept(str(tmp_path)):
        assert old.read_text() == "old"
        lock.write_text("1")
        (tmp_path / ".cache" / "file").write_text("new")
        (new := tmp_path / "new").write_text("1")
        torch.save(1, new)
        new.write_text("2")
        new.unlink()


def test_what_is_written_has_its_place_in_the_scratch_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replay = Replay(1, 0, "", "/scratch", str(tmp_path), recorded=None)  # type: ignore[arg-type]
    place = replay.in_scratch("runs")
    assert place == f"/scratch{tmp_path}/runs"
    assert replay.in_scratch(f"{place}/best") == f"{place}/best"
    assert replay.in_scratch("s3://bucket/runs").startswith("/scratch/")
