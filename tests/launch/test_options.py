"""What `spawn` is told beside the function, threads, cores, logs; and the private directory of a group."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from unisono.devices.cores import fair_num_threads
from unisono.errors import WorkerDiedError
from unisono.launch.options import Cores, Output
from unisono.launch.spawn import spawn
from unisono.world import current_world


@pytest.fixture
def no_omp(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_workers_and_their_loader_workers_share_the_cores(no_omp):
    def threads(index):
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    for loaders in (0, 2):
        share = fair_num_threads(2, loaders)
        assert spawn(threads, nprocs=2, cores=Cores(num_loader_workers=loaders)) == [(share, str(share))] * 2
    assert spawn(threads, nprocs=2, cores=3) == [(3, "3")] * 2


def test_a_thread_count_set_in_the_environment_holds_in_workers(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert spawn(lambda index: torch.get_num_threads(), nprocs=2) == [3, 3]


def test_a_run_with_a_log_directory_leaves_each_ranks_output(tmp_path):
    def work(index):
        print(f"output of {index}")
        os.write(2, f"words of {index}\n".encode())
        current_world().comm.barrier()
        if index == 1 and current_world().restart_count == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        current_world().comm.barrier()

    context = spawn(work, nprocs=2, join=False, output=Output(tmp_path), max_restarts=1)
    context.join()
    directory = context.log_directory
    assert directory == (tmp_path / "latest").resolve()
    assert (directory / "rank-0.stdout").read_text() == 2 * "output of 0\n"
    errors = (directory / "rank-1.stderr").read_text()
    assert errors.splitlines().count("words of 1") == 2
    assert "Fatal Python error: Segmentation fault" in errors


def test_the_traceback_that_ended_a_rank_is_in_its_log(tmp_path):
    def fail(index):
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        spawn(fail, nprocs=2, output=Output(tmp_path))
    errors = [(tmp_path / "latest" / f"rank-{rank}.stderr").read_text() for rank in range(2)]
    assert any('raise ValueError("bad data")' in text for text in errors)


def test_the_last_lines_on_stderr_belong_to_the_error():
    def work(index):
        for number in range(30):
            print(f"line {number}", file=sys.stderr)
        if index == 1:
            os._exit(3)
        current_world().comm.barrier()

    with pytest.raises(WorkerDiedError, match="exited with code 3") as caught:
        spawn(work, nprocs=2)
    [tail] = [note for note in caught.value.__notes__ if note.startswith("the last lines of rank 1 on stderr:\n")]
    assert tail.splitlines()[-2:] == ["  line 28", "  line 29"]


@pytest.mark.parametrize("method", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])
def test_only_its_user_can_read_a_runs_files_and_none_has_its_environment(monkeypatch, method):
    secret = uuid4().hex
    monkeypatch.setenv("OF_THE_CALLER", secret)

    def look(index):
        directory = Path(os.environ["UNISONO_RENDEZVOUS"])
        contents = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
        is_written = any(os.environ["OF_THE_CALLER"].encode() in each for each in contents)
        held = [each for each in Path("/proc/self/fd").iterdir() if "job" in os.path.realpath(each)]
        return stat.S_IMODE(directory.stat().st_mode), is_written, held

    assert spawn(look, nprocs=2, start_method=method) == [(0o700, False, [])] * 2


def test_loader_workers_run_however_long_the_temporary_path_is(tmp_path, monkeypatch):
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    def load(index):
        batches = list(torch.utils.data.DataLoader([torch.ones(100)] * 4, num_workers=1))
        return len(batches), os.listdir(long)

    found = spawn(load, nprocs=2)
    assert [(count, len(names)) for count, names in found] == [(4, 1)] * 2
    assert os.listdir(long) == []
