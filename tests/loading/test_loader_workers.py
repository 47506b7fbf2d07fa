"""Loader workers: the user's dataset in them, epoch after epoch, and what is said when they block or die."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import psutil
import pytest
import torch
from epochs import PATIENCE_S, Bucketed, Killed, Numbers, join_own_threads, loader_workers, take
from failing import WORKERS, Failing, TwoFactsError, caught, two_facts
from streams import Stream
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono import DeviceLoader
from unisono.errors import UnpicklableError


@pytest.mark.parametrize(
    ("thing", "name"),
    [(lambda: 1, "lambda"), (threading.Lock(), "lock")],
    ids=["lambda", "lock"],
)
def test_a_batch_that_cannot_leave_its_worker_is_named(thing, name):
    class Holding(Numbers):
        def __getitem__(self, index: int) -> Any:
            return thing if index == 5 else index

    num_workers = 2 if name == "lock" else 1
    loader = DataLoader(Holding(8), batch_size=2, num_workers=num_workers, collate_fn=list)
    found, error = caught(iter(DeviceLoader(loader)))
    assert (found, type(error)) == (2, UnpicklableError)
    assert "a batch of the samples with indices 4, 5 cannot be sent from a loader worker" in str(error)
    assert name in str(error)
    assert "or pass num_workers=0" in str(error)


class Exiting(Numbers):
    """Who loads sample 21 ends."""

    def __getitem__(self, index: int) -> int:
        if index == 21:
            raise SystemExit(3)
        return index


class Exploding(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield 0
        kill()


@pytest.mark.parametrize(
    ("dataset", "num_workers", "persistent"),
    [(Killed(40), 1, False), (Killed(40), 2, True), (Exiting(40), 2, True), (Exploding(), 1, False)],
    ids=["killed", "killed of two", "ended", "stream"],
)
def test_a_loader_worker_that_is_gone_is_told_of(dataset, num_workers, persistent):
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers, persistent_workers=persistent)
    found, error = caught(iter(DeviceLoader(loader)))
    assert found <= 10
    assert isinstance(error, RuntimeError)
    assert "DataLoader worker" in str(error)


class Dangerous(Numbers):
    """Who loads sample 5 comes to harm until it is tamed."""

    def __init__(self, harm: Callable[[], Any]) -> None:
        super().__init__(12)
        self.harm, self.is_tame = harm, torch.zeros(1).share_memory_()

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.is_tame[0]:
            self.harm()
        return index


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise LookupError("five")


@pytest.mark.parametrize(("harm", "words"), [(kill, "DataLoader worker"), (fail, "five")])
def test_persistent_workers_serve_the_next_pass_after_a_death_or_an_error(harm, words):
    dataset = Dangerous(harm)
    loader = DeviceLoader(DataLoader(dataset, num_workers=2, persistent_workers=True))
    gc.disable()
    try:
        try:
            list(loader)
        except (LookupError, RuntimeError) as error:
            kept = [error]  # as a notebook does
        assert words in str(kept[0])
        join_own_threads()
        dataset.is_tame[0] = 1
        for _ in range(2):
            assert [each.batch for each in take(loader)] == [[index] for index in range(12)]
        kept.clear()
    finally:
        del loader
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("make", [two_facts, lambda: OSError("code 21")], ids=["two facts", "an error of files"])
def test_a_worker_init_fn_that_fails_is_told_of(make):
    def init(worker: int) -> None:
        raise make()

    found, error = caught(iter(DeviceLoader(DataLoader(Numbers(4), num_workers=1, worker_init_fn=init))))
    assert (found, type(error)) == (0, RuntimeError if make is two_facts else OSError)
    assert "code 21" in str(error)
    assert "raise make()" in str(error)


@WORKERS
def test_a_handled_error_no_longer_holds_the_dataset_or_its_workers(num_workers):
    dataset = Failing(40, 21, two_facts)
    gone = weakref.ref(dataset)
    gc.disable()
    try:
        with contextlib.suppress(TwoFactsError):
            list(DeviceLoader(DataLoader(dataset, batch_size=2, num_workers=num_workers)))
        del dataset
        join_own_threads()
        psutil.wait_procs(workers := loader_workers(), timeout=PATIENCE_S)
        assert not any(worker.is_running() for worker in workers)
        assert gone() is None
    finally:
        gc.enable()


class Informed(Numbers):
    """Sample i says what its worker knows of itself."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return type(info.dataset).__name__, info.dataset is self, info.id, info.num_workers, self.count, os.getpid()


