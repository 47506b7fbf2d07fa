"""Checkpoints in a store: no more is asked of it than that it puts objects whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modes import SOLO, THREADS_2, Mode
from resumable import Run, assert_each_once, leave_after
from torch import nn

from unisono.checkpoint.checkpointer import Checkpointer, load, save
from unisono.checkpoint.remote import RemotePath, location
from unisono.errors import DamagedCheckpointError, NoCheckpointError

fsspec = pytest.importorskip("fsspec")
ROOT = "memory://unisono"


@pytest.fixture
def store() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    if found.exists("/unisono"):
        found.rm("/unisono", recursive=True)


def filled(number: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for each in model.parameters():
        nn.init.constant_(each, number)
    return model


def number_at(url: str) -> float:
    model = filled(-1)
    load(url, model=model)
    assert len({float(each) for each in nn.utils.parameters_to_vector(model.parameters()).detach()}) == 1
    return float(model.bias.detach()[0])


def test_a_url_is_a_place_in_a_store_and_anything_else_a_path() -> None:
    assert location("s3://bucket/run/") == RemotePath("s3://bucket/run")
    assert location("file:///tmp/run") == Path("/tmp/run")
    assert location("runs/one") == Path.cwd() / "runs/one"
    assert str(location("memory://") / "best") == "memory:///best"
    for wrong in (Path("s3://bucket/run"), "gs:/bucket", "simplecache::s3://bucket/run"):
        with pytest.raises(ValueError, match=r"was a URL|is a chain"):
            location(wrong)


def test_the_last_few_are_kept_and_latest_names_the_last(store: Any) -> None:
    with Checkpointer(f"{ROOT}/run", keep=2, every=1, model=filled(3)) as checkpointer:
        for _ in range(4):
            checkpointer.step()
    names = sorted(each.rpartition("/")[2] for each in store.ls("/unisono/run", detail=False))
    assert names == ["checkpoint_3", "checkpoint_4", "latest"]
    assert number_at(f"{ROOT}/run") == 3
    with Checkpointer(f"{ROOT}/run", model=filled(0)) as checkpointer:
        assert checkpointer.load().step == 4


def test_what_is_no_checkpoint_stays_and_does_not_count(store: Any) -> None:
    store.pipe_file("/unisono/data/train.bin", b"years of work")
    with pytest.raises(FileExistsError, match=r"is no checkpoint.*data/best"):
        save(f"{ROOT}/data", model=filled(1))
    store.pipe_file("/unisono/run/checkpoint_0/model.safetensors", b"of another framework")
    store.pipe_file("/unisono/run/checkpoint_9/0123456789ab/state.pt", b"a save that was killed")
    with Checkpointer(f"{ROOT}/run", keep=2, every=1, model=filled(1)) as checkpointer:
        for _ in range(3):
            checkpointer.step()
    names = sorted(each.rpartition("/")[2] for each in store.ls("/unisono/run", detail=False))
    assert names == ["checkpoint_0", "checkpoint_2", "checkpoint_3", "latest"]
    assert store.exists("/unisono/data/train.bin")


def test_a_store_that_has_directories_serves_too(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    with Checkpointer(url, keep=1, every=1, model=filled(3)) as checkpointer:
        for _ in range(3):
            checkpointer.step()
        checkpointer.save(f"{url}/best")
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["best", "checkpoint_3", "latest"]
    assert number_at(url) == number_at(f"{url}/best") == 3


def test_the_last_ones_are_kept_whatever_their_numbers(store: Any) -> None:
    checkpointer = Checkpointer(f"{ROOT}/run", keep=2, is_async=False, model=filled(1))
    for checkpointer.num_steps in (10, 20, 4, 5):
        checkpointer.save()
    names = sorted(each.rpartition("/")[2] for each in store.ls("/unisono/run", detail=False))
    assert names == ["checkpoint_4", "checkpoint_5", "latest"]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_run_resumes_from_a_store(store: Any, mode: Mode) -> None:
    url: Any = f"{ROOT}/{mode}"
    mode.run(Run(url, after=leave_after(3, is_async=True)))
    _, ledger = mode.run(Run(url))[0]
    assert_each_once(ledger)


class StoppedError(Exception):
    """The process ends here."""


def test_wherever_putting_stops_the_one_before_or_the_new_one_is_there(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_upload_that_was_killed_is_no_checkpoint(store: Any) -> None:
    store.pipe_file("/unisono/run/checkpoint_0/0123456789ab/state.pt", b"a save that was killed")
    assert load(f"{ROOT}/run", must_exist=False, model=filled(0)) is None
    with pytest.raises(NoCheckpointError):
        load(f"{ROOT}/run", model=filled(0))


@pytest.mark.parametrize("operation", ["ls", "cat_file"])
def test_a_store_that_does_not_answer_is_an_error_and_not_a_missing_checkpoint(
    store: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no answer")

    with Checkpointer(f"{ROOT}/run", every=1, model=filled(1)) as checkpointer:
        checkpointer.step()
    monkeypatch.setattr(type(store), operation, fail)
    with pytest.raises(ConnectionError, match="no answer"):
        load(f"{ROOT}/run", must_exist=False, model=filled(0))


def test_a_damaged_one_is_passed_over(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(f"{ROOT}/run", every=1, model=filled(1)) as checkpointer:
        checkpointer.step()
        checkpointer.step()
    (file,) = [each for each in store.find("/unisono/run/checkpoint_2") if each.endswith("state.pt")]
    data = bytearray(store.cat_file(file))
    data[len(data) // 2] ^= 1
    store.pipe_file(file, bytes(data))
    assert load(f"{ROOT}/run", model=filled(0)).step == 1
    assert "checkpoint_2" in caplog.text
    with pytest.raises(DamagedCheckpointError, match=r"state.pt has other contents"):
        load(f"{ROOT}/run/checkpoint_2", model=filled(0))
    with pytest.raises(NoCheckpointError):
        load(f"{ROOT}/none", model=filled(0))


def test_the_best_is_kept(store: Any) -> None:
    with Checkpointer(f"{ROOT}/run", model=filled(1)) as checkpointer:
        assert [checkpointer.save(f"{ROOT}/best", score=each) is not None for each in (1.0, 0.5, 2.0)] == [
            True,
            False,
            True,
        ]
        assert checkpointer.load(f"{ROOT}/best").score == 2.0
