"""Families by name, devices by what a user writes, and what only one family does."""

from __future__ import annotations

import pytest
import torch

from unisono.cli.checks import check_devices
from unisono.devices import (
    available_devices,
    backend_of_group,
    family_names,
    get_backend,
    pick_backend,
    resolve_device,
)
from unisono.devices.movement import send

NAMES = family_names()
MISSING = [name for name in NAMES if not get_backend(name).is_available()]


@pytest.fixture
def logical_devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    return monkeypatch


# By name.


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.delenv("UNISONO_BACKEND", raising=False)


@pytest.mark.usefixtures("no_choice")
def test_accelerators_are_tried_first_and_the_cpu_last():
    assert NAMES[-1] == "cpu"
    here = [get_backend(name) for name in NAMES if name not in MISSING]
    assert pick_backend() is next((family for family in here if family.is_accelerated()), get_backend("cpu"))


def test_doctor_lists_each_family_with_its_devices_or_why_it_has_none():
    listed = [each.text for each in check_devices() if each.state == "ok"]
    for name in NAMES:
        (line,) = [each for each in listed if each.startswith((f"{name}:0", f"none of {name}: "))]
        assert line.startswith("none") == (name in MISSING)


def test_the_environment_chooses_the_family_where_a_program_names_none(monkeypatch):
    monkeypatch.setenv("UNISONO_BACKEND", "cpu")
    assert pick_backend() is get_backend("cpu")
    monkeypatch.setenv("UNISONO_BACKEND", "vpu")
    for ask in (pick_backend, lambda: get_backend("vpu"), lambda: pick_backend("vpu")):
        with pytest.raises(ValueError, match=r"^backend 'vpu' does not exist; choose one of cpu, cuda, mps, tpu, xla$"):
            ask()
    assert pick_backend("cpu") is get_backend("cpu")


@pytest.mark.parametrize("name", MISSING)
def test_a_family_without_a_device_is_refused_with_the_devices_that_exist(name, logical_devices):
    here = ", ".join(available_devices())
    with pytest.raises(ValueError, match=f"^backend {name!r} has no device on this machine.*; it has {here}$"):
        pick_backend(name)


def test_available_devices_are_those_of_every_family_that_has_some(logical_devices):
    logical_devices.setenv("CPU_NUM_DEVICES", "3")
    devices = available_devices()
    assert devices[-3:] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {torch.device(device).type for device in devices} == {name for name in NAMES if name not in MISSING}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        pytest.param("cpu:gloo,cuda:nccl", "cuda", marks=pytest.mark.skipif("cuda" in MISSING, reason="no CUDA here")),
        ("cpu:mpi", None),
    ],
)
@pytest.mark.usefixtures("no_choice")
def test_a_process_group_belongs_to_the_family_whose_tensors_it_reduces(config, name):
    assert backend_of_group(config).name == (name or pick_backend().name)


# By what a user writes.


@pytest.mark.parametrize(
    ("written", "device"),
    [("cpu", "cpu:0"), ("cpu:3", "cpu:3"), (torch.device("cpu"), "cpu:0"), (torch.device("cpu", 2), "cpu:2")],
    ids=str,
)
def test_a_device_is_what_was_written_with_its_index(written, device):
    backend, found = resolve_device(written)
    assert (backend, str(found)) == (get_backend("cpu"), device)
    batch = {"image": torch.ones(2)}
    assert backend.to_device(batch, found)[0] is batch, "it is there"


@pytest.mark.parametrize("written", ["gpu", "", "cpu:x", torch.device("meta"), "xpu:0"], ids=str)
def test_a_device_that_does_not_exist_is_refused_with_those_that_do(written, logical_devices):
    with pytest.raises(ValueError, match="does not exist; there are ") as refusal:
        resolve_device(written)
    assert repr(str(written)) in str(refusal.value)
    assert str(refusal.value).endswith(", ".join(available_devices()))


@pytest.mark.parametrize("written", [None, True, b"cpu"], ids=repr)
def test_what_is_no_device_at_all_is_a_type_error_that_names_it(written):
    with pytest.raises(TypeError, match=rf"^device={written!r} is of type {type(written).__name__}; pass a string"):
        resolve_device(written)


# The CPU.


@pytest.mark.parametrize("text", ["0", "two", ""])
def test_a_number_of_logical_devices_that_is_none_is_refused(logical_devices, text):
    logical_devices.setenv("CPU_NUM_DEVICES", text)
    with pytest.raises(ValueError, match=f"^CPU_NUM_DEVICES={text!r} in the environment; it must be an integer of"):
        get_backend("cpu").device_count()


# Sending a leaf.


class Boxes:
    """A leaf of the user's own that knows how to move."""

    def __init__(self, corners: torch.Tensor) -> None:
        self.corners = corners

    def to(self, device: torch.device) -> Boxes:
        return Boxes(self.corners.to(device))


def test_an_object_with_a_method_to_is_moved_by_it():
    boxes = Boxes(torch.ones(4))
    moved = send(boxes, torch.device("meta"))
    assert isinstance(moved, Boxes)
    assert (moved.corners.device.type, boxes.corners.device.type) == ("meta", "cpu")
