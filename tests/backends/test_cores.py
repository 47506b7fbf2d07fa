"""Which cores a process may use, and how they are dealt: against invented machines, and the one that this is."""

from __future__ import annotations

import math
import os
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.backends import cores as cores_module
from unisono.backends.cores import (
    Core,
    allowed_cores,
    cores_near,
    cpu_quota,
    disjoint_cores,
    fair_num_threads,
    parse_cpu_list,
    split_cores,
    usable_cores,
    within_quota,
)


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Cores of one to three hyperthreads on a few nodes, their CPUs numbered in any order."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=24))
    numbers = draw(st.permutations(range(sum(ways for ways, _ in shapes))))
    bounds = accumulate((ways for ways, _ in shapes), initial=0)
    return [
        Core(frozenset(numbers[start:stop]), node)
        for (start, stop), (_, node) in zip(pairwise(bounds), shapes, strict=True)
    ]


def all_cpus(machine: list[Core]) -> set[int]:
    return set().union(*(core.cpus for core in machine))


# How they are dealt.


@given(machines(), st.data())
def test_every_cpu_goes_to_one_worker_and_no_worker_goes_without(machine, data):
    cpus = all_cpus(machine)
    shares = split_cores(machine, data.draw(st.integers(1, len(cpus))))
    assert all(shares)
    assert sum(map(len, shares)) == len(cpus)
    assert set().union(*shares) == cpus


@given(machines(), st.data())
def test_no_core_is_cut_and_the_numbers_of_cores_differ_by_one_at_most(machine, data):
    shares = split_cores(machine, data.draw(st.integers(1, len(machine))))
    assert all(any(core.cpus <= share for share in shares) for core in machine)
    counts = [sum(core.cpus <= share for core in machine) for share in shares]
    assert max(counts) - min(counts) <= 1


@given(nodes=st.integers(1, 4), per_node=st.integers(1, 9), workers_per_node=st.integers(1, 9))
def test_workers_that_fill_equal_nodes_stay_on_one_each(nodes, per_node, workers_per_node):
    machine = [Core(frozenset({core * nodes + node}), node) for node in range(nodes) for core in range(per_node)]
    shares = split_cores(machine, nodes * min(workers_per_node, per_node))
    assert all(len({cpu % nodes for cpu in share}) == 1 for share in shares)


@pytest.mark.parametrize("count", [0, 5])
def test_workers_without_a_cpu_are_refused_with_both_numbers(count):
    machine = [Core(frozenset({0, 2})), Core(frozenset({1, 7}))]
    with pytest.raises(ValueError, match=rf"^{count} workers .* run on 4; start from 1 to 4 workers"):
        split_cores(machine, count)


@given(cores=st.integers(1, 300), quota=st.floats(0, 300) | st.just(math.inf))
def test_a_quota_never_leaves_nothing_and_never_gives_more(cores, quota):
    usable = within_quota(cores, quota)
    assert 1 <= usable <= cores
    assert usable <= max(1, quota)


@pytest.mark.parametrize(
    ("cores", "count", "loader_workers", "threads"), [(16, 2, 0, 8), (16, 2, 3, 2), (16, 4, 4, 1), (16, 3, 0, 5)]
)
def test_loader_workers_count_as_much_as_their_rank(monkeypatch, cores, count, loader_workers, threads):
    monkeypatch.setattr(cores_module, "usable_cores", lambda: cores)
    assert fair_num_threads(count, loader_workers) == threads


# What a machine tells.


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8-9,12\n", {0, 1, 2, 3, 8, 9, 12}), ("5", {5}), ("\n", set())])
def test_ranges_in_the_kernels_lists_are_read(text, cpus):
    assert parse_cpu_list(text) == cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two_nodes(root: Path) -> Path:
    """Eight CPUs; n and n + 4 are hyperthreads of one core; the even cores stand on node 0, the odd ones on node 1."""
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in range(8)
    }
    nodes = {
        f"sys/devices/system/node/node{node}/cpulist": f"{node},{node + 2},{node + 4},{node + 6}\n" for node in (0, 1)
    }
    return write(root, siblings | nodes)


def test_cores_and_nodes_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cores_module, "_allowed_cpus", lambda: set(range(8)))
    machine = allowed_cores(two_nodes(tmp_path))
    assert machine == [Core(frozenset({cpu, cpu + 4}), cpu % 2) for cpu in range(4)]
    assert split_cores(machine, 2) == [{0, 4, 2, 6}, {1, 5, 3, 7}]


def test_only_the_cpus_that_the_process_may_run_on_count(tmp_path, monkeypatch):
    monkeypatch.setattr(cores_module, "_allowed_cpus", lambda: {0, 4, 5})
    assert allowed_cores(two_nodes(tmp_path)) == [Core(frozenset({0, 4}), 0), Core(frozenset({5}), 1)]


def test_without_a_told_topology_the_counts_of_cores_and_cpus_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(cores_module, "_allowed_cpus", lambda: {0, 1, 2, 3, 6})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    machine = allowed_cores(tmp_path)
    assert [core.cpus for core in machine] == [{0, 1}, {2, 3}, {6}]


QUOTAS = {
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n", "a/cpu.max": "max 100000\n"}, 2.5),
    "version 2, above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, none": ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    "version 1": (
        "4:cpu,cpuacct:/a\n0::/x\n",
        {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
        3.0,
    ),
    "version 1, none": (
        "4:cpu,cpuacct:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "version 1, in a container": (
        "4:cpu:/docker/abc\n",
        {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        0.5,
    ),
    "nothing": ("", {}, math.inf),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_is_the_least_on_the_way_up(name, tmp_path):
    groups, files, quota = QUOTAS[name]
    write(tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{path}": text for path, text in files.items()})
    assert cpu_quota(tmp_path) == quota


# This machine.


def test_this_machines_cpus_are_dealt_completely():
    cpus = os.sched_getaffinity(0)
    shares = disjoint_cores(len(cpus))
    assert sorted(map(min, shares)) == sorted(cpus)
    assert disjoint_cores(1) == [cpus]
    assert 1 <= usable_cores() <= min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))


def test_a_process_that_was_confined_has_fewer_cores():
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        os.sched_setaffinity(0, {one})
        assert usable_cores() == 1
        assert disjoint_cores(1) == [{one}]
        with pytest.raises(ValueError, match=r"^2 workers .* run on 1; start from 1 to 1 workers"):
            disjoint_cores(2)
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
    there = parse_cpu_list(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
    assert cores_near(0, "node") == there & os.sched_getaffinity(0)
