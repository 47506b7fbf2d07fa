"""The runtime of a process: it starts once, as its environment says; what is too late, or would be wrong, is an error.

And it is asked to reduce only when its devices are idle.
"""

from __future__ import annotations

import json

import pytest
import torch

from unisono.comm.xla import reduction_dtype

TRAIN = """
import torch
from torch import nn
from unisono import DataParallel, all_reduce, current_world
def total(*_):
    return all_reduce(torch.ones(1, device=current_world().device)).item()
"""


def test_devices_come_to_be_as_many_as_are_asked_for_first(script):
    done = script(TRAIN + "print(DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1', 'xla:2'])(total, []))")
    assert done.stdout.splitlines()[-1] == "[3.0, 3.0, 3.0]", done.stderr


def test_more_devices_than_the_runtime_started_with_are_refused_with_a_fix(script):
    done = script(
        TRAIN
        + """
DataParallel(nn.Linear(1, 1), ['xla:0'])(lambda *_: None, [])
try:
    DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1'])
except ValueError as error:
    print(error)
"""
    )
    assert "device xla:1 does not exist: 1 xla device(s) here" in done.stdout, done.stderr
    assert "set CPU_NUM_DEVICES=2 in the environment before the first use of a device" in done.stdout


def test_a_number_of_devices_that_the_user_has_set_stands(script):
    done = script(TRAIN + "DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1', 'xla:2'])", CPU_NUM_DEVICES="2")
    assert "ValueError: device xla:2 does not exist: 2 xla device(s) here" in done.stderr


# What is refused has started nothing, so that one process can be refused several times.
REFUSED = """
import os
import unisono
from unisono.compat.placement import Device
from unisono.errors import UnisonoError
def refuse(attempt, **environ):
    os.environ.update(environ)
    try:
        attempt()
    except (ValueError, UnisonoError) as error:
        print(f"{type(error).__name__}: {error}")
    for name in environ:
        del os.environ[name]
"""


def test_modes_that_narrow_numbers_in_silence_are_refused(script):
    names = ["XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG"]
    done = script(
        f"{REFUSED}\nfor name in {names}:\n    refuse(lambda: unisono.Accelerator(device='xla:0'), **{{name: '1'}})"
    )
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"UnisonoError: {name}=1 is set: tensors would keep their type and silently lose")


def test_a_runtime_started_by_others_without_its_settings_is_refused(script):
    lines = "import torch, torch_xla\ntorch.ones(1, device='xla:0').tolist()\n" + TRAIN
    done = script(lines + "DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1'])(total, [])", CPU_NUM_DEVICES="2")
    assert "was started, with several virtual devices, before unisono was asked for one" in done.stderr
    assert "PJRT_CPU_ASYNC_CLIENT=0 XLA_THREAD_POOL_SIZE=64 XLA_NO_SPECIAL_SCALARS=1" in done.stderr


@pytest.mark.parametrize("setting", [{"XLA_THREAD_POOL_SIZE": "1"}, {"PJRT_CPU_ASYNC_CLIENT": "1"}], ids=str)
def test_settings_that_would_abort_the_runtime_reduce_through_main_memory(script, setting):
    done = script(TRAIN + "print(DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1'])(total, []))", **setting)
    assert done.stdout.splitlines()[-1] == "[2.0, 2.0]", done.stderr


def test_hardware_that_is_not_there_is_refused(script):
    refused = [
        ({"CPU_NUM_DEVICES": "0"}, "CPU_NUM_DEVICES='0' in the environment; it must be an integer of at least 1"),
        ({"PJRT_DEVICE": "CUDA"}, "PJRT_DEVICE=CUDA is neither CPU nor TPU, the supported ones"),
        ({"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE=TPU, and there is no chip here"),
    ]
    lines = [f"refuse(Device.default_xla, **{setting})" for setting, _ in refused]
    done = script("\n".join([REFUSED, *(f"os.environ['PJRT_DEVICE'] = 'CPU'\n{line}" for line in lines)]))
    for (_, message), line in zip(refused, done.stdout.splitlines(), strict=True):
        assert line.startswith("ValueError: ")
        assert message in line


def test_one_device_of_a_runtime_that_somebody_else_has_started_will_do(script):
    lines = "import torch, torch_xla\ntorch.ones(1, device='xla:0').tolist()\n" + TRAIN
    done = script(lines + "print(DataParallel(nn.Linear(1, 1), ['xla:0'])(total, []))")
    assert done.stdout.splitlines()[-1] == "[1.0]", done.stderr


def test_a_backward_pass_before_the_runtime_starts_is_an_error_with_advice(script):
    done = script(
        "import torch, unisono\ntorch.ones(1, requires_grad=True).sum().backward()\nunisono.Accelerator(device='xla:0')"
    )
    assert "UnisonoError: torch's autograd does not know xla:0" in done.stderr
    assert "call unisono.compat.placement.Device.default_xla() at the beginning of the program" in done.stderr


def test_what_the_devices_lack_is_refused_with_what_to_do_instead(script):
    lacking = {
        "compile=True": "compile does not work with xla:0: XLA compiles every step itself",
        "mixed_precision='fp16'": "mixed_precision='fp16' does not work with xla:0: XLA devices compute in bfloat16",
    }
    attempts = [f"refuse(lambda: unisono.Accelerator(device='xla:0', {argument}))" for argument in lacking]
    done = script("\n".join([REFUSED, *attempts]))
    for message, line in zip(lacking.values(), done.stdout.splitlines(), strict=True):
        assert line.startswith(f"ValueError: {message}")


SPMD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from unisono import Accelerator

def train(**options):
    torch.manual_seed(1)
    accelerator = Accelerator(**options)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(45, 20, generator=numbers), torch.randint(0, 4, (45,), generator=numbers))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), DataLoader(data, 16)
    )
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses

