"""How many cores a process may use: on invented machines, and on this one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices import cores as cores_module
from unisono.devices.cores import allowed_cores, cores_near, cpu_quota, fair_num_threads, usable_cores


@given(cores=st.integers(1, 300), quota=st.floats(0, 300) | st.just(math.inf))
def test_a_quota_never_leaves_nothing_and_never_gives_more(cores, quota):
    with (
        patch.object(cores_module, "allowed_cores", lambda: cores),
        patch.object(cores_module, "cpu_quota", lambda: quota),
    ):
        usable = cores_module._usable_cores_of.__wrapped__(frozenset())
    assert 1 <= usable <= cores
    assert usable <= max(1, quota)


@pytest.mark.parametrize(
    ("cores", "count", "loader_workers", "threads"), [(16, 2, 0, 8), (16, 2, 3, 2), (16, 4, 4, 1), (16, 3, 0, 5)]
)
def test_loader_workers_count_as_much_as_their_rank(monkeypatch, cores, count, loader_workers, threads):
    monkeypatch.setattr(cores_module, "usable_cores", lambda: cores)
    assert fair_num_threads(count, loader_workers) == threads


# What a machine tells.


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpus", "has_topology", "count"),
    [(range(8), True, 4), ([0, 4, 5], True, 2), ([0, 1, 2, 3, 6], False, 3)],
    ids=["all", "some", "without a topology"],
)
def test_hyperthreads_of_a_core_count_once(tmp_path, monkeypatch, cpus, has_topology, count):
    """Eight CPUs; n and n + 4 are hyperthreads of one core."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(tmp_path, {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8) if has_topology})
    monkeypatch.setattr(cores_module, "_allowed_cpus", lambda: set(cpus))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert allowed_cores(tmp_path) == count


def version_1(path: str, quota: int) -> dict[str, str]:
    return {f"{path}/cpu.cfs_quota_us": f"{quota}\n", f"{path}/cpu.cfs_period_us": "100000\n"}


QUOTAS = {
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n", "a/cpu.max": "max 100000\n"}, 2.5),
    "version 2, above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
    "version 1": ("4:cpu,cpuacct:/a\n0::/x\n", version_1("cpu/a", 300_000), 3.0),
    "version 1, none": ("4:cpu,cpuacct:/\n", version_1("cpu", -1), math.inf),
    "version 1, in a container": ("4:cpu:/docker/abc\n", version_1("cpu", 50_000), 0.5),
    "nothing": ("", {}, math.inf),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_is_the_least_on_the_way_up(name, tmp_path):
    groups, files, quota = QUOTAS[name]
    write(tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{path}": text for path, text in files.items()})
    assert cpu_quota(tmp_path) == quota


# This machine.


def test_a_process_that_was_confined_has_fewer_cores():
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        os.sched_setaffinity(0, {one})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_cores_near_a_gpu_are_those_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    place = next(Path("/sys/bus/pci/devices").glob("*/numa_node"), None)
    if place is None:
        pytest.skip("this machine shows no PCI devices")
    domain, bus, device, _ = (int(part, 16) for part in place.parent.name.replace(".", ":").split(":"))
    gpu = SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # which newer versions of torch ask
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    node = max(int(place.read_text()), 0)
    ends = [part.split("-") for part in Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().split(",")]
    there = {cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)}
    assert cores_near(0, "node") == there & os.sched_getaffinity(0)
