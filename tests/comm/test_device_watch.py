"""A device that runs behind its host, and does not wait for ever; the end of a process group, whoever holds it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_scripts
from epochs import join_own_threads
from modes import default_group

from unisono.comm import shutdown
from unisono.comm.device_watch import DeviceWatch
from unisono.comm.outcome import Outcome
from unisono.comm.processes import ProcessCommunicator
from unisono.devices.cpu import CpuBackend
from unisono.errors import BrokenWorldError

CPU = torch.device("cpu")
NEVER_S = 3600.0  # between two looks of the watch's own: the tests look themselves


class Gpu(CpuBackend):
    """A device that comes to a mark when it is told to."""

    watch: DeviceWatch

    def __init__(self) -> None:
        self.at = 0
        self.submitted = 0

    def mark(self, device: torch.device, tensors: Any = ()) -> int:
        self.submitted += 1
        return self.submitted

    def is_reached(self, mark: int) -> bool:
        return mark <= self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    def watch(*args: Any) -> DeviceWatch:
        gpu.watch = DeviceWatch(*args, look_s=NEVER_S, patience_s=0)
        return gpu.watch

    monkeypatch.setattr("unisono.comm.processes.DeviceWatch", watch)
    return gpu


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dist.Store]:
    """That of a default process group of one, which the test may end."""
    with default_group(tmp_path / "store") as made:
        yield made


@contextmanager
def rank_on(gpu: Gpu, store: dist.Store) -> Iterator[tuple[ProcessCommunicator, DeviceWatch]]:
    comm = ProcessCommunicator(CPU, store, backend=gpu)
    try:
        yield comm, gpu.watch
    finally:
        comm.leave()


def test_a_device_that_keeps_up_is_progress_and_waits_for_nothing(gpu, store):
    with rank_on(gpu, store) as (comm, watch):
        comm.all_reduce(torch.ones(1))
        before = comm.progress
        watch.look()  # puts a mark
        gpu.at = gpu.submitted
        watch.look()
        assert comm.progress > before
        assert comm.current is None
        after = comm.progress
        for _ in range(4):  # an idle device makes none, however often it is asked
            watch.look()
            gpu.at = gpu.submitted
        assert comm.progress == after


def test_a_device_that_is_behind_tells_since_when(gpu, store):
    with rank_on(gpu, store) as (comm, watch):
        comm.all_reduce(torch.ones(2))
        watch.look()
        assert comm.current is None
        watch.look()
        assert comm.current == "the device's work since all_reduce(float32[2], 'sum')"
        gpu.at = gpu.submitted
        watch.look()
        assert comm.current is None


def test_a_device_that_computes_for_long_without_a_collective_is_in_none(gpu, store):
    with rank_on(gpu, store) as (comm, watch):
        comm.barrier()
        watch.look()
        gpu.at = gpu.submitted
        watch.look()
        for _ in range(3):
            watch.look()
        assert comm.current is None


def test_a_peers_failure_ends_the_devices_wait_and_wakes_the_rank(gpu, store, monkeypatch):
    def end_and_let_go(*args: Any, **kwargs: Any) -> None:
        shutdown.end_group(*args, **kwargs)
        ends.append((args, kwargs))
        has_ended.set()

    ends: list[Any] = []
    has_ended = threading.Event()  # what the rank waits in, out of reach of any exception
    monkeypatch.setattr("unisono.comm.processes.end_group", end_and_let_go)
    with rank_on(gpu, store) as (comm, watch):
        comm.barrier()
        assert watch.look()
        assert watch.look()
        store.set("unisono/failure", Outcome.failure(LookupError("no such digit"), "rank 3").to_bytes())
        looker = threading.Thread(target=watch.look)
        with pytest.raises(BrokenWorldError) as woken:
            looker.start()
            has_ended.wait(20)
            raise AssertionError("it has gone on")
        looker.join()
        assert str(woken.value) == ("rank 0 cannot complete barrier(): rank 3 failed with LookupError: no such digit")
        assert repr(woken.value.__cause__) == "LookupError('no such digit')"
        assert not dist.is_initialized()
        assert ends == [((True,), {"waits_for_device": True})]  # aborted: an orderly end would wait for the peer
        with pytest.raises(BrokenWorldError, match="rank 3 failed with LookupError: no such digit"):
            comm.all_reduce(torch.ones(1))


@pytest.mark.parametrize("is_broken", [True, False])
def test_the_end_of_a_device_rank_has_a_deadline_whoever_starts_it(gpu, store, monkeypatch, is_broken):
    ends: list[Any] = []
    monkeypatch.setattr("unisono.comm.processes.end_group", lambda *args, **kwargs: ends.append((args, kwargs)))
    with rank_on(gpu, store) as (comm, _):
        comm.abort(LookupError()) if is_broken else comm.leave()
        assert ends == [((is_broken,), {"waits_for_device": True})]


def test_a_watch_stops_at_a_device_error_and_leaves_it_to_the_rank(gpu):
    class Failed(Gpu):
        def mark(self, device: torch.device, tensors: Any = ()) -> int:
            raise RuntimeError("CUDA error: device-side assert triggered")

    watch = DeviceWatch(Failed(), CPU, lambda: 0, lambda: False, look_s=0)
    join_own_threads()
    watch.close()


# The end of a group.


class Ends:
    """What ends a group: each waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        self.let_go = threading.Event()
        self.alarms: list[int] = []
        self.gives_up_after = partial(monkeypatch.setattr, shutdown, "END_S")
        monkeypatch.setattr(signal, "alarm", self.alarms.append)
        monkeypatch.setattr(dist, "destroy_process_group", lambda: self._wait("destroy"))
        monkeypatch.setattr(shutdown, "abort_process_group", lambda: self._abort())
        self.abort_ends = True

    def _abort(self) -> None:
        if self.abort_ends:
            self.let_go.set()
        self._wait("abort")

    def _wait(self, name: str) -> None:
        self.called.append(name)
        self.let_go.wait(20)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch)
    yield made
    made.let_go.set()