spread = train(device="xla:0", strategy="spmd")
import torch_xla.runtime
print(torch_xla.runtime.global_runtime_device_count())
torch.testing.assert_close(spread, train(cpu=True), rtol=1e-5, atol=1e-6)
print("the same")
"""


def test_one_program_over_all_devices_trains_like_one_even_with_batch_norm(script):
    done = script(SPMD, CPU_NUM_DEVICES="4")
    assert done.stdout.splitlines()[-2:] == ["4", "the same"], done.stderr


def test_one_program_over_all_devices_is_refused_when_a_device_is_in_use(script):
    done = script(
        "from unisono import Accelerator\nfrom unisono.compat.placement import Device\nDevice.default_xla()\n"
        "Accelerator(device='xla:0', strategy='spmd')"
    )
    assert "UnisonoError: strategy='spmd' comes too late: an XLA device of this process is in use" in done.stderr


def test_work_pending_on_a_device_stays_out_of_the_first_joint_reduction(script):
    done = script(
        """
import torch
from torch import nn
from unisono import DataParallel, all_reduce, current_world
from unisono.compat.placement import Device

Device.default_xla()
pending = [torch.full((3,), 2.0, device="xla:0") * factor for factor in (1, 2, 3)]
ones = DataParallel(nn.Identity(), ["xla:0", "xla:1"])(
    lambda *_: all_reduce(torch.ones(1, device=current_world().device)).item(), []
)
print(ones, [each.sum().item() for each in pending])
""",
        CPU_NUM_DEVICES="2",
    )
    assert done.stdout.splitlines()[0] == "[2.0, 2.0] [6.0, 12.0, 18.0]", done.stderr


TPU = """
import json, os
from torch_xla._internal import tpu
from unisono.devices import xla_runtime

def told(chips, count, environ):
    tpu.num_available_chips = lambda: chips  # what the PCI bus of this machine lacks
    before = dict(os.environ)
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_ID="0", **environ)
    try:
        xla_runtime.check_chips(count)
        xla_runtime.choose_chip(count - 1, count)
        return {name: value for name, value in os.environ.items() if before.get(name) != value and name not in environ}
    except ValueError as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(before)

print(json.dumps([told(*row) for row in table]))
"""

V4 = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
V3, V2 = {"TPU_ACCELERATOR_TYPE": "v3-8"}, {"TPU_ACCELERATOR_TYPE": "v2-8"}
HOSTS = {**V4, "TPU_ACCELERATOR_TYPE": "v4-32", "TPU_HOST_BOUNDS": "1,1,4", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
TWO_DEVICES = "each chip of this TPU has 2 devices, and a process computes on one; use DataParallel, which has a thread"


def test_workers_on_a_tpu_get_a_chip_each_or_are_refused(script):
    """By its runtime's own functions, which say what a process of a TPU reads from its environment."""
    table = [
        (4, 4, V4, {"CLOUD_TPU_TASK_ID": "3", "TPU_VISIBLE_CHIPS": "3", "TPU_PROCESS_BOUNDS": "2,2,1"}),
        (4, 1, V4, {"TPU_VISIBLE_CHIPS": "0"}),
        (4, 2, V4, "nprocs=2, but there are 4 TPU chips here, one for each process"),
        (4, 8, V3, TWO_DEVICES),
        (4, 4, V2, TWO_DEVICES),
        (4, 1, V3, {"TPU_VISIBLE_CHIPS": "0", "TPU_PROCESS_BOUNDS": "1,1,1"}),
        (4, 4, HOSTS, "this TPU spans 4 machines, and their runtimes wait for one another"),
    ]
    done = script(f"table = {[row[:3] for row in table]}\n{TPU}")
    for (*row, expected), found in zip(table, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if isinstance(expected, str):
            assert expected in found, row
        else:
            assert expected.items() <= found.items(), row


@pytest.mark.parametrize(("hardware", "reduced_as"), [("CPU", torch.float32), ("TPU", torch.bfloat16)])
def test_bfloat16_is_reduced_as_it_is_where_the_hardware_can(monkeypatch, hardware, reduced_as):
    monkeypatch.setenv("PJRT_DEVICE", hardware)
    assert reduction_dtype(torch.bfloat16) is reduced_as
    assert reduction_dtype(torch.float16) is reduction_dtype(torch.float32) is torch.float32
    assert reduction_dtype(torch.int64) is None


@pytest.mark.slow
def test_a_device_still_computing_is_waited_for_before_the_runtime_reduces(script):
    """The runtime warns of a device that waits for another after 5 s, and ends the process after 15 s."""
    done = script(
        """
import math, time, torch
from torch import nn
from unisono import DataParallel, all_reduce, current_world, rank
from unisono.compat import placement

def works(seconds, device):
    factor = torch.full((1024, 1024), 1 / 1024, device=device)
    def chain(count):
        own = factor
        for _ in range(count):
            own = own @ factor
        return own
    chain(20)
    placement.lazy_barrier(wait=True)
    began = time.perf_counter()
    kept = chain(20)
    placement.lazy_barrier(wait=True)
    each = (time.perf_counter() - began) / 20
    return chain(math.ceil(seconds / each)).sum()

def loop(model, batches, device, context):
    slow = works(8, device) if rank() == 1 else None
    return all_reduce(torch.ones(1, device=device)).item()

print(DataParallel(nn.Linear(1, 1), ['xla:0', 'xla:1'])(loop, []))
"""
    )
    assert done.stdout.splitlines()[-1:] == ["[2.0, 2.0]"], done.stderr
    assert "may be stuck" not in done.stderr
