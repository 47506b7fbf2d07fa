"""What cannot work is refused at the door: an error that names the value and the rule, and nothing has been started."""

from __future__ import annotations

import math
import subprocess
import threading
from collections.abc import Callable

import pytest

from unisono.devices.cpu import CpuBackend
from unisono.engines import Local
from unisono.errors import UnisonoError
from unisono.launch import spawn as spawn_module
from unisono.launch.options import Cores, Output
from unisono.launch.spawn import spawn
from unisono.launch.starting import zygote_client
from unisono.protocols import Backend


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    """A refusal that comes after the start of a group is none."""

    def started(*args):
        raise AssertionError("a group was started")

    monkeypatch.setattr(zygote_client, "open_group", started)
    monkeypatch.setattr(spawn_module, "Supervisor", started)


def work(index, *args):
    raise AssertionError("fn was called")


Refusal = tuple[type[Exception], Callable[[], object], str]
REFUSALS: list[Refusal] = [
    (ValueError, lambda: spawn(work, nprocs=0), "nprocs=0 is too small; pass a number of at least 1"),
    (TypeError, lambda: spawn(work, nprocs=True), "nprocs=True is of type bool; pass a number"),
    (TypeError, lambda: spawn(3), "fn=3 is of type int; pass a function that takes the index"),
    (TypeError, lambda: spawn(work, "data"), r"args='data' is of type str; pass a tuple, with one argument as \("),
    (TypeError, lambda: spawn(work, max_restart=2), "no argument 'max_restart'; is it max_restarts"),
    (TypeError, lambda: Output(logdir="logs"), r"Output\(\) has no argument 'logdir'; is it log_dir"),
    (TypeError, lambda: spawn(lambda: None), r"<lambda>\(\) cannot be called as fn\(index, \*args\) with 0 args: too"),
    (TypeError, lambda: spawn(lambda i, lr: None), r"\(i, lr\) cannot be called .*: missing a required argument: 'lr'"),
    (ValueError, lambda: spawn(work, nprocs=10**7), "nprocs=10000000 workers take 4 open files each, of "),
    (ValueError, lambda: spawn(work, backend="tpu9"), "backend 'tpu9' does not exist; choose one of cpu, cuda, mps"),
    (ValueError, lambda: spawn(work, cores=0), "cores=0 is too small; pass CPU threads per worker, or None"),
    (ValueError, lambda: Cores(num_loader_workers=-1), "num_loader_workers=-1 is too small; pass the num_workers of"),
    (ValueError, lambda: Cores(pin="near"), "pin='near' does not exist; choose one of node, socket,"),
    (ValueError, lambda: spawn(work, cores=Cores(pin="node")), "near their GPUs, and theirs are on cpu"),
    (ValueError, lambda: spawn(work, grace_s=math.inf), "grace_s=inf is not a duration; pass seconds from 0, up to "),
    (TypeError, lambda: spawn(work, grace_s="5"), "grace_s='5' is of type str; pass seconds"),
    (ValueError, lambda: spawn(work, timeout=0), "timeout=0 is not a duration"),
    (ValueError, lambda: spawn(work, start_method="fork"), "start_method='fork' does not exist; choose 'zygote'"),
    (ValueError, lambda: spawn(work, max_restarts=-1), "max_restarts=-1 is too small; pass how often the group may"),
    (TypeError, lambda: spawn(work, output="logs"), r"output='logs' is of type str; pass unisono.Output\("),
    (ValueError, lambda: Output(log_dir=""), 'log_dir="" names no directory; pass "." for the current one'),
    (TypeError, lambda: Output(ranks=0), r"ranks=0 is of type int; pass ranks, as in \[0\]"),
    (ValueError, lambda: spawn(work, nprocs=2, output=Output(ranks=[2])), r"names rank 2; the ranks are 0 to 1"),
    (TypeError, lambda: Output(prefix="yes"), "prefix='yes' is of type str; pass True, False, 'several' or None"),
]


@pytest.mark.parametrize(("error", "call", "told"), REFUSALS, ids=[told[:20] for _, _, told in REFUSALS])
def test_a_bad_argument_is_refused_by_its_name_and_value(error, call, told):
    with pytest.raises(error, match=told):
        call()


@pytest.mark.parametrize("options", [{}, {"engine": Local(1)}], ids=["here", "on an engine"])
@pytest.mark.parametrize(("module", "name"), [(threading, "get_ident"), (subprocess, "Popen")])
def test_threads_and_processes_that_a_library_has_replaced_are_refused(monkeypatch, module, name, options):
    own = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: own(*args, **kwargs))
    with pytest.raises(UnisonoError, match=rf"{__name__} has replaced {module.__name__}.{name}: what waits"):
        spawn(work, nprocs=2, **options)


class TwoDevices(CpuBackend):
    """A family with two devices, as an accelerator would be."""

    def device_count(self):
        return 2

    def device(self, index):
        return Backend.device(self, index)


def test_more_workers_than_accelerators_are_refused(monkeypatch):
    monkeypatch.setattr(spawn_module, "pick_backend", lambda name: TwoDevices())
    with pytest.raises(ValueError, match=r"nprocs=3 needs as many devices: device cpu:2 does not exist: 2 cpu device"):
        spawn(work, nprocs=3)
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work, nprocs=2)


def test_workers_may_share_an_accelerator_if_the_process_group_allows_it(monkeypatch):
    monkeypatch.setattr(TwoDevices, "process_group_backend", "nccl")
    monkeypatch.setattr(spawn_module, "pick_backend", lambda name: TwoDevices())
    with pytest.raises(
        ValueError, match=r"nprocs=3 needs as many devices.*; pass nprocs=None .*, backend='cpu', or pr"
    ):
        spawn(work, nprocs=3)
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work, nprocs=3, process_group="gloo")
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work)
