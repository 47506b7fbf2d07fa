"""Which process group a family of devices gets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.comm.selection import bound_device, group_backend
from unisono.devices import get_backend
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.process_group import join


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
    ("family", "asked", "known", "is_bound"),
    [
        ("cuda", None, "cuda", True),
        ("cuda", "gloo", "cuda", False),
        pytest.param("cuda", None, "xpu", False, id="torch would refuse another accelerator than its own"),
        ("cpu", None, None, False),
        ("mps", None, "mps", False),
        ("xla", None, None, False),
    ],
)
def test_a_group_with_a_transport_of_the_devices_own_is_bound_to_it(monkeypatch, family, asked, known, is_bound):
    device = torch.device(family, 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: known and torch.device(known))
    assert bound_device(get_backend(family), device, asked) == (device if is_bound else None)


def test_a_rank_makes_its_group_of_both_parts_and_bound_to_its_own_device(monkeypatch, tmp_path):
    def note(backend: str, **options: Any) -> None:
        asked.update(options, backend=backend)
        raise RuntimeError("as far as there is no device")

    asked: dict[str, Any] = {}
    family, device = get_backend("cuda"), torch.device("cuda", 1)
    monkeypatch.setattr(type(family), "enter_worker", lambda *_: device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "init_process_group", note)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # or it would be set, and stay so
    place = RankPlace("a test", 1, 2, 1, 2, 0, address="", port=0, store=str(tmp_path / "store"))
    with pytest.raises(RuntimeError, match="as far as"):
        join(place, family, timedelta(seconds=5))
    assert (asked["backend"], asked["device_id"]) == ("cpu:gloo,cuda:nccl", device)
