"""What only an accelerator does, on one whose streams wait as long as they may: `make test-toy`.

It shows a missing wait as a wrong number, and these tests show that it does.
"""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import FAMILY, Mode, told
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, DeviceLoader, spawn
from unisono.cli import checks
from unisono.comm.pickling import dumps
from unisono.devices import accelerator, get_backend
from unisono.devices.accelerator import AcceleratorBackend
from unisono.devices.device import Device

pytestmark = [pytest.mark.any_family, pytest.mark.skipif(FAMILY != "toy", reason="make test-toy builds the toy")]

TOY = str(Path(__file__).parent / "package")


@pytest.fixture
def family() -> AcceleratorBackend:
    found = get_backend("toy")
    assert type(found) is AcceleratorBackend, "nothing is written for it"
    return found


@pytest.fixture
def device(family: AcceleratorBackend) -> torch.device:
    family.activate(family.device(1))
    return family.device(1)


def sums(count: int = 12) -> tuple[list[float], list[float]]:
    """Those of batches on the device, which are all read at the end; and what they are to be."""
    batches = [torch.full((64,), float(number)) for number in range(count)]
    found = [batch.sum() for batch in DeviceLoader(batches, "toy:1", prefetch=3)]
    return [each.item() for each in found], [64.0 * number for number in range(count)]


def test_every_device_is_one_by_name() -> None:
    assert [str(each) for each in Device.all() if each.kind == "toy"] == [f"toy:{index}" for index in range(4)]
    assert str(Device.default()) == "toy:0"
    assert Device.of("toy:3").torch_device == torch.device("toy", 3)


def test_a_batch_is_whole_when_used_and_its_memory_is_not_reused_earlier() -> None:
    before = torch.toy.violations()
    found, expected = sums()
    assert found == expected
    assert torch.toy.violations() == before


def test_a_loader_that_does_not_wait_reads_what_was_in_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorBackend, "wait_ready", lambda self, token: None)
    found, expected = sums()
    assert found != expected


def test_a_use_that_is_not_recorded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.toy.violations()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    sums()
    assert torch.toy.violations() > before


def test_batches_are_staged_in_page_locked_memory(family: AcceleratorBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert family.pins_memory
    sent: list[bool] = []
    send = accelerator.send

    def note_and_send(leaf: torch.Tensor, *where: Any, **more: Any) -> Any:
        sent.append(leaf.is_pinned())
        return send(leaf, *where, **more)

    monkeypatch.setattr(accelerator, "send", note_and_send)
    assert sums(3)[0] == [0, 64, 128]
    assert sent == [True] * 3


def test_page_locking_does_not_depend_on_the_default_device(family: AcceleratorBackend) -> None:
    with torch.device("toy"):
        assert type(family)(family.name).pins_memory


@pytest.mark.parametrize(
    ("link", "state", "text"),
    [
        ("hangs 0 1", "problem", "a copy from toy:0 to toy:1 does not end within 6 s"),
        ("corrupts 2 1", "problem", "what is copied from toy:2 to toy:1 arrives with other bits"),
        ("is-slow 1 0", "warning", "from toy:1 to toy:0: 0.0"),
    ],
)
def test_the_doctor_names_a_link_that_hangs_or_corrupts_or_is_slow(
    link: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TOY)
    monkeypatch.setenv("TOY_LINK", link)
    monkeypatch.setattr(checks, "_COPY_S", 6.0)
    (found,) = [each for each in checks.check_copies() if each.state == state]  # others may be slow
    assert text in found.text
    assert ("NCCL_P2P_DISABLE=1" in found.advice) == (state == "problem")


def test_the_doctor_copies_between_all_devices_and_lets_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TOY)
    words = " ".join(each.text for each in checks.check_copies() if each.state == "ok")
    assert "16 ways on toy" in words
    assert "all_reduce by cpu:gloo,toy:toycl between 4 on toy" in words


def test_a_mark_is_reached_after_its_work_and_other_threads_wait_behind_it(
    family: AcceleratorBackend, device: torch.device
) -> None:
    own, side = torch.accelerator.current_stream(device), torch.Stream(device)
    torch.accelerator.set_stream(side)
    filled = torch.zeros(1, device=device).add_(1)
    mark = family.mark(device, filled)
    torch.accelerator.set_stream(own)
    assert not family.is_reached(mark)
    found: list[float] = []

    def read() -> None:
        family.activate(device)
        family.wait_ready(mark)
        found.append((filled + 0).item())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == [1]
    assert family.is_reached(mark)


def test_a_clock_asks_and_does_not_wait(family: AcceleratorBackend, device: torch.device) -> None:
    clock = family.clock(device)
    assert clock is not None
    first = clock.stamp()
    for _ in range(60):
        torch.ones(1, device=device).add_(1)
    second = clock.stamp()
    assert clock.elapsed_ns(first, second) is None
    family.synchronize(device)
    assert clock.elapsed_ns(first, second) > 0


def test_tensors_for_other_processes_go_by_main_memory_and_stay_shared(device: torch.device) -> None:
    whole = torch.arange(4.0, device=device)
    found, part = pickle.loads(dumps((whole, whole[2:])))
    assert found.device.type == part.device.type == "cpu"
    found[2] = 7
    assert part.tolist() == [7, 3]


def test_workers_get_a_device_and_group_each_after_the_parent_used_the_toy(device: torch.device) -> None:
    torch.ones(1, device=device)
    assert torch.toy.is_initialized()

    def work(index: int) -> tuple[int, str, list[float]]:
        own = torch.device("toy", torch.accelerator.current_device_index())
        total = torch.full((2,), index + 1.0, device=own)
        torch.distributed.all_reduce(total)
        return own.index, torch.distributed.get_backend_config(), total.tolist()

    assert spawn(work, nprocs=2, backend="toy") == [(rank, "cpu:gloo,toy:toycl", [3.0, 3.0]) for rank in range(2)]


def test_sharding_over_gloo_is_refused_where_torch_would_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(index: int) -> str:
        accelerator = Accelerator(strategy="fsdp")
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,toy:gloo")
        return told(lambda: accelerator.prepare(nn.Linear(2, 2)), ValueError)

    for found in spawn(prepare, nprocs=2, backend="toy"):
        assert found.startswith("ValueError: strategy='fsdp' on toy:")
        assert "a group of toycl, or use strategy='zero1' or 'ddp'" in found


def trained_with_virtual_ranks() -> str:
    accelerator = Accelerator(seed=0, virtual_ranks=4)
    assert accelerator.device.type == "toy"
    rows = TensorDataset(torch.randn(26, 3, device="cpu"), torch.randn(26, 1, device="cpu"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 2, shuffle=True))
    for inputs, targets in loader:
        noise = torch.randn(inputs.shape, device=inputs.device)
        accelerator.backward((model(inputs + 0.1 * noise) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.digest()


def test_virtual_ranks_end_with_the_same_bits_on_any_number_of_ranks() -> None:
    assert len({Mode("processes", ranks).run(lambda: trained_with_virtual_ranks())[0] for ranks in (1, 2, 3)}) == 1
