"""`DataParallel`, `spawn` and what workers share, by the names of PyTorch/XLA."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch
from families import DEVICES, FAMILY, PROCESSES, RANKS, on_processes
from torch import nn

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp


def numbered(count):
    return [(torch.full((3,), float(number)), number) for number in range(count)]


def test_no_devices_named_are_all_devices(monkeypatch):
    if FAMILY == "cpu":
        monkeypatch.setenv("CPU_NUM_DEVICES", str(RANKS))
    assert dp.DataParallel(nn.Linear(2, 2)).devices == xm.get_xla_supported_devices() == DEVICES


def test_results_come_in_device_order_of_loops_over_plain_batches():
    def loop(model, loader, device, context):
        numbers = []
        for data, number in loader:
            assert data.device.type == device.type
            numbers.append(number)
        return str(device), numbers

    count = 2 * RANKS
    expected = [(device, list(range(rank, count, RANKS))) for rank, device in enumerate(DEVICES)]
    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)
    assert replicas(loop, numbered(count)) == expected
    assert replicas(loop, numbered(count + RANKS - 1)) == expected, "an incomplete last group is dropped"
    assert dp.DataParallel(nn.Linear(2, 2), DEVICES[-1:])(loop, numbered(3)) == [(DEVICES[-1], [0, 1, 2])]


def test_a_step_closure_belongs_to_its_replica():
    def loop(model, loader, device, context):
        heard = []
        for data, number in loader:
            xm.add_step_closure(lambda data, number: heard.append((data[0].item(), number)), args=(data, number))
        return heard

    found = dp.DataParallel(nn.Linear(2, 2), DEVICES)(loop, numbered(2 * RANKS))
    assert found == [[(float(number), number) for number in (rank, rank + RANKS)] for rank in range(RANKS)]


def test_the_function_gets_its_ordinal_and_the_arguments():
    found = on_processes(lambda index, *args: (index, xm.get_ordinal(), args), "a", [1])
    assert found == [(rank, rank, ("a", [1])) for rank in range(RANKS)]


def _raise(error):
    raise error


def test_every_start_method_of_the_original_is_taken():
    for start_method in ("fork", "spawn", "forkserver"):
        assert xmp.spawn(abs, nprocs=1, start_method=start_method) == [0]
    with xmp.spawn(abs, nprocs=1, join=False) as context:
        assert context.join() == [0]
    with pytest.raises(ValueError, match="start_method='thread' does not exist; choose one of spawn"):
        xmp.spawn(abs, nprocs=1, start_method="thread")


def test_launch_calls_the_function_once_in_this_process_for_debugging():
    assert torch_xla.launch(
        lambda index, pid: (index, os.getpid() == pid), (os.getpid(),), debug_single_process=True
    ) == [(0, True)]


def test_a_wrapped_model_reaches_all_workers_with_one_set_of_weights():
    model = nn.Linear(2, 2)
    wrapper, expected = xmp.MpModelWrapper(model), model.weight.tolist()
    assert PROCESSES.run(lambda: wrapper.to(xm.xla_device()).weight.tolist()) == [expected] * RANKS


def test_a_serial_executor_lets_one_run_at_a_time_and_all_run(several, tmp_path):
    serial = xmp.MpSerialExecutor()

    def work():
        inside = tmp_path / "inside"
        inside.mkdir()  # fails where another one is inside
        inside.rmdir()
        return xm.get_ordinal()

    def run():
        xm.rendezvous("all at once")
        return [serial.run(work) for _ in range(20)]

    assert several.run(run) == [[rank] * 20 for rank in range(RANKS)]


def test_a_serial_executor_goes_on_behind_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    serial = xmp.MpSerialExecutor()
    with pytest.raises(LookupError):
        serial.run(lambda: _raise(LookupError()))
    assert serial.run(lambda: 3) == 3
    assert len(list(tmp_path.iterdir())) == 1
    del serial
    gc.collect()
    assert not list(tmp_path.iterdir())
