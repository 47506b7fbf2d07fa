"""Checkpoints in a store: no more is asked of it than that it puts objects whole."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults import Script
from modes import SOLO, THREADS_2, Mode
from resumable import Run, assert_each_once, filled, leave_after
from torch import nn

from unisono.checkpoint import folders
from unisono.checkpoint.checkpointer import Checkpointer, load, save
from unisono.checkpoint.folders import folder_at

fsspec = pytest.importorskip("fsspec")
ROOT = "memory://unisono"


@pytest.fixture
def store() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    if found.exists("/unisono"):
        found.rm("/unisono", recursive=True)


def test_no_more_is_read_of_a_store_than_a_manifest_can_be(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_LARGEST", 1000)
    folder = folders.folder_at(ROOT)
    folder.write("manifest.json", b"x" * 1000)
    assert folder.read("manifest.json") == b"x" * 1000
    folder.write("manifest.json", b"x" * 1001)
    with pytest.raises(FileNotFoundError, match=r"no such file of a size that is written: '/unisono/manifest.json'"):
        folder.read("manifest.json")


def number_at(url: str) -> float:
    model = filled(-1)
    load(url, model=model)
    assert len({float(each) for each in nn.utils.parameters_to_vector(model.parameters()).detach()}) == 1
    return float(model.bias.detach()[0])


def test_a_url_is_a_place_in_a_store_and_anything_else_a_path() -> None:
    assert folder_at("s3://bucket/run/").location == "s3://bucket/run"
    assert folder_at("file:///tmp/run").location == Path("/tmp/run").resolve()
    assert folder_at("runs/one").location == Path.cwd() / "runs/one"
    assert str(folder_at("memory://") / "best") == "memory://best"
    for wrong in (Path("s3://bucket/run"), "gs:/bucket", "simplecache::s3://bucket/run"):
        with pytest.raises(ValueError, match="is no place for checkpoints"):
            folder_at(wrong)


def test_a_store_that_has_directories_serves_too(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    with Checkpointer(url, keep=1, every=1, model=filled(3)) as checkpointer:
        for _ in range(3):
            checkpointer.step()
        checkpointer.save(f"{url}/best")
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["best", "checkpoint_3", "latest"]
    assert number_at(url) == number_at(f"{url}/best") == 3


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_run_resumes_from_a_store(store: Any, mode: Mode) -> None:
    url: Any = f"{ROOT}/{mode}"
    mode.run(Run(url, after=leave_after(3, is_async=True)))
    _, ledger = mode.run(Run(url))[0]
    assert_each_once(ledger)


class StoppedError(Exception):
    """The process ends here."""


def test_wherever_putting_stops_the_old_or_the_new_one_is_there(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for stop_at in range(1, 20):
        url, puts = f"{ROOT}/best-{stop_at}", 0
        save(url, model=filled(1))

        def counted(plain: Any, at: int = stop_at) -> Any:
            def operation(*args: Any, **kwargs: Any) -> Any:
                nonlocal puts
                puts += 1
                if puts == at:
                    raise StoppedError
                return plain(*args, **kwargs)

            return staticmethod(operation)

        with monkeypatch.context() as patched:
            for name in ("put_file", "pipe_file", "rm"):
                patched.setattr(type(store), name, counted(getattr(store, name)))
            try:
                save(url, model=filled(2))
                is_over = True
            except StoppedError:
                is_over = False
        found.append(number_at(url))
        if is_over:
            break
        save(url, model=filled(3))
        assert number_at(url) == 3
        assert len(store.ls(f"/unisono/best-{stop_at}")) == 2, "the manifest, and the files that it names"
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("operation", ["ls", "cat_file"])
def test_a_store_that_does_not_answer_is_an_error_not_a_missing_checkpoint(
    store: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no answer")

    with Checkpointer(f"{ROOT}/run", every=1, model=filled(1)) as checkpointer:
        checkpointer.step()
    monkeypatch.setattr(type(store), operation, fail)
    with pytest.raises(ConnectionError, match="no answer"):
        load(f"{ROOT}/run", must_exist=False, model=filled(0))


# On the way to the store, or from it, it tells where its local copy is, and of what mode; and is killed.
KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from unisono import spawn
from unisono.checkpoint.checkpointer import load, save

def die(*_, **__):
    [copy] = Path(os.environ.get("UNISONO_RENDEZVOUS", tempfile.gettempdir())).glob("unisono-checkpoint-*")
    print(tempfile.gettempdir(), oct(copy.stat().st_mode), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def run(index):
    os.umask(0)
    LocalFileSystem.put_file = LocalFileSystem.get_file = die
    {WHAT}("{URL}", model=nn.Linear(1, 1))
"""


@pytest.mark.parametrize("what", ["load", "save"])
def test_the_next_local_copy_removes_what_a_kill_left_but_not_living_ones(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url := f"local://{tmp_path}/run", model=filled(1))
    with Script(KILLED.format(WHAT=what, URL=url) + "run(0)", tmp_path) as script, ExitStack() as living:
        code, output, errors = script.end()
        temporary, mode = output.split()
        assert (code, mode) == (-signal.SIGKILL, "0o40700"), errors
        [left] = script.leftovers()
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        kept = folder_at(url).fetch(["manifest.json"], living)
        assert script.leftovers() == [kept.name] != [left]
        assert number_at(url) == 1
        assert script.leftovers() == [kept.name]
        assert (kept / "manifest.json").exists()
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0
        else:
            living.close()
            os._exit(0)
        assert script.leftovers() == [kept.name], "another process that leaves the block removes nothing"


def test_what_a_kill_of_a_rank_leaves_of_a_local_copy_goes_with_its_group(tmp_path: Path) -> None:
    save(url := f"local://{tmp_path}/run", model=filled(1))
    with Script(KILLED.format(WHAT="load", URL=url) + "spawn(run, nprocs=2, backend='cpu')", tmp_path) as script:
        code, output, errors = script.end()
        assert (code, output.split()[1]) == (1, "0o40700"), errors
        assert "WorkerDiedError" in errors
        assert script.leftovers() == []
