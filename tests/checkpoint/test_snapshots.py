"""A run that is killed repeats at most one step, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import snapshot_kills
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import by_value
from snapshot_kills import Plan, Run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, current_world, spawn
from unisono.checkpoint.snapshot_memory import Content, SlotWriter, free_others, read_snapshots
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


@settings(max_examples=40)
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
    for call in count(1):
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
        Run("zero1", 2, 1, (Plan("loader", 0, "/unisono/", 2500), Plan("zygote", 1, "/unisono/", 1500))),
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
@pytest.mark.parametrize("seed", range(24))
def test_a_run_that_is_killed_at_random_ends_with_the_bits_of_an_undisturbed_one(seed: int, undisturbed: str) -> None:
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
        return spawn(lambda _: body(), nprocs=2, backend="cpu", cores=1, max_restarts=restarts)


LOOPS = [epochs, accumulates, evaluates, evaluates_within, skips, draws_two, draws_another_within, looks_first]


@pytest.mark.parametrize(
    ("loop_of", "kill_at"),
    [
        *((each, 4) for each in LOOPS[:3]),
        *(pytest.param(each, at, marks=pytest.mark.slow) for each in LOOPS for at in (1, 2, 5, 7, 8, 11)),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_loop_goes_on_exactly(loop_of: Callable[[Loop], None], kill_at: int, tmp_path: Path) -> None:
    whole = carried_out(lambda: result_of(loop_of, str(tmp_path / "whole"), -1), restarts=0)
    assert carried_out(lambda: result_of(loop_of, str(tmp_path / "killed"), kill_at)) == whole


def test_a_loop_that_is_left_and_begun_again_goes_on_from_a_place_within_it(tmp_path: Path) -> None:
    """After a loop that was left, the next one begins a new epoch; a snapshot is of a place within one of them."""
    whole = carried_out(lambda: result_of(leaves, str(tmp_path / "whole"), -1), restarts=0)
    for kill_at in (2, 4, 6):
        place = str(tmp_path / str(kill_at))
        assert carried_out(lambda place=place, at=kill_at: result_of(leaves, place, at)) == whole
