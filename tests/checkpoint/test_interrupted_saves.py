"""A save that is killed, or that the disk fails, at any of its file operations leaves a whole checkpoint."""

from __future__ import annotations

import errno
import gc
import random
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import files_of_at_most, in_child
from file_faults import PowerCuts, at_each_operation, count_operations, end_save, fail_at, kill_at, write_tree
from modes import PROCESSES_2
from torch import nn

from unisono import Accelerator, barrier, is_rank_zero, should_stop, spawn
from unisono.checkpoint import background, saver
from unisono.checkpoint.checkpointer import Checkpointer, load, save
from unisono.comm.outcome import Outcome
from unisono.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError


class Counted:
    """A number, and a tensor full of it."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "values": torch.full((5000,), self.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["values"], torch.full((5000,), state["number"])), "a mixture of two"
        self.number = state["number"]


def save_numbered(root: Path, number: int, keep: int | None = 2) -> None:
    checkpointer = Checkpointer(root, keep, is_async=False, counted=Counted(number))
    checkpointer.num_steps = number
    checkpointer.save()


def save_best(root: Path, number: int) -> None:
    save(root / "best", counted=Counted(number))


def loaded(path: Path) -> int:
    counted = Counted(-1)
    load(path, counted=counted)
    return counted.number


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In main memory: hundreds of saves are written through, which takes as long as what others do with the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="unisono-", dir=memory if memory.is_dir() else tmp_path) as directory:
        yield Path(directory)


WAYS = pytest.mark.parametrize(("way", "place"), [(save_numbered, "."), (save_best, "best")], ids=["numbered", "best"])
SLOW = pytest.mark.slow
EVERY = pytest.mark.parametrize("every", [12, pytest.param(2, marks=SLOW)])
Way = Callable[[Path, int], None]


def each_killed(root: Path, way: Way, number: int, every: int) -> Iterator[Path]:
    """Copies of the directory, in each of which a save was killed at another one of its file operations."""
    counted = Path(shutil.copytree(root, root.with_name("count")))
    operations = count_operations(lambda: way(counted, number))
    assert operations > 20
    for at in range(1, operations + 1, every):
        copied = Path(shutil.copytree(root, root.with_name(f"killed-{at}")))

        def killed(copied: Path = copied, at: int = at) -> None:
            with at_each_operation(kill_at(at)):
                way(copied, number)

        assert in_child(killed) == -signal.SIGKILL
        yield copied
        shutil.rmtree(copied)


@WAYS
@EVERY
def test_a_kill_at_an_operation_leaves_the_old_or_the_new_one(tmp_path: Path, way: Way, place: str, every: int) -> None:
    for before in (1, 2):
        way(tmp_path / "root", before)
    taken = []
    for root in each_killed(tmp_path / "root", way, 3, every):
        taken.append(loaded(root / place))
        way(root, 4)
        assert loaded(root / place) == 4
        assert len(list(root.rglob("state.pt"))) == len(list(root.rglob("manifest.json"))), "nothing unfinished is left"
    assert taken == sorted(taken), "once it is there, it is there"
    assert set(taken) == {2, 3}


@pytest.mark.slow
def test_a_kill_in_the_first_save_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    found = []
    for root in each_killed(tmp_path / "root", save_numbered, 1, every=4):
        taken = load(root, must_exist=False, counted=Counted())
        found.append(0 if taken is None else loaded(root))
        if taken is None:
            with pytest.raises(
                NoCheckpointError, match=r"there is no checkpoint at .*; to begin without one, pass must"
            ):
                loaded(root)
    assert found == sorted(found)
    assert set(found) == {0, 1}


@WAYS
def test_a_power_cut_after_any_operation_leaves_the_old_or_the_new_one(tmp_path: Path, way: Way, place: str) -> None:
    for before in (1, 2):
        way(tmp_path / "root", before)
    cuts = PowerCuts(tmp_path / "root")
    with at_each_operation(cuts.act):
        way(tmp_path / "root", 3)
    found = []
    for number, tree in enumerate(cuts.states):
        write_tree(tmp_path / f"cut-{number}", tree)
        found.append(loaded(tmp_path / f"cut-{number}" / place))
    assert len(found) > 5
    assert set(found) == {2, 3}
    assert found[0] == 2
    assert found[-1] == 3


@WAYS
def test_an_error_of_the_disk_is_raised_and_what_was_there_still_loads(tmp_path: Path, way: Way, place: str) -> None:
    way(tmp_path / "count", 1)
    operations = count_operations(lambda: way(tmp_path / "count", 2))
    for number in range(1, operations + 1, 11):
        root = tmp_path / str(number)
        way(root, 1)
        with at_each_operation(fail_at(number, errno.ENOSPC)):
            error = Outcome.capture(way, root, 2).error
        if error is None:
            assert loaded(root / place) == 2, "what failed was only to clear away"
        else:
            assert isinstance(error, OSError)
            assert error.errno == errno.ENOSPC
            assert any(f"while writing {root}" in each for each in error.__notes__)
            assert loaded(root / place) in (1, 2)
        way(root, 3)
        assert loaded(root / place) == 3


def test_a_failed_save_keeps_nothing_of_its_caller(tmp_path: Path) -> None:
    def fail() -> weakref.ref[Counted]:
        held = Counted(1)
        with files_of_at_most(4096), pytest.raises(OSError, match="too large"):  # torch cannot end its file, either
            save(tmp_path / "saved", counted=held)
        return weakref.ref(held)

    kept = fail()
    gc.collect()
    assert kept() is None


def step_on_after_a_failed_save(
    index: int, root: Path, strategy: str, failing: int, is_async: bool
) -> tuple[int, str, list[str]]:
    """The step that raised what the save met on one rank, the error, and what is there in the end."""
    accelerator, network = Accelerator(strategy=strategy, project_dir=root), nn.Linear(300, 300)  # type: ignore[arg-type]
    saver.SMALL = -1  # all ranks write, where the states are in parts
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
    inputs, raised = torch.ones(2, 300), []
    for step in range(6):
        try:
            if step == 2:
                with files_of_at_most(10_000) if index == failing else nullcontext():
                    accelerator.save_state(is_async=is_async)
                    end_save()
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
        except OSError as error:
            raised.append((step, str(error)))
        optimizer.zero_grad()
    accelerator.save_state()
    accelerator.end_training()
    ((step, text),) = raised
    return step, text, sorted(each.name for each in (root / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("strategy", "failing", "is_async"),
    [("ddp", 0, True), pytest.param("fsdp", 1, True, marks=SLOW), pytest.param("fsdp", 1, False, marks=SLOW)],
)
def test_a_failed_save_raises_on_all_ranks_at_the_same_step_and_they_go_on(
    strategy: str, failing: int, is_async: bool, tmp_path: Path
) -> None:
    options = (tmp_path, strategy, failing, is_async)
    found = spawn(step_on_after_a_failed_save, args=options, nprocs=2, cores=1)
    for step, text, names in found:
        assert step == 2
        assert "File too large" in text
        assert names == ["checkpoint_0", "latest"]
    taken = load(tmp_path / "checkpoints", model_0=nn.Linear(300, 300))
    assert taken is not None
    assert taken.step == 5, "the step that raised was not taken"


def save_on_two_disks(index: int, root: Path) -> None:
    accelerator, network = Accelerator(strategy="zero1", project_dir=root / "shared"), nn.Linear(3, 3)
    saver.SMALL = -1  # all ranks write
    _network, _optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))  # both are saved
    if index == 1:  # as on a machine whose directory of that path is another one
        write = saver.write_file
        saver.write_file = lambda path, part: write(root / path.name, part)
    with pytest.raises(CheckpointError, match=r"another machine has written shards/1.pt, .* all machines share"):
        accelerator.save_state()


def fail_while_saving(_: int, root: Path, handles_stop: bool) -> None:
    """Rank zero fails during a save, whose thread goes on once it is joined."""
    run_save, is_ready, is_joined = background.run_save, threading.Event(), threading.Event()

    def run_when_joined(*args: Any) -> None:
        thread = threading.current_thread()
        join = thread.join
        thread.join = lambda *given: (is_joined.set(), join(*given))[1]  # type: ignore[assignment, func-returns-value]
        is_ready.set()
        is_joined.wait()
        run_save(*args)

    background.run_save = run_when_joined
    accelerator = Accelerator(project_dir=root)
    accelerator.register_for_checkpointing(Counted(7))
    if handles_stop:
        should_stop()
    accelerator.save_state(is_async=True)
    if is_rank_zero():
        is_ready.wait()
        raise RuntimeError("a broken sample")
    barrier()


@pytest.mark.parametrize("handles_stop", [False, True])
def test_a_worker_that_fails_completes_the_save_that_it_has_begun(tmp_path: Path, handles_stop: bool) -> None:
    with pytest.raises(RuntimeError, match="a broken sample"):
        spawn(fail_while_saving, (tmp_path, handles_stop), 2)
    accelerator, counted = Accelerator(project_dir=tmp_path), Counted()
    accelerator.register_for_checkpointing(counted)
    accelerator.load_state()
    assert counted.number == 7


def test_an_unshared_directory_is_an_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    spawn(save_on_two_disks, args=(tmp_path,), nprocs=2, cores=1)
    with pytest.raises(NoCheckpointError):
        load(tmp_path / "shared/checkpoints", model_0=nn.Linear(3, 3))


def damage(path: Path, draw: random.Random, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[draw.randrange(len(data)) :]
    path.unlink()
    if how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, how: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(1)
    for number in range(1, 9):
        save_numbered(tmp_path, number, keep=2)
        caplog.clear()
        if number > 1:
            (path,) = (tmp_path / f"checkpoint_{number}").rglob(file)
            damage(path, draw, how)
            assert loaded(tmp_path) == number - 1
            (told,) = [each.getMessage() for each in caplog.records]
            assert f"checkpoint_{number}" in told
            assert file in told
            assert f"took {tmp_path}/checkpoint_{number - 1} instead" in told
            with pytest.raises(CheckpointError, match=f"checkpoint_{number}.*{file}"):
                loaded(tmp_path / f"checkpoint_{number}")
            save_numbered(tmp_path, number, keep=2)


def test_where_none_is_intact_the_way_out_begins_anew(tmp_path: Path) -> None:
    save(tmp_path / "one", counted=Counted())
    (path,) = (tmp_path / "one").rglob("state.pt")
    damage(path, random.Random(1), "flip")
    told = "another CRC-32; load another checkpoint, or a copy; to begin without one, move it away, and pass must_exist"
    for must_exist in (True, False):
        with pytest.raises(DamagedCheckpointError, match=told):
            load(tmp_path / "one", must_exist=must_exist, counted=Counted())
    (tmp_path / "one").rename(tmp_path / "away")
    assert load(tmp_path / "one", must_exist=False, counted=Counted()) is None


def test_a_missing_one_is_one_error_on_each_rank(tmp_path: Path) -> None:
    def body() -> bool:
        with pytest.raises(NoCheckpointError) as caught:
            load(tmp_path / "none", counted=Counted())
        return caught.value.__cause__ is None

    assert PROCESSES_2.run(body) == [True, True]


def test_of_two_saves_at_once_one_is_whole_and_one_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place, written = torch.nn.Linear(2, 1), tmp_path / "best", saver.write_file

    def write(path: Path, contents: Any) -> Any:
        found = written(path, contents)
        monkeypatch.setattr(saver, "write_file", written)
        save(place, step=2, model=model)
        return found

    monkeypatch.setattr(saver, "write_file", write)
    with pytest.raises(FileNotFoundError, match="has removed this one's files; give each run its own place"):
        save(place, step=1, model=model)
    assert load(place, model=model).step == 2