def test_an_orderly_end_that_waits_for_a_peer_is_given_up(ends):
    ends.gives_up_after(0.5)  # and has so long to abort
    shutdown.end_group(is_broken=False, waits_for_device=True)
    assert (ends.called, ends.alarms) == (["destroy", "abort"], [])


def test_a_broken_group_is_aborted_at_once(ends):
    shutdown.end_group(is_broken=True, waits_for_device=True)
    assert (ends.called, ends.alarms) == (["abort"], [])


def test_a_process_whose_group_cannot_be_ended_ends_all_the_same(ends, caplog):
    ends.abort_ends = False
    ends.gives_up_after(0.05)
    shutdown.end_group(is_broken=True, waits_for_device=True)
    assert ends.alarms == [shutdown.LAST_S]
    assert "could not be shut down within" in caplog.text


SCRIPT = """
import signal, sys
import torch
import torch.distributed as dist
import torch.distributed.nn  # which would hold the group, if it were imported behind it
from torch.nn.parallel import DistributedDataParallel
from unisono.comm.shutdown import free_reducers_before_groups
from unisono.training.strategies.ddp import _Ordered

signal.alarm(60)  # a hang holds the interpreter's lock
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "torch":
    free_reducers_before_groups()
model = (DistributedDataParallel if sys.argv[1] == "torch" else _Ordered)(torch.nn.Linear(2, 2))
sent = torch.ones(1 << 24)
received = [torch.empty(1 << 24)]
sys.setswitchinterval(100)  # nobody gets the lock who is not given it
dist.all_gather(received, sent, async_op=True)  # gloo's thread frees what it has sent later, with the lock
dist.destroy_process_group()
del model
sys.setswitchinterval(0.005)
print("ended", flush=True)
"""


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_a_model_that_outlives_its_group_frees_it_while_gloo_still_works(tmp_path: Path, whose: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output, errors = warm_scripts.complete(tmp_path / "script.py", whose)
    assert (code, output.splitlines()[-1:]) == (0, ["ended"]), errors  # gloo says more there with torch 2.9
