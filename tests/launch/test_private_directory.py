"""The private directory of a group: what is made for a run lies in it, and goes with the run, however that ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch

from unisono.launch.spawn import spawn


def test_only_its_user_can_read_what_a_run_writes():
    def look(index):
        directory = Path(os.environ["UNISONO_RENDEZVOUS"])
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [directory, directory / "job"]}

    for modes in spawn(look, nprocs=2):
        assert sorted(modes.values()) == [0o600, 0o700]


def test_loader_workers_run_however_long_the_path_of_the_temporary_directory_is(tmp_path, monkeypatch):
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    def load(index):
        batches = list(torch.utils.data.DataLoader([torch.ones(100)] * 4, num_workers=1))
        return len(batches), os.listdir(long)

    found = spawn(load, nprocs=2)
    assert [(count, len(names)) for count, names in found] == [(4, 1)] * 2
    assert os.listdir(long) == []
