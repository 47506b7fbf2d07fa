"""Which process group a family of devices gets."""

from __future__ import annotations

import pytest

from unisono.backends import get_backend
from unisono.comm.selection import group_backend


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
