"""A run that is killed repeats at most one step, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import snapshot_kills
import torch
import warm_scripts
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import PROCESSES_2, THREADS_2, by_value, told
from snapshot_kills import Plan, Run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, DeviceLoader, current_world, should_stop, spawn
from unisono.checkpoint import snapshots
from unisono.checkpoint.snapshot_memory import Content, SlotWriter, free_others, read_snapshots
from unisono.errors import CheckpointError, StoppedError, WorkerDiedError
from unisono.launch.held_memory import create_memory

EPOCHS = 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without names are Linux's")


# The memory.


@pytest.fixture
def file() -> Iterator[int]:
    made = create_memory()
    assert made is not None
    yield made
    os.close(made)


def test_where_files_may_not_be_large_there_is_no_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # ulimit -f
    try:
        assert create_memory() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def writers(file: int, ranks: int, attempt: int = 0, slots: int = 2) -> list[Callable[[int, Any], None]]:
    """Of each rank, what writes the snapshot of that number."""

    def write(rank: int, writer: SlotWriter, number: int, rest: Any) -> None:
        writer.write(number, 10 + number, rank, ranks, Content(["value"], [torch.full((3,), number)], rest))

    return [partial(write, rank, SlotWriter(file, attempt, rank, slots)) for rank in range(ranks)]


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def tensor_of(shape: list[int], dtype: torch.dtype, start: int) -> torch.Tensor:
    """A tensor of that shape, in a part of a larger memory."""
    size = torch.Size(shape).numel()
    return torch.arange(900).to(dtype)[start : start + size].view(shape)


tensors = st.builds(tensor_of, st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES), st.integers(0, 3))
plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.lists(tensors, max_size=4), plain), min_size=1, max_size=4))
def test_what_is_read_is_what_was_written_last(contents: list[tuple[list[torch.Tensor], Any]]) -> None:
    file = create_memory()
    assert file is not None
    writer = SlotWriter(file, 0, 0, 2)
    for number, (own, rest) in enumerate(contents):
        writer.write(number, number, 0, 1, Content(list(range(len(own))), own, rest))
    read = list(read_snapshots(file, range(1)))
    assert [each[0][0].number for each in read] == list(range(len(contents)))[::-1][:2]
    for (taken,), (own, rest) in zip(read, contents[::-1], strict=False):
        assert equal(taken[1].tensors, own)
        assert equal(taken[1].rest, rest)
    os.close(file)


def test_a_writer_that_is_killed_at_any_call_leaves_the_snapshot_before(file: int) -> None:
    content = Content(["a", "b"], [torch.ones(5000), torch.zeros(7)], {"more": [torch.arange(9.0)]})
    found = set()
    for call in count(random.randrange(1, 4), 3):
        attempt = SlotWriter(file, call, 0, 2)
        attempt.write(0, 1, 0, 1, content)
        if (pid := os.fork()) == 0:
            left = call

            def look(frame: Any, event: str, _: Any) -> None:
                nonlocal left
                left -= event in ("call", "c_call")
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(look)
            attempt.write(1, 2, 0, 1, content)
            sys.setprofile(None)
            os._exit(0)
        has_ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        newest, content_read = next(read_snapshots(file, range(call, call + 1)))[0]
        found.add(newest.number)
        assert equal(content_read.tensors, content.tensors)
        assert equal(content_read.rest, content.rest)
        free_others(file, call)
        if has_ended:
            break
    assert found == {0, 1}
    assert call > 30


def test_a_snapshot_is_one_that_all_ranks_have_written(file: int) -> None:
    first, second = writers(file, 2)
    first(0, "a")
    assert list(read_snapshots(file)) == []
    second(0, "b")
    first(1, "c")
    [both] = read_snapshots(file)
    assert [(each.number, each.step, content.rest) for each, content in both] == [(0, 10, "a"), (0, 10, "b")]


def test_a_snapshot_of_a_later_attempt_is_newer_and_frees_those_before(file: int) -> None:
    for write in writers(file, 2):
        write(5, bytes(10_000_000))
    [write] = writers(file, 1, attempt=1)
    write(0, "later")
    assert next(read_snapshots(file))[0][1].rest == "later"
    assert os.fstat(file).st_blocks * 512 > 20_000_000
    free_others(file, 1)
    assert [taken[0][1].rest for taken in read_snapshots(file)] == ["later"]
    assert os.fstat(file).st_blocks * 512 < 1_000_000


# Kills.


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return snapshot_kills.undisturbed()


@pytest.mark.parametrize(
    "run",
    [
        Run("ddp", 2, 0, (Plan("worker", 1, "snapshot_memory", 60), Plan("worker", 0, "/checkpoint/", 40))),
        Run("zero1", 2, 1, (Plan("worker", 0, "/unisono/", 2500), Plan("zygote", 1, "/unisono/", 1500))),
        Run("fsdp", 3, 0, (Plan("stopped", 2, "/unisono/", 4000),)),
    ],
    ids=lambda run: run.strategy,
)
def test_a_run_that_is_killed_ends_with_the_bits_of_an_undisturbed_one(run: Run, undisturbed: str) -> None:
    ended = snapshot_kills.carry_out(run)
    assert ended.digest == undisturbed
    assert len(ended.struck) == len(run.plans)
    assert 0 <= ended.repeated <= len(ended.struck)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_ends_with_the_bits_of_an_undisturbed_one(seed: int, undisturbed: str) -> None:
    snapshot_kills.check(seed, undisturbed)


# Loops, as people write them.


class Count:
    """The number of batches that were trained on, in the checkpoint: `enumerate` begins anew."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Loop:
    """What the loops below train, and the place where a rank is killed."""

    def __init__(self, directory: str, kill_at: int, **given: Any) -> None:
        self.accelerator = Accelerator(seed=1, project_dir=directory, **{"snapshot_every": 1, **given})
        world = current_world()
        self._left = kill_at if world.restart_count == 0 and world.rank == world.world_size - 1 else -1
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        rows = torch.randn(22, 4)
        data = TensorDataset(rows, rows.sum(1, keepdim=True))
        self.model, self.optimizer, self.scheduler, self.loader, self.other = self.accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data, 2, shuffle=True), DataLoader(data, 2)
        )
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.accelerator.load_state(must_exist=False)

    def loss(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(self.model(rows), targets)

    def train(self, *batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(self.loss(*batch))
        self.optimizer.step()
        self.count.value += 1


def epochs(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            loop.train(*batch)
        loop.scheduler.step()


def accumulates(loop: Loop) -> None:
    loop.accelerator.gradient_accumulation_steps = 2
    epochs(loop)


def evaluates(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            loop.train(*batch)
        with torch.no_grad():
            for batch in loop.other:
                loop.loss(*batch)
        loop.scheduler.step()


def evaluates_within(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            loop.train(*batch)
            if loop.count.value % 3 == 2:
                with torch.no_grad():
                    for other in loop.other:
                        loop.loss(*other)
        loop.scheduler.step()


def skips(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for rows, targets in loop.loader:
            if loop.accelerator.reduce(rows.sum()) > 0:
                continue
            loop.train(rows, targets)


def leaves(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            loop.train(*batch)
            if loop.count.value % 4 == 3:
                break
        loop.scheduler.step()


def draws_two(loop: Loop) -> None:
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch, other in zip(loop.loader, loop.other, strict=False):
            loop.train(*batch)
            loop.train(*other)


def draws_another_within(loop: Loop) -> None:
    """A second loader is drawn from between two steps of one iteration."""
    for _ in range(loop.loader.epoch, EPOCHS):
        others = iter(loop.other)
        for batch in loop.loader:
            loop.train(*batch)
            loop.train(*next(others))
        assert not list(others)


def looks_first(loop: Loop) -> None:
    if loop.loader.epoch == 0 and not loop.optimizer.state:
        with torch.no_grad():
            next(iter(loop.other))
    epochs(loop)


def result_of(loop_of: Callable[[Loop], None], directory: str, kill_at: int, **given: Any) -> Any:
    loop = Loop(directory, kill_at, **given)
    loop_of(loop)
    return loop.accelerator.digest(), round(loop.scheduler.get_last_lr()[0], 6), torch.rand(1).item()


def carried_out(body: Callable[[], Any], restarts: int = 1) -> list[Any]:
    with by_value(body):
        return spawn(lambda _: body(), nprocs=2, backend="cpu", cores=1, max_restarts=restarts, grace_s=0.2)


@cache
def whole(loop_of: Callable[[Loop], None]) -> list[Any]:
    """The result of a loop in which nothing is killed."""
    return carried_out(lambda: result_of(loop_of, "unused", -1), restarts=0)


FAST: list[tuple[Callable[[Loop], None], int]] = [(epochs, 4), (accumulates, 4), (evaluates, 4)]
OTHERS = [(epochs, 7), (accumulates, 7), (evaluates, 7), (evaluates_within, 2), (evaluates_within, 7), (skips, 7)]
OTHERS += [(draws_two, 7), (draws_another_within, 11), (looks_first, 2)]


@pytest.mark.parametrize(
    ("loop_of", "kill_at"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_loop_goes_on_exactly(loop_of: Callable[[Loop], None], kill_at: int, tmp_path: Path) -> None:
    assert carried_out(lambda: result_of(loop_of, str(tmp_path), kill_at)) == whole(loop_of)


def test_a_loop_left_and_begun_again_resumes_from_a_place_within_it(tmp_path: Path) -> None:
    """After a loop that was left, the next one begins a new epoch; a snapshot is of a place within one of them."""
    for kill_at in (2, 6):
        place = str(tmp_path / str(kill_at))
        assert carried_out(lambda place=place, at=kill_at: result_of(leaves, place, at)) == whole(leaves)


def test_a_loop_that_draws_ahead_is_refused_at_the_first_step_it_skips() -> None:
    loop = Loop("unused", -1)
    batches = iter(loop.loader)
    current = next(batches)
    with pytest.raises(RuntimeError, match=r"draw each batch after optimizer\.step"):
        for following in batches:
            loop.train(*current)
            current = following
    assert loop.count.value == 1


def test_no_snapshot_is_taken_where_another_thread_draws_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("unused", -1)
    queue: list[Any] = []

    def draw() -> None:
        queue.extend(loop.loader)

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    for batch in queue:
        loop.train(*batch)
    assert "one thread draws the batches, and another takes the steps" in caplog.text
    assert "no prepared loader" not in caplog.text


def test_a_loop_over_another_loader_says_that_it_has_no_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("unused", -1)
    for batch in loop.loader:
        loop.train(*batch)
    for batch in loop.other:
        loop.train(*batch)
    assert caplog.text.count("no snapshot is taken in this loop: its loader is not the first step's") == 1


def test_a_loop_over_a_loader_that_was_not_prepared_is_an_error() -> None:
    loop = Loop("unused", -1)
    with pytest.raises(ValueError, match="cannot record the place in a loader that was not prepared"):
        for batch in DeviceLoader(DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 2)):
            loop.train(*batch)
    assert loop.count.value == 1


# What a restarted run continues from.


def continued_from(directory: str, every: int, saves_at: int) -> int:
    """The step from which a run continues that is killed in its fifth step."""
    loop = Loop(directory, -1, snapshot_every=every)
    if current_world().restart_count:
        return loop.count.value
    for batch in loop.loader:
        loop.train(*batch)
        if loop.count.value == saves_at:
            loop.accelerator.save_state()
        if loop.count.value == 5:
            current_world().comm.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("every", "saves_at", "step"),
    [
        (1, 2, 4),
        (1, 5, 4),  # the checkpoint is one step newer, but was saved in an iteration, perhaps not behind its last line
        (2, 5, 4),
        (9, 3, 3),  # there is no snapshot yet
    ],
)
def test_a_snapshot_is_loaded_unless_a_checkpoint_is_more_steps_newer(
    every: int, saves_at: int, step: int, tmp_path: Path
) -> None:
    assert carried_out(lambda: continued_from(str(tmp_path), every, saves_at)) == [step, step]


def test_a_different_checkpoint_is_loaded_from_disk_not_the_snapshot(tmp_path: Path) -> None:
    def body() -> list[int]:
        """The steps of the state at the end, and of the best one, which is loaded then."""
        loop = Loop(str(tmp_path), -1)
        for _ in range(loop.loader.epoch, 1):
            for batch in loop.loader:
                loop.train(*batch)
                if loop.count.value == 3:
                    loop.accelerator.save_state(tmp_path / "best")
        steps = loop.count.value
        current_world().comm.barrier()
        if current_world().restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loop.accelerator.load_state(tmp_path / "best")
        return [steps, loop.count.value]

    assert carried_out(body) == [[6, 3], [6, 3]]


def test_weights_loaded_first_come_from_their_file_and_the_rest_continues(tmp_path: Path) -> None:
    def body() -> list[int]:
        first = Accelerator(project_dir=tmp_path)
        model = first.prepare(nn.Linear(4, 1))
        if not (tmp_path / "given").exists():
            with torch.no_grad():
                model.weight.fill_(7)
            first.save_state(tmp_path / "given")
        accelerator = Accelerator(project_dir=tmp_path, snapshot_every=1)
        model = accelerator.prepare(nn.Linear(4, 1))
        accelerator.load_state(tmp_path / "given")
        assert (model.weight == 7).all()
        rows = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.01), DataLoader(rows, 2))
        loaded = accelerator.load_state(must_exist=False)
        for number, (inputs, targets) in enumerate(loader):
            if number == 3 and current_world().restart_count == 0:
                current_world().comm.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
        return [0 if loaded is None else loaded.step, number]

    assert carried_out(body) == [[3, 2], [3, 2]]


def test_registered_objects_outlive_reused_memory(tmp_path: Path) -> None:
    class Average:
        """Keeps the tensor that it is given, and changes it in place."""

        def __init__(self) -> None:
            self.value = torch.zeros(30_000)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.value = state["value"]

    def body() -> float:
        loop, average = Loop(str(tmp_path), -1), Average()
        loop.accelerator.register_for_checkpointing(average)
        loop.accelerator.load_state(must_exist=False)
        for _ in range(loop.loader.epoch, 1):
            for batch in loop.loader:
                loop.train(*batch)
                average.value += loop.count.value
                if loop.count.value == 4 and current_world().restart_count == 0:
                    current_world().comm.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
        return float(average.value.mean())

    assert carried_out(body) == [21.0, 21.0]  # 1 + 2 + ... + 6


def test_a_second_accelerator_that_keeps_snapshots_is_refused() -> None:
    def body() -> None:
        for _ in range(2):
            Accelerator(snapshot_every=1).free_memory()

    told = PROCESSES_2.told(body, ValueError)
    assert all("a restarted script could not know which to load" in each for each in told)


def test_a_training_loader_that_is_looked_at_elsewhere_is_an_error() -> None:
    loop = Loop("unused", -1)
    with pytest.raises(RuntimeError, match="prepare a second loader"):
        for batch in loop.loader:
            loop.train(*batch)
            with torch.no_grad():
                next(iter(loop.loader))
    loop.accelerator.free_memory()
    del loop
    again = Loop("unused", -1)
    with pytest.raises(RuntimeError, match="prepare a second loader"):
        for _ in range(2):
            for batch in again.loader:
                again.train(*batch)
            with torch.no_grad():
                for _ in again.loader:
                    pass


def behind(directory: str, dies: bool) -> Any:
    """Random numbers that are drawn behind the loop of each epoch, on virtual ranks."""
    loop, found = Loop(directory, -1, virtual_ranks=4), Count()
    loop.accelerator.register_for_checkpointing(found)
    loop.accelerator.load_state(must_exist=False)
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            loop.accelerator.backward(loop.loss(*batch))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if dies and current_world().restart_count == 0:
            current_world().comm.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        found.value += int(1_000_000 * torch.rand(1).item())
    return loop.accelerator.digest(), found.value


def test_random_numbers_behind_a_loop_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = carried_out(lambda: behind(str(tmp_path / "whole"), False))
    assert carried_out(lambda: behind(str(tmp_path / "killed"), True)) == undisturbed


@pytest.mark.slow
def test_a_restarted_run_that_begins_anew_is_an_error_and_not_silent(tmp_path: Path) -> None:
    def body() -> str:
        accelerator = Accelerator(snapshot_every=1)
        model = nn.Linear(3, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.randn(12, 3), 2)
        )

        def train() -> None:
            for number, rows in enumerate(loader):
                accelerator.backward(model(rows).sum())
                optimizer.step()
                if number == 2 and current_world().restart_count == 0:
                    current_world().comm.barrier()
                    raise OSError("the first attempt fails")

        return told(train, RuntimeError)  # what finally fails is saved, by a new interpreter

    for each in carried_out(body):
        assert "call accelerator.load_state(must_exist=False) before the first step" in each


def test_a_run_that_finally_fails_is_saved_where_the_next_one_looks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerDiedError):
        carried_out(lambda: result_of(epochs, str(tmp_path), 5), restarts=0)
    assert "saved step 4 from memory, as " in capfd.readouterr().err
    assert carried_out(lambda: result_of(epochs, str(tmp_path), -1), restarts=0) == whole(epochs)
    assert "checkpoint_0: epoch 0, step 4" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_and_saves_nothing_is_saved(tmp_path: Path) -> None:
    def body() -> None:
        loop = Loop(str(tmp_path), -1)
        for batch in loop.loader:
            if loop.count.value == 3 and current_world().rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if should_stop():
                return
            loop.train(*batch)

    with pytest.raises(StoppedError):
        carried_out(body, restarts=0)
    assert (tmp_path / "checkpoints" / "checkpoint_0").exists()


# Going back.


def rewinds(
    directory: str, at: int, skip: bool, is_after: bool, strategy: str = "ddp", virtual_ranks: int | None = None
) -> Any:
    """What is trained, where at that step the ranks go back by one, once."""
    loop = Loop(directory, -1, snapshots=2, strategy=strategy, virtual_ranks=virtual_ranks)
    optimizer, gone_back, steps = loop.optimizer, False, 0
    for _ in range(EPOCHS):
        for batch in loop.loader:
            if not gone_back and not is_after and steps == at:
                gone_back = True
                assert loop.accelerator.rewind(skip=skip).step == at - 1
                continue
            loop.accelerator.backward(loop.loss(*batch))
            optimizer.step()
            optimizer.zero_grad()
            steps += loop.accelerator.sync_gradients
            if not gone_back and is_after and steps == at:
                gone_back = True
                assert loop.accelerator.rewind(skip=skip).step == at - 1
        loop.scheduler.step()
    return loop.accelerator.digest()


@pytest.mark.parametrize(
    ("strategy", "virtual_ranks", "is_after"),
    [
        ("ddp", None, False),
        ("ddp", None, True),
        pytest.param("fsdp", None, True, marks=pytest.mark.slow),
        pytest.param("zero1", 2, False, marks=pytest.mark.slow),
    ],
)
def test_what_is_drawn_again_after_going_back_is_trained_on_alike(
    strategy: str, virtual_ranks: int | None, is_after: bool, tmp_path: Path
) -> None:
    def run(at: int) -> list[Any]:
        return carried_out(lambda: rewinds(str(tmp_path), at, False, is_after, strategy, virtual_ranks), restarts=0)

    assert run(4) == run(-1)


def test_what_is_skipped_after_going_back_is_as_if_it_had_not_been_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loop = Loop(str(tmp_path), -1)
    before: list[torch.Tensor] = []
    for number, batch in enumerate(loop.loader):
        before.append(loop.model[0].weight.detach().clone())
        if number == 3:
            loop.accelerator.rewind()
            assert torch.equal(loop.model[0].weight, before[2])
            assert loop.optimizer.state[loop.model[0].weight]["step"] == 2
            continue
        loop.train(*batch)
    assert number == 10
    assert loop.optimizer.state[loop.model[0].weight]["step"] == 9


def test_a_kill_after_going_back_does_not_bring_the_dropped_steps_back(tmp_path: Path) -> None:
    def body() -> int:
        loop = Loop(str(tmp_path), -1)
        if current_world().restart_count:
            return loop.count.value
        for number, batch in enumerate(loop.loader):
            if number == 4:
                loop.accelerator.rewind()
                current_world().comm.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            loop.train(*batch)
        raise AssertionError

    assert carried_out(body) == [3, 3]


def test_rewinding_across_an_epoch_boundary_is_refused_before_any_change() -> None:
    loop = Loop("unused", -1, snapshots=3)
    for epoch in range(2):
        for batch in loop.loader:
            if epoch:
                before = loop.accelerator.digest()
                with pytest.raises(CheckpointError, match="goes back within an epoch"):
                    loop.accelerator.rewind()
                assert loop.accelerator.digest() == before
                return
            loop.train(*batch)
        with pytest.raises(RuntimeError, match="in the body of that loop"):
            loop.accelerator.rewind()


def test_two_loops_are_not_brought_back_together_which_is_said_before() -> None:
    loop = Loop("unused", -1)
    for number, (batch, other) in enumerate(zip(loop.loader, loop.other, strict=True)):
        loop.train(*batch)
        loop.train(*other)
        if number == 2:
            before = loop.accelerator.digest()
            with pytest.raises(RuntimeError, match="several are open"):
                loop.accelerator.rewind(2, skip=False)
            assert loop.accelerator.digest() == before
            return


def test_going_back_further_than_snapshots_are_kept_is_an_error() -> None:
    loop = Loop("unused", -1)
    for number, batch in enumerate(loop.loader):
        loop.train(*batch)
        if number == 3:
            with pytest.raises(CheckpointError, match=r"Accelerator\(snapshots=2\) keeps more than the last 1"):
                loop.accelerator.rewind(3)
            assert loop.accelerator.rewind(2).step == 2
            break
    with pytest.raises(RuntimeError, match=r"Accelerator\(snapshot_every=1\)"):
        Accelerator().rewind()
    with pytest.raises(ValueError, match="steps=0"):
        loop.accelerator.rewind(0)


# The door.


def test_the_launchers_default_is_taken(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from unisono import Accelerator\n"
        "a = Accelerator()\n"
        "m = torch.nn.Linear(1, 1)\n"
        "m, o, l = a.prepare(m, torch.optim.SGD(m.parameters(), 0.1), DataLoader(torch.randn(8, 1), 2))\n"
        "for x in l:\n"
        "    a.backward(m(x).sum())\n"
        "    o.step()\n"
    )
    options = ["-n", "2", "--backend", "cpu", "--snapshot-every", "2"]
    code, _, errors = warm_scripts.launch(tmp_path, "run", *options, str(script))
    assert code == 0, errors
    assert "snapshots: every 2 steps, in " in errors


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"snapshot_every": 0}, "snapshot_every=0"),
        ({"snapshot_every": 1, "snapshots": 15}, "pass at most 14"),
        ({"snapshot_every": 1, "snapshots": 0}, "snapshots=0"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accelerator(**given)


def test_steps_on_data_of_no_prepared_loader_are_said_to_have_no_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(snapshot_every=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    told = []
    for _ in range(20):
        accelerator.backward(model(torch.ones(4, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()
        told.append(caplog.text.count("no snapshot is taken: the batches come from no prepared loader"))
    assert told == [0] * 7 + [1] * 13


def test_ranks_that_cannot_have_snapshots_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told = THREADS_2.told(lambda: Accelerator(snapshot_every=1), ValueError)
    assert all("start processes" in each for each in told)
    monkeypatch.setattr(snapshots, "memory_left", lambda: 1000)
    loop = Loop("unused", -1)
    with pytest.raises(MemoryError, match=r"snapshot_every=1 needs \d+ MiB .* 2 copies of the state, and 0 MiB"):
        epochs(loop)
