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
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet import resnet50
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.strategies import DDP, FSDP
from unisono.world import World

GROUP: Any = os.environ.get("CHECK_GROUP") or None
LATE_S = 2.0
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "accumulated": {"gradient_accumulation_steps": 2},
}
OF_ONE: dict[str, dict[str, dict[str, Any]]] = {  # cases of one strategy, by its options
    "ddp": {"views of small buckets": {"strategy": DDP(gradient_as_bucket_view=True, bucket_cap_mb=1e-3)}},
    "zero1": {},
    "fsdp": {
        "bf16 units": {"strategy": FSDP(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "kept": {"strategy": FSDP(units=(nn.Linear,), reshard_after_forward=False)},
        "offloaded": {"strategy": FSDP(units=(nn.Linear,), offload=True)},
    },
}
WAITS: dict[str, tuple[int, dict[str, Any]]] = {  # in each step, as docs/performance.md says
    "plain": (0, {}),
    "clipped": (0, {"max_grad_norm": 1.0}),
    "bf16": (0, {"mixed_precision": "bf16"}),
    "accumulated": (0, {"gradient_accumulation_steps": 2}),
    "weighed": (0, {}),
    "asked to stop": (0, {}),
    "metrics gathered": (0, {}),
    "fp16": (1, {"mixed_precision": "fp16", "scaler_options": {"init_scale": 1.0}}),
}
COUNTED = 40


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
    cases = {case: {"strategy": strategy, **options} for case, options in (CASES | OF_ONE[strategy]).items()}
    return {case: _trained(options) for case, options in cases.items()}


def virtual(world: World) -> dict[str, str]:
    """The digest of a training with virtual ranks."""
    accelerator = unisono.Accelerator(seed=0, virtual_ranks=4, mixed_precision="bf16")
    images = TensorDataset(torch.randn(90, 3, 8, 8), torch.randint(5, (90,)))
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 5)]
    network: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(network.parameters())
    network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(images, 4, shuffle=True))
    for inputs, targets in loader:
        optimizer.zero_grad()
        noise = 0.1 * torch.randn_like(inputs)
        accelerator.backward(F.cross_entropy(network(inputs + noise).float(), targets))
        optimizer.step()
    return {"digest": accelerator.digest()}


def replicating(world: World) -> dict[str, Any]:
    """The same training with parameters sharded over all ranks, and over half of them."""
    return {str(replicas): _trained({"strategy": FSDP(replicas=replicas)}) for replicas in (1, 2)}


def _trained(options: dict[str, Any]) -> list[float]:
    accelerator = unisono.Accelerator(seed=0, **options)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(101, 8, generator=numbers), torch.randn(101, 2, generator=numbers))
    network: Any = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer: Any = torch.optim.AdamW(network.parameters())
    network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, 8))
    loss = torch.zeros(())
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(network(inputs).float(), targets)  # before 2.12 torch takes no other type here
        accelerator.backward(loss)
        optimizer.step()
    weights = accelerator.state_dict(network) or {}
    found = [float(loss.detach()), sum(float(each.double().sum()) for each in weights.values())]
    accelerator.free_memory()
    return found


def waiting(world: World, strategy: str) -> dict[str, Any]:
    """How often some steps wait for the device, in each case, and on which lines."""
    found = {}
    for case, (_, options) in WAITS.items():
        accelerator = unisono.Accelerator(strategy=strategy, **options)
        data = TensorDataset(torch.randn(64 * 120, 8), torch.randn(64 * 120, 1))
        network: Any = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer: Any = torch.optim.AdamW(network.parameters())
        network, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, 64))
        batches = iter(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for counted in (0, COUNTED):  # the first steps compare models, and make buckets
                torch.cuda.set_sync_debug_mode("warn" if counted else "default")
                for inputs, targets in islice(batches, counted or 6):
                    optimizer.zero_grad()
                    outputs = network(inputs)
                    weight = {"weight": 2.0 + world.rank} if case == "weighed" else {}
                    accelerator.backward(F.mse_loss(outputs, targets), **weight)
                    optimizer.step()
                    if case == "asked to stop":
                        unisono.should_stop()
                    if case == "metrics gathered":
                        accelerator.gather_for_metrics(outputs.detach())
            torch.cuda.set_sync_debug_mode("default")
        told = [each for each in caught if "called a synchronizing" in str(each.message)]
        found[case] = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in told)
        accelerator.free_memory()
    return found


def remembering(world: World) -> dict[str, Any]:
    """MiB at most allocated by steps of ResNet-50, plain and under ddp."""
    seen: dict[str, Any] = {}
    images, labels = torch.randn(32, 3, 224, 224, device=world.device), torch.arange(32, device=world.device)
    for way in ("plain", "ddp"):
        network: Any = resnet50().to(world.device)
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        accelerator = unisono.Accelerator(strategy="ddp")
        if way == "ddp":
            network, optimizer = accelerator.prepare(network, optimizer)
        for step in range(6):
            if step == 3:  # buckets, the optimizer's states and cuDNN's choices are there
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()
        seen[way] = torch.cuda.max_memory_allocated() >> 20
        accelerator.free_memory()
        del network, optimizer
        torch.cuda.empty_cache()
    return seen


def failing(world: World, how: str) -> dict[str, Any]:
    """The last rank fails, while the others wait in a collective."""
    world.comm.all_reduce(torch.ones(1, device=world.device))
    if world.rank == world.world_size - 1:
        _fail(world, how)
    found = torch.ones(1 << 20, device=world.device)
    for _ in range(100):
        found = world.comm.all_reduce(found, "mean")
    return {"sum": found.sum().item()}


def _fail(world: World, how: str) -> None:
    if how == "raise":
        raise ValueError("as planned")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        torch.empty(1 << 50, device=world.device)
    table = nn.Embedding(4, 2, device=world.device)
    table(torch.full((1,), 9, device=world.device)).sum().item()  # an assertion of a kernel


def main(name: str, *words: str) -> None:
    world = unisono.join_world(process_group=GROUP)
    bodies: list[Any] = [collectives, training, virtual, replicating, waiting, remembering, failing]
    (body,) = [each for each in bodies if each.__name__ == name]
    print(json.dumps(body(world, *words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