def change_count(worker: int) -> None:
    info = get_worker_info()
    assert info.id == worker
    info.dataset.count += 100


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_a_worker_sees_the_users_dataset_and_worker_init_fn_can_change_it(context, num_workers):
    loader = DataLoader(
        Informed(4),
        num_workers=num_workers,
        collate_fn=list,
        worker_init_fn=change_count,
        multiprocessing_context=context,
    )
    facts = [sample for batch in DeviceLoader(loader) for sample in batch]
    assert [fact[:5] for fact in facts] == [
        ("Informed", True, index % num_workers, num_workers, 104) for index in range(4)
    ]
    assert len({fact[5] for fact in facts} - {os.getpid()}) == num_workers
    join_own_threads()
    gc.collect()  # what it tracks tells it when it goes, and would start it again
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # torch's queues close on their own threads, a moment later
            thread.join(PATIENCE_S)
    gc.collect()
    resource_tracker._resource_tracker._stop()  # a process that spawned ones need


class Epochal(Numbers):
    """Sample i is i plus a hundred for each epoch, and the process that loads it."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index + 100 * self.epoch, os.getpid()


def test_persistent_workers_serve_each_epoch_but_are_new_after_a_break():
    loader = DeviceLoader(DataLoader(Epochal(12), num_workers=2, persistent_workers=True, collate_fn=list))

    def load() -> tuple[list[int], set[int]]:
        found = [sample for batch in loader for sample in batch]
        return [number for number, _ in found], {pid for _, pid in found}

    numbers, first = load()
    assert numbers == list(range(12))
    assert len(first) == 2
    assert load() == (list(range(100, 112)), first)
    for _ in range(3):
        for _batch in loader:
            break
    numbers, new = load()
    assert numbers == list(range(500, 512))
    assert not new & first
    assert load() == (list(range(600, 612)), new)


def test_two_loops_at_once_have_persistent_workers_of_their_own():
    loader = DeviceLoader(DataLoader(Numbers(9), num_workers=1, persistent_workers=True))
    first, second = ([each.tolist() for each in found] for found in zip(*zip(loader, loader, strict=True), strict=True))
    assert first == second == [[number] for number in range(9)]


class Blocks(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            with open(__file__):
                threading.Event().wait()  # for ever
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_warning_and_the_users_time_out_name_worker_index_file_and_stack(monkeypatch, caplog):
    data = DataLoader(Blocks(6), batch_size=2, num_workers=2, timeout=4, persistent_workers=True)
    batches = iter(DeviceLoader(data))
    next(batches)  # for which no time is long: a worker may begin late
    monkeypatch.setattr("unisono.loading.workers._LONG_S", 1.0)
    with pytest.raises(RuntimeError) as told:
        list(batches)
    (warning,) = [each.getMessage() for each in caplog.records if "no batch has come" in each.message]
    words = (
        r"loader worker 1 \(pid \d+\) reads the samples with indices 2, 3; it is in __getitem__ \(\".*workers.py\", "
        r"line \d+\), with .*workers.py open; the most recent call first:\n  wait .*\n  wait .*\n  __getitem__ [^\n]*$"
    )
    for said in (
        (f"timed out after 4 seconds: {words}", str(told.value)),
        ("no batch has come for .*: " + words, warning),
    ):
        assert re.search(*said, re.DOTALL)


def test_a_pass_that_cannot_begin_does_not_keep_the_workers():
    class Broken(Bucketed):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no batches today")

    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True, batch_sampler=Broken([]))
    for _ in range(2):
        with pytest.raises(OSError, match="no batches today"):
            next(iter(DeviceLoader(loader)))
    assert not loader_workers()


@pytest.mark.parametrize("persistent", [False, True])
def test_early_ends_with_workers_leave_nothing(persistent):
    loader = DeviceLoader(DataLoader(Numbers(1000), batch_size=2, num_workers=2, persistent_workers=persistent))

    def num_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def leave_early(loader: DeviceLoader) -> None:
        for _batch in loader:
            break
        del _batch  # it has a file of its own
        join_own_threads()

    before = num_files()
    for _ in range(2):
        leave_early(loader)
    while num_files() > before:  # torch's queues close their pipes on threads of their own, a moment later
        threading.Event().wait(0.01)
    assert not loader_workers()


class Ended(list):
    """Adds to what it is made of: nobody may make it a second time."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__([*items, "end"])


def many_of(samples: list[int]) -> dict[str, Any]:
    kinds = (torch.float64, torch.bool, torch.complex64, torch.int16)
    tensors = [torch.tensor([[sample, place % 2]]).to(kinds[place % 4]) for sample in samples for place in range(80)]
    return {
        "first": tensors[:100],
        "rest": (tensors[100:], torch.empty(0, 3), torch.tensor(samples[0]), Ended("word"), None),
    }


@pytest.mark.parametrize("dataset", [range(12), Stream(12)])
def test_many_tensors_take_few_descriptors(dataset):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 100, before[1]))
    try:
        found = list(DeviceLoader(DataLoader(dataset, 4, num_workers=1, collate_fn=many_of)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    wanted = [many_of(list(range(start, start + 4))) for start in range(0, 12, 4)]
    assert repr(found) == repr(wanted)
    found[0]["first"][0].fill_(7)
    assert repr(found[0]["first"][1:]) == repr(wanted[0]["first"][1:]), "they overlap"
