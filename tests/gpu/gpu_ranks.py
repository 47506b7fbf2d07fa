"""What a rank does in the check of a GPU: `python gpu_ranks.py NAME [WORD ...]`, under a launcher's variables.

The last line on standard output is what it has found, as JSON. `UNISONO_BACKEND` chooses the family, so that the same
can be seen on the CPU; `CHECK_GROUP=gloo` the process group, which lets two ranks share a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.world import World

GROUP: Any = os.environ.get("CHECK_GROUP") or None
LATE_S = 2.0
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "guarded": {"nan_guard": True},
}


def collectives(world: World) -> dict[str, Any]:
    """All of them, on the device and in main memory; and whether a barrier waits for the rank that is late."""
    comm, size = world.comm, world.world_size
    own = torch.full((4,), world.rank + 1.0, device=world.device)
    mean = (size + 1) / 2
    assert comm.all_reduce(own.clone(), "mean").tolist() == [mean] * 4
    assert comm.broadcast(own.clone(), size - 1).tolist() == [size] * 4
    assert [each.tolist() for each in comm.all_gather(own)] == [[rank + 1.0] * 4 for rank in range(size)]
    part = comm.reduce_scatter(own.repeat(size))
    assert part.tolist() == [mean * size] * 4
    assert part.device.type == world.device.type
    assert comm.all_reduce(torch.tensor(1)).item() == size
    assert comm.all_gather_object({"rank": world.rank})[-1] == {"rank": size - 1}
    assert comm.broadcast_object("plan" if world.rank == 0 else None) == "plan"
    if world.rank == 0:
        comm.all_reduce(torch.ones(1, device=world.device))
        time.sleep(LATE_S)
    else:
        comm.all_reduce(torch.ones(1, device=world.device))
    began = time.monotonic()
    comm.barrier()
    waited = time.monotonic() - began
    assert world.rank == 0 or waited > LATE_S / 2, f"the barrier waited {waited:.2f} s for a rank that was late"
    alone = dist.new_group([0])  # split from the whole one, where that is bound to a device
    if world.rank == 0:
        dist.all_reduce(own, group=alone)
        assert own.tolist() == [1.0] * 4
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return {"device": str(world.device), "bound": str(bound), "waited": round(waited, 2)}


def training(world: World, strategy: str) -> dict[str, Any]:
    """A few steps of a strategy in each case: the last loss, and the sum of the weights, which rank zero has."""
    return {case: _trained(strategy, case) for case in CASES if (strategy, case) != ("fsdp", "guarded")}


def _trained(strategy: str, case: str) -> list[float]:
    accelerator = unisono.Accelerator(strategy=strategy, seed=0, **CASES[case])
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(101, 8, generator=numbers), torch.randn(101, 2, generator=numbers))
    network: Any = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    network, optimizer, loader = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters()), DataLoader(data, 8)
    )
    loss = torch.zeros(())
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(network(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    weights = accelerator.state_dict(network) or {}
    found = [float(loss.detach()), sum(float(each.double().sum()) for each in weights.values())]
    accelerator.free_memory()
    return found


def evaluating(world: World) -> dict[str, Any]:
    """Rank zero alone runs a model with BatchNorm between two steps."""
    accelerator = unisono.Accelerator(strategy="ddp", seed=0)
    network: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
    for _ in range(3):
        accelerator.backward(network(torch.randn(4, 8, device=world.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            with torch.no_grad():
                network.eval()(torch.randn(4, 8, device=world.device))
            network.train()
    mean = network.module[1].running_mean
    assert torch.equal(mean, unisono.broadcast(mean.clone()))
    return {}


def failing(world: World, how: str) -> dict[str, Any]:
    """The last rank fails, while the others wait in a collective."""
    world.comm.all_reduce(torch.ones(1, device=world.device))
    if world.rank == world.world_size - 1:
        FAILURES[how](world)
    found = torch.ones(1 << 20, device=world.device)
    for _ in range(100):
        found = world.comm.all_reduce(found, "mean")
    return {"sum": found.sum().item()}


def _raise(world: World) -> None:
    raise ValueError("as planned")


def _assert(world: World) -> None:
    table = nn.Embedding(4, 2, device=world.device)
    table(torch.full((1,), 9, device=world.device)).sum().item()


def _exhaust(world: World) -> None:
    torch.empty(1 << 50, device=world.device)


def _kill(world: World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES: dict[str, Callable[[World], None]] = {"raise": _raise, "assert": _assert, "memory": _exhaust, "kill": _kill}


def main(name: str, *words: str) -> None:
    world = unisono.join_world(process_group=GROUP)
    bodies: dict[str, Callable[..., dict[str, Any]]] = {
        each.__name__: each for each in (collectives, training, evaluating, failing)
    }
    print(json.dumps(bodies[name](world, *words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
