"""What is to be seen first on a TPU with TorchTPU: `make tpu-check`, or `python tests/gpu/tpu_check.py [ITEM ...]`.

Nothing of that family has been run on a chip. Each item runs in an interpreter of its own, and is `ok`, `FAILED` or
`skipped`; what is to be seen, it asserts. Without a TPU all are skipped; `--backend toy` tries them on the toy
(PYTHONPATH=tests/toy/package).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
from unisono import Accelerator, DataParallel, DeviceLoader, current_world, spawn
from unisono.backends import get_backend, pick_backend
from unisono.errors import UnisonoError

LIMIT_S = 600.0  # the first graphs are compiled
FAMILY = os.environ.get("UNISONO_BACKEND", "tpu")
COUNT = get_backend(FAMILY).device_count()


def _meet(index: int) -> tuple[str, str, list[float]]:
    world = current_world()
    total = torch.full((2,), index + 1.0, device=world.device)
    torch.distributed.all_reduce(total)
    return str(world.device), torch.distributed.get_backend_config(), total.cpu().tolist()


def it_is_chosen_before_others() -> str:
    family = pick_backend()
    assert family.name == FAMILY
    assert family.process_group_backend != "gloo", "torch has no transport for it"
    return f"{COUNT} devices, {family.hardware()}, collectives by {family.process_group_backend}"


def workers_of_all_chips_meet_and_the_parent_starts_no_runtime() -> str:
    found = spawn(_meet, nprocs=COUNT)
    assert len({device for device, *_ in found}) == COUNT
    assert all(total == [COUNT * (COUNT + 1) / 2] * 2 for *_, total in found)
    assert not torch.get_device_module(FAMILY).is_initialized()
    assert not [name for name in os.environ if name.startswith("TORCH_TPU_SLICEBUILDER")]
    return f"{found[0][1]}: {', '.join(device for device, *_ in found)}"


def another_number_of_workers_gets_variables_of_its_own() -> str:
    sizes = [COUNT, 1, COUNT]
    assert [len(spawn(_meet, nprocs=size, max_restarts=1)) for size in sizes] == sizes  # one is no process otherwise
    return f"{sizes} workers, one after the other"


def _train(index: int, strategy: str, precision: str) -> list[float]:
    torch.manual_seed(3)
    accelerator = Accelerator(strategy=strategy, mixed_precision=precision)  # type: ignore[arg-type]
    network: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=0.05)
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    network, optimizer, loader = accelerator.prepare(
        network, optimizer, torch.utils.data.DataLoader(rows, batch_size=24 // current_world().world_size)
    )
    for _ in range(4):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(network(batch).square().mean())
            optimizer.step()
    state = accelerator.state_dict(network)
    return [] if index else [each.float().norm().item() for each in state.values()]


def strategies_train_as_on_the_cpu() -> str:
    size = 2 if FAMILY == "toy" else COUNT
    wanted = torch.tensor(spawn(_train, args=("ddp", "no"), nprocs=size, backend="cpu")[0])
    for strategy in ("ddp", "zero1", "fsdp"):
        torch.testing.assert_close(
            torch.tensor(spawn(_train, args=(strategy, "no"), nprocs=size)[0]), wanted, rtol=1e-2, atol=1e-3
        )
    found = spawn(_train, args=("ddp", "bf16"), nprocs=size)[0]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0.1, atol=0.05)
    return f"ddp, zero1, fsdp and ddp with bf16 on {size}"


def batches_arrive_whole() -> str:
    sums = [batch.sum() for batch in DeviceLoader([torch.full((1 << 16,), float(each)) for each in range(32)])]
    assert [each.item() for each in sums] == [float(each << 16) for each in range(32)]
    return f"on {next(iter(sums)).device}"


def a_seed_gives_the_same_numbers_again() -> str:
    family = pick_backend()
    device = family.device(0)
    torch.manual_seed(5)
    state, first = family.rng_state(device), torch.rand(4, device=device).tolist()
    family.set_rng_state(state, device)
    assert torch.rand(4, device=device).tolist() == first
    torch.manual_seed(5)
    assert torch.rand(4, device=device).tolist() == first
    return f"a state of {state.numel()} bytes"


def a_state_is_saved_and_loaded() -> str:
    accelerator = Accelerator()
    network = accelerator.prepare(nn.Linear(4, 4))
    with tempfile.TemporaryDirectory() as directory:
        accelerator.save_state(f"{directory}/saved")
        before = [each.detach().cpu().clone() for each in network.parameters()]
        with torch.no_grad():
            for each in network.parameters():
                each.zero_()
        accelerator.load_state(f"{directory}/saved")
    assert all(torch.equal(each.cpu(), was) for each, was in zip(network.parameters(), before, strict=True))
    return f"{len(before)} parameters"


def a_compiled_model_computes_the_same() -> str:
    if FAMILY == "toy":
        return "skipped: no compiler knows the toy"
    network = nn.Linear(8, 8).to(pick_backend().device(0))
    rows = torch.ones(2, 8, device=pick_backend().device(0))
    torch.testing.assert_close(torch.compile(network)(rows).cpu(), network(rows).cpu(), rtol=1e-2, atol=1e-3)
    return "torch.compile without a backend"


def threads_are_refused() -> str:
    if FAMILY == "toy":
        return "skipped: the toy takes threads"
    try:
        DataParallel(nn.Linear(2, 2), [f"{FAMILY}:0", f"{FAMILY}:1"])(lambda *_: None, [])
    except (UnisonoError, ValueError) as error:
        return str(error)
    raise AssertionError("two threads have computed on one device")


def _xla_script(index: int) -> tuple[float, int]:
    device = xm.xla_device()
    network = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.ones(2, 4, device=device)).sum().backward()
        xm.optimizer_step(optimizer)
        xm.mark_step()
    return xm.mesh_reduce("bias", network.bias.item(), lambda each: max(each) - min(each)), xm.xrt_world_size()


def _print_xla_script(index: int) -> None:
    apart, size = _xla_script(index)
    assert apart == 0
    assert size == COUNT
    if index == 0:
        print(f"the ranks' biases agree on {size}")


def a_script_of_torch_xla_runs_by_its_names() -> str:
    xmp.spawn(_print_xla_script)
    return f"xmp.spawn, xm.optimizer_step, xm.mark_step on {COUNT}"


ITEMS = [
    it_is_chosen_before_others,
    workers_of_all_chips_meet_and_the_parent_starts_no_runtime,
    another_number_of_workers_gets_variables_of_its_own,
    strategies_train_as_on_the_cpu,
    batches_arrive_whole,
    a_seed_gives_the_same_numbers_again,
    a_state_is_saved_and_loaded,
    a_compiled_model_computes_the_same,
    threads_are_refused,
    a_script_of_torch_xla_runs_by_its_names,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="ITEM", help=", ".join(each.__name__ for each in ITEMS))
    parser.add_argument("--backend", choices=["tpu", "toy"], default="tpu")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    chosen = [each for each in ITEMS if not asked.items or each.__name__ in asked.items]
    if asked.here:
        print(chosen[0]())
        return 0
    family = get_backend(asked.backend)
    has_failed = False
    for each in chosen:
        code, text = 0, f"skipped: {family.unavailable_reason()}"
        if family.is_available():
            environ = {**os.environ, "UNISONO_BACKEND": asked.backend}
            command = [sys.executable, __file__, "--here", each.__name__]
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
            code, text = ran.returncode, ran.stdout.strip() if ran.returncode == 0 else ran.stderr.strip()[-3000:]
        has_failed = has_failed or code != 0
        print(f"{each.__name__.replace('_', ' ')}: {'FAILED' if code else '' if 'skipped: ' in text else 'ok'} {text}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
