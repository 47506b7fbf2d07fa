"""Devices and ordinals by the names of PyTorch/XLA: right in a plain script, in threads and in workers."""

from __future__ import annotations

import pytest
import torch
from families import DEVICES, FAMILY, PROCESSES, RANKS, THREADS
from torch import nn

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
import unisono.compat.torch_xla.runtime as xr


def test_a_numbered_device_is_that_one_of_the_family():
    assert [str(xm.xla_device(index)) for index in range(RANKS)] == DEVICES
    assert xm.xla_device() == torch.device(FAMILY, 0)


def test_every_replica_has_a_device_of_its_own_and_knows_it(way):
    found = way.run(lambda: str(xm.xla_device()))
    if way is THREADS:
        assert found == DEVICES
    elif FAMILY == "cpu":
        assert found == DEVICES[: way.ranks]
    else:
        assert len(found) == way.ranks


def test_a_worker_sees_its_own_device_only():
    def look():
        with pytest.raises(ValueError, match="sees only its own device"):
            xm.xla_device(RANKS + 5)
        return len(xm.get_xla_supported_devices()), xm.xla_device(0) == xm.xla_device(), xr.addressable_device_count()

    assert PROCESSES.run(look) == [(1, True, 1)] * RANKS


def test_an_absent_device_kind_is_empty_and_a_list_takes_the_first_present():
    missing = "MPS" if not torch.backends.mps.is_available() else "TPU"
    assert xm.get_xla_supported_devices(missing) == []
    with pytest.raises(ValueError, match=f"no device of kind '{missing}' here; there are .*cpu:0"):
        xm.xla_device(devkind=missing)
    own, every = xm.xla_device_hw(xm.xla_device()), xm.get_xla_supported_devices()
    assert xm.get_xla_supported_devices(own) == xm.get_xla_supported_devices([missing, own.lower()]) == every


def test_max_devices_takes_the_first_few_and_none_or_zero_all(monkeypatch):
    if FAMILY == "cpu":
        monkeypatch.setenv("CPU_NUM_DEVICES", str(RANKS))
    assert xm.get_xla_supported_devices() == DEVICES
    assert xm.get_xla_supported_devices(max_devices=1) == DEVICES[:1]
    assert xm.get_xla_supported_devices(max_devices=0) == xm.get_xla_supported_devices(max_devices=99) == DEVICES


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: xm.get_xla_supported_devices(max_devices=-1), ValueError, "max_devices=-1 is too small"),
        (lambda: xm.get_xla_supported_devices("nonsense"), ValueError, "'NONSENSE' does not exist; choose one of TPU"),
        (lambda: xm.get_xla_supported_devices(3), TypeError, "devkind=3 is of type int; pass a string"),
        (lambda: xm.xla_device("0"), TypeError, "n='0' is of type str"),
        (lambda: xm.xla_device_hw("warp:0"), ValueError, "device 'warp:0' does not exist; there are"),
    ],
)
def test_what_names_no_device_is_told_with_what_there_is(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_hardware_is_told_in_upper_case():
    names = {"cpu": "CPU", "cuda": "GPU", "mps": "MPS"}
    hardware = xm.xla_device_hw(xm.xla_device())
    assert hardware == names.get(FAMILY, hardware)
    assert hardware in ("CPU", "GPU", "MPS", "TPU")
    assert xm.xla_real_devices(DEVICES) == [f"{hardware}:{rank}" for rank in range(RANKS)]
    assert xr.device_type() == ("CUDA" if hardware == "GPU" else hardware)


def test_replicas_know_their_ordinals_whatever_the_default_with_one_master(several, capfd):
    def look():
        xm.master_print("it is", xm.get_ordinal(), flush=True)
        assert xm.is_master_ordinal() == xm.is_master_ordinal(local=False) == (xm.get_ordinal() == 0)
        return xm.get_ordinal(-1), xm.get_local_ordinal(-1), xm.xrt_world_size(None)

    assert several.run(look) == [(rank, rank, RANKS) for rank in range(RANKS)]
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("it is")] == ["it is 0"]


def test_the_runtime_module_counts_processes_and_devices(several):
    def look():
        return xr.world_size(), xr.global_ordinal(), xr.process_count(), xr.process_index(), xr.is_spmd()

    processes = RANKS if several is PROCESSES else 1
    indices = range(RANKS) if several is PROCESSES else [0] * RANKS
    assert several.run(look) == [(RANKS, rank, processes, index, False) for rank, index in enumerate(indices)]


def test_the_generator_repeats_what_came_behind_a_seed_and_behind_a_state(way):
    def draw():
        device = xm.xla_device()

        def numbers():
            return torch.rand(3, device=device).tolist()

        xm.set_rng_state(11)
        assert xm.get_rng_state() == 11
        first = numbers()
        state = xm.get_rng_state(device)
        second = numbers()
        xm.set_rng_state(state, device)
        assert numbers() == second != first
        torch_xla.manual_seed(11)
        assert numbers() == first
        return first

    assert len({tuple(numbers) for numbers in way.run(draw)}) == 1


def test_outside_replicas_the_default_is_returned_and_nothing_stays_behind():
    assert (xm.get_ordinal(), xm.get_local_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal()) == (0, 0, 1, True)
    assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal(), xr.process_count()) == (1, 0, 0, 1)
    assert xmp.spawn(lambda index: (index, xm.get_ordinal(-1), xm.xrt_world_size(None)), nprocs=1) == [(0, 0, 1)]
    assert dp.DataParallel(nn.Identity(), DEVICES[:1])(lambda *_: xm.get_ordinal(-1), []) == [0]
    assert (xm.get_ordinal(-1), xm.get_local_ordinal(defval=-1), xm.xrt_world_size(None)) == (-1, -1, None)
    xm.wait_device_ops()
    xm.wait_device_ops(DEVICES)
