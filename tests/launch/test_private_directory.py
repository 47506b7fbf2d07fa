"""The private directory of a group: what is made for a run lies in it, and goes with the run, however that ends."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import torch
from faults import Script

from unisono.launch.rendezvous import rendezvous, sweep
from unisono.launch.spawn import spawn

LOADING = """
import os, sys, torch
from unisono.launch.spawn import spawn

def work(index, is_failing):
    batches = iter(torch.utils.data.DataLoader([torch.ones(100)] * 8, num_workers=2))
    next(batches)
    assert os.listdir(os.environ["TMPDIR"]) == [os.path.basename(os.environ["UNISONO_RENDEZVOUS"])]
    if is_failing and index == 1:
        raise KeyError(index)
    return len(list(batches))

print(spawn(work, (False,), nprocs=2))
try:
    spawn(work, (True,), nprocs=2)
except KeyError:
    print(os.listdir(os.environ["TMPDIR"]))
"""


def test_nothing_of_a_run_is_left_when_it_has_failed(tmp_path):
    with Script(LOADING, tmp_path) as script:
        code, output, errors = script.end()
        assert (code, output) == (0, "[7, 7]\n[]\n"), errors


def test_only_its_user_can_read_what_a_run_writes():
    def look(index):
        directory = Path(os.environ["UNISONO_RENDEZVOUS"])
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [directory, directory / "job"]}

    for modes in spawn(look, nprocs=2):
        assert sorted(modes.values()) == [0o600, 0o700]


KILLED = """
import os, signal, threading
from faults import Line
from pathlib import Path
from unisono.launch.spawn import spawn

def stand(index, line):
    line.say(index)
    threading.Event().wait()

spawn(stand, (Line(Path("line")),), nprocs=2)
"""

NEXT = """
import os
from unisono.launch.spawn import spawn
print(spawn(lambda index: index, nprocs=2), os.listdir(os.environ["TMPDIR"]))
"""


def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path, line, ear):
    with Script(KILLED, tmp_path) as script:
        ear.hear_all(2)
        temporary = script._temporary
        for process in [each for each in script.living() if "rank" not in each.name()]:  # caller and zygote, at once
            process.send_signal(signal.SIGSTOP)
        for process in [each for each in script.living() if "rank" not in each.name()]:
            process.send_signal(signal.SIGKILL)
        assert script.survivors() == []
        left = os.listdir(temporary)
        assert [name.startswith("unisono-1-") for name in left] == [True]
        (tmp_path / "next").mkdir()
        with Script(NEXT, tmp_path / "next", TMPDIR=str(temporary)) as following:
            code, output, errors = following.end()
        assert (code, output) == (0, "[0, 1] []\n"), errors


def test_only_what_is_known_to_be_deserted_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "unisono-1-nobody-says-so").mkdir()
    (tmp_path / "unisono-mine").mkdir()
    (deserted := tmp_path / "unisono-1-deserted").mkdir()
    (deserted / "job").touch()
    (tmp_path / "unisono-1-link").symlink_to(tmp_path / "unisono-mine")
    with rendezvous() as own:
        sweep(tmp_path)
        assert own.is_dir()
        assert not deserted.exists()
        left = {path.name for path in tmp_path.iterdir()} - {own.name}
    assert left == {"unisono-1-nobody-says-so", "unisono-mine", "unisono-1-link"}
    assert not own.exists()


def test_a_directory_that_cannot_be_searched_stops_nobody(tmp_path):
    sweep(tmp_path / "nowhere")


def test_loader_workers_run_however_long_the_path_of_the_temporary_directory_is(tmp_path, monkeypatch):
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    def load(index):
        batches = list(torch.utils.data.DataLoader([torch.ones(100)] * 4, num_workers=1))
        return len(batches), os.listdir(long)

    found = spawn(load, nprocs=2)
    assert [(count, len(names)) for count, names in found] == [(4, 1)] * 2
    assert os.listdir(long) == []
