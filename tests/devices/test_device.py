"""A device as a value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices import available_devices
from unisono.devices.device import Device

EAGER = st.builds(Device, st.sampled_from(["cpu", "cuda", "mps", "xla"]), st.integers(0, 100))


@given(device=EAGER)
def test_a_device_goes_to_torch_and_to_text_and_back(device):
    assert Device.of(device.torch_device) == Device.of(str(device)) == Device.of(device) == device
    assert eval(repr(device)) == device
    assert len({device, Device.of(str(device))}) == 1


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:1", Device("cuda", 1)),
        ("GPU:1", Device("cuda", 1)),
        ("CPU", Device("cpu")),
        ("TPU:2", Device("xla", 2, "xla")),
        (torch.device("cpu"), Device("cpu", 0, "eager")),
    ],
)
def test_a_device_is_written_in_several_ways(text, device):
    assert Device.of(text) == device


def test_the_runtime_tells_devices_apart():
    eager, recorded = Device("cpu", 1), Device("cpu", 1, "XLA")
    assert eager != recorded
    assert (str(eager), str(recorded)) == ("cpu:1", "cpu:1 by xla")
    assert (eager.torch_device, recorded.torch_device) == (torch.device("cpu", 1), torch.device("xla", 1))
    assert Device("xla").backend == "xla"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("vpu",), ValueError, "kind='vpu' does not exist; choose one of cpu, cuda, mps, tpu, xla"),
        ((3,), TypeError, "kind=3 is of type int; pass a string"),
        (("cpu", -1), ValueError, "ordinal=-1 is too small; pass an integer of at least 0"),
        (("cpu", True), TypeError, "ordinal=True is of type bool; pass an integer"),
        (("mps", 0, "xla"), ValueError, "backend='xla' does not exist; choose one of eager"),
        (("TPU", 0, "eager"), ValueError, "backend='eager' does not exist; choose one of xla"),
    ],
)
def test_a_device_that_cannot_be_is_refused(arguments, error, words):
    with pytest.raises(error, match=f"^{words}$"):
        Device(*arguments)


@pytest.mark.parametrize("device", ["cpu:x", "", None, torch.device("meta")])
def test_what_names_no_device_is_refused(device):
    with pytest.raises(TypeError if device is None else ValueError):
        Device.of(device)


def test_the_default_is_the_first_device_here(monkeypatch):
    monkeypatch.delenv("UNISONO_BACKEND", raising=False)
    assert str(Device.default()) == available_devices()[0]
    assert Device.default() == Device.of(0)
