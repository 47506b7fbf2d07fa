"""Which process group a family of devices gets."""

from __future__ import annotations

import pytest
import torch

from unisono.backends import get_backend
from unisono.comm.selection import bound_device, group_backend


@pytest.mark.parametrize(
    ("family", "asked", "group"),
    [
        ("cpu", None, "shm"),
        ("cpu", "gloo", "gloo"),
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("cuda", "gloo", "gloo"),
        ("mps", None, "shm"),
        ("xla", None, "shm"),
    ],
)
def test_a_family_gets_its_own_transport_and_one_for_main_memory(family, asked, group):
    assert group_backend(get_backend(family), asked) == group


@pytest.mark.parametrize(
    ("family", "asked", "is_bound"),
    [("cuda", None, True), ("cuda", "gloo", False), ("cpu", None, False), ("mps", None, False), ("xla", None, False)],
)
def test_a_group_with_a_transport_of_the_devices_own_is_bound_to_the_device(family, asked, is_bound):
    device = torch.device(family, 0)
    assert bound_device(get_backend(family), device, asked) == (device if is_bound else None)
