"""A /dev/shm that is too small is named where it fails, and no batch is waited for in vain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from epochs import Numbers
from torch.utils.data import DataLoader

from unisono import DeviceLoader
from unisono.loading import packing
from unisono.loading.packing import is_tight

MB = 1_000_000
PLACE = packing.SHM

SCRIPT = """
import gc, json, logging, mmap, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from unisono import DeviceLoader


class Large(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((1_000_000,), index, dtype=torch.uint8)


class Growing(Large):
    def __getitem__(self, index):
        return super().__getitem__(index).repeat(1 if index < 30 else 3)


class Writing(Large):
    def __getitem__(self, index):
        with open("/dev/shm/own", "wb+") as file:
            file.truncate(64_000_000)
            mmap.mmap(file.fileno(), 64_000_000)[:] = b"x" * 64_000_000


class Words(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


def story(**options):
    said.clear()
    found = []
    gc.collect()
    while (place := os.statvfs("/dev/shm")).f_bfree < 0.95 * place.f_blocks:  # as long as workers end that hold some
        time.sleep(0.01)
    try:
        for batch in DeviceLoader(DataLoader(**options)):
            found += batch[:, 0].tolist()
    except RuntimeError as error:
        said.append("\\n".join([str(error), *error.__notes__]))
    return found, said[:]


said = []
logging.getLogger("unisono").addHandler(Words())
one, two, own = {"num_workers": 1, "prefetch_factor": 4}, {"num_workers": 2}, {"collate_fn": torch.stack}
stories = {
    "by default_collate": story(dataset=Growing(), batch_size=3, **one),
    "by a collate_fn of one's own": story(dataset=Growing(), batch_size=3, **own, **one),
    "one by one": story(dataset=Large(), batch_size=1, **two),
    "one by one, by a collate_fn of one's own": story(dataset=Large(), batch_size=1, **own, **two),
    "by the dataset": story(dataset=Writing(), batch_size=3, **two),
}
print(json.dumps(stories))
"""


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[str]]]:
    """What loaders deliver and say where /dev/shm has 8 MB: a mount in a namespace of the script's own."""
    script = tmp_path_factory.mktemp("shm") / "script.py"
    script.write_text(SCRIPT)
    mount = f"mount -t tmpfs -o size=8000k none {PLACE}"
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare`")
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr}")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "{sys.executable}" "{script}"']
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=Path.cwd())
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("made", ["by default_collate", "by a collate_fn of one's own"])
def test_where_the_batches_do_not_fit_the_error_says_so(stories, made):
    found, (error,) = stories[made]
    assert found == list(range(len(found)))
    assert 0 < len(found) < 40
    # a torch that reserves no memory for what it shares, as 2.9, is killed where it writes
    assert error.startswith("unable to allocate shared memory") or "was killed by SIGBUS" in error
    assert "/dev/shm, of 8.2 MB with " in error
    assert "docker run --shm-size" in error
    assert "fewer num_workers, a smaller prefetch_factor" in error


@pytest.mark.slow
@pytest.mark.parametrize("made", ["one by one", "one by one, by a collate_fn of one's own"])
def test_batches_waiting_for_the_loop_leave_dev_shm_if_those_in_flight_fit(stories, made):
    assert stories[made] == [list(range(40)), []]


@pytest.mark.slow
def test_a_loader_worker_that_a_bus_error_ends_is_told_of_with_the_reason(stories):
    found, (error,) = stories["by the dataset"]
    assert found == []
    assert "was killed by SIGBUS before its batch was received; /dev/shm, of 8.2 MB with " in error
    assert "docker run --shm-size" in error


class Bussed(Numbers):
    """Who loads sample 3 gets a bus error."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGBUS)
        return index


def test_a_bus_error_is_told_of_wherever_it_comes_from():
    with pytest.raises(RuntimeError, match=r"was killed by SIGBUS .*; /dev/shm, of .* MB free now, had no room"):
        list(DeviceLoader(DataLoader(Bussed(6), num_workers=1)))


@pytest.mark.parametrize(("size", "expected"), [(64 * MB, True), (2000 * MB, False), (None, False)])
def test_batches_are_copied_where_there_is_little_memory(monkeypatch, size, expected):
    monkeypatch.setattr(packing, "_free_and_size", lambda: size and (size, size))
    assert is_tight() == expected


READ_ONLY = """
import subprocess
from torch.utils.data import DataLoader
from unisono import spawn

def load(index):
    return len(list(DataLoader([1, 2], num_workers=1)))

try:
    spawn(load, nprocs=2, backend="cpu")
except OSError as error:
    print(error.__notes__)
subprocess.run(ADVICE, shell=True, check=True)
print(spawn(load, nprocs=2, backend="cpu"))
"""


@pytest.mark.slow
def test_an_unwritable_dev_shm_is_an_error_with_advice_that_works(tmp_path):
    advice = f"mount -o remount,rw {PLACE}"
    (script := tmp_path / "script.py").write_text(READ_ONLY.replace("ADVICE", repr(advice)))
    mount = f"mount -t tmpfs -o ro none {PLACE}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "{sys.executable}" "{script}"']
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=Path.cwd())
    assert run.returncode == 0, run.stderr
    told, found = run.stdout.splitlines()
    assert advice in told
    assert found == "[2, 2]"
