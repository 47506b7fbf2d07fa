"""What cannot work is refused at the door: an error that names the value and the rule, and nothing has been started."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from unisono.backends import check_index
from unisono.backends.cpu import CpuBackend
from unisono.launch import spawn as spawn_module
from unisono.launch.spawn import spawn
from unisono.launch.starting import zygote_client


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    """A refusal that comes after the start of a group is none."""

    def started(*args):
        raise AssertionError("a group was started")

    monkeypatch.setattr(zygote_client, "open_group", started)
    monkeypatch.setattr(spawn_module, "Supervisor", started)


def work(index, *args):
    raise AssertionError("fn was called")


REFUSALS = {
    "nprocs=0": (ValueError, {"nprocs": 0}, "nprocs=0 is too small; pass a number of at least 1"),
    "nprocs=-1": (ValueError, {"nprocs": -1}, "nprocs=-1 is too small"),
    "nprocs=True": (TypeError, {"nprocs": True}, "nprocs=True is of type bool; pass a number"),
    "nprocs=2.0": (TypeError, {"nprocs": 2.0}, "nprocs=2.0 is of type float; pass a number"),
    "nprocs='2'": (TypeError, {"nprocs": "2"}, "nprocs='2' is of type str; pass a number"),
    "fn": (TypeError, {"fn": 3}, "fn=3 is of type int; pass a function that takes the index"),
    "args is a string": (
        TypeError,
        {"args": "data"},
        r"args='data' is of type str; pass a tuple, with one argument as \(",
    ),
    "args is a number": (TypeError, {"args": 5}, "args=5 is of type int; pass a tuple"),
    "args is a set": (TypeError, {"args": {1}}, r"args=\{1\} is of type set; pass a tuple"),
    "backend": (ValueError, {"backend": "tpu9"}, "backend 'tpu9' does not exist; choose one of cpu, cuda, mps"),
    "num_threads=0": (ValueError, {"num_threads": 0}, "num_threads=0 is too small; pass an integer of at least 1"),
    "num_threads=1.5": (TypeError, {"num_threads": 1.5}, "num_threads=1.5 is of type float"),
    "num_threads=True": (TypeError, {"num_threads": True}, "num_threads=True is of type bool"),
    "grace_s=-1": (ValueError, {"grace_s": -1}, "grace_s=-1 is not a duration"),
    "grace_s=inf": (ValueError, {"grace_s": float("inf")}, "grace_s=inf is not a duration"),
    "grace_s='5'": (TypeError, {"grace_s": "5"}, "grace_s='5' is of type str; pass seconds"),
    "grace_s=True": (TypeError, {"grace_s": True}, "grace_s=True is of type bool; pass seconds"),
    "start_method='fork'": (
        ValueError,
        {"start_method": "fork"},
        "'fork' is refused: a fork of this process hangs at its",
    ),
    "start_method='forkserver'": (ValueError, {"start_method": "forkserver"}, "its workers outlive a killed caller"),
    "start_method='best'": (
        ValueError,
        {"start_method": "best"},
        "'best' does not exist; choose one of 'zygote', 'spa",
    ),
    "max_restarts=-1": (ValueError, {"max_restarts": -1}, "max_restarts=-1 is too small; pass how often the group may"),
    "max_restarts=1.0": (TypeError, {"max_restarts": 1.0}, "max_restarts=1.0 is of type float"),
    "hang_timeout_s=0": (ValueError, {"hang_timeout_s": 0}, "hang_timeout_s=0 is not a duration"),
    "hang_timeout_s='1'": (TypeError, {"hang_timeout_s": "1"}, "hang_timeout_s='1' is of type str; pass seconds"),
    "num_loader_workers=-1": (
        ValueError,
        {"num_loader_workers": -1},
        "num_loader_workers=-1 is too small; pass the num_w",
    ),
    "pin_cores=1": (TypeError, {"pin_cores": 1}, "pin_cores=1 is of type int; pass True or False"),
    "log_dir=3": (TypeError, {"log_dir": 3}, "log_dir=3 is of type int; pass the path of a directory"),
    "log_dir=''": (ValueError, {"log_dir": ""}, 'log_dir="" names no directory; pass "." for the current one'),
    "grace_s=1e10": (ValueError, {"grace_s": 1e10}, "not a duration; pass seconds from 0 to 31536000, a year"),
    "timeout=max": (ValueError, {"timeout": timedelta.max}, "is more than a year"),
    "log_ranks=0": (TypeError, {"log_ranks": 0}, r"log_ranks=0 is of type int; pass ranks, as in \[0\]"),
    "log_ranks=[2]": (ValueError, {"log_ranks": [2]}, r"log_ranks=\[2\] names rank 2; the ranks are 0 to [01]"),
    "log_ranks=['0']": (TypeError, {"log_ranks": ["0"]}, "a rank of log_ranks='0' is of type str; the ranks are 0 to"),
    "prefix='yes'": (TypeError, {"prefix": "yes"}, "prefix='yes' is of type str; pass True, False or None"),
    "timeout=30": (TypeError, {"timeout": 30}, "timeout=30 is of type int; pass a datetime.timedelta"),
    "timeout=0": (
        ValueError,
        {"timeout": timedelta()},
        r"timeout=datetime.timedelta\(0\) leaves coll",
    ),
}


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_argument_is_refused_by_its_name_and_value(name, nprocs):
    error, arguments, told = REFUSALS[name]
    with pytest.raises(error, match=told):
        spawn(**{"fn": work, "nprocs": nprocs, **arguments})


@pytest.mark.parametrize("family", ["cuda", "mps"])
def test_a_family_without_a_device_is_refused_with_what_there_is(family):
    available = torch.cuda.is_available() if family == "cuda" else torch.backends.mps.is_available()
    if available:
        pytest.skip(f"there is a {family} device")
    with pytest.raises(ValueError, match=rf"backend '{family}' has no device on this machine; it has .*cpu:0"):
        spawn(work, backend=family)


def test_a_bad_number_of_logical_cpus_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "many")
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES='many' in the environment; it must be an integer"):
        spawn(work, backend="cpu")


class TwoDevices(CpuBackend):
    """A family with two devices, as an accelerator would be."""

    def device_count(self):
        return 2

    def device(self, index):
        check_index(index, 2, "cpu")
        return torch.device("cpu", index)


def test_more_workers_than_accelerators_are_refused(monkeypatch):
    monkeypatch.setattr(spawn_module, "pick_backend", lambda name: TwoDevices())
    with pytest.raises(ValueError, match=r"nprocs=3 needs as many devices: device cpu:2 does not exist: 2 cpu device"):
        spawn(work, nprocs=3)
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work, nprocs=2)


def test_workers_may_share_an_accelerator_where_the_group_does_not_need_one_for_each(monkeypatch):
    family = TwoDevices()
    family.process_group_backend = "nccl"
    monkeypatch.setattr(spawn_module, "pick_backend", lambda name: family)
    with pytest.raises(ValueError, match="nprocs=3 needs as many devices"):
        spawn(work, nprocs=3)
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work, nprocs=3, process_group="gloo")
    with pytest.raises(AssertionError, match="a group was started"):
        spawn(work)
