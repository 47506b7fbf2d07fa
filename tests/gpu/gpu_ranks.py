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
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet import resnet50
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
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


def replicating(world: World) -> dict[str, Any]:
    """The same training with parameters sharded over all ranks, and over half of them."""
    return {str(replicas): _trained({"strategy": FSDP(replicas=replicas)}) for replicas in (1, 2)}


def _trained(options: dict[str, Any]) -> list[float]:
    accelerator = unisono.Accelerator(seed=0, **options)
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


def waiting(world: World, strategy: str) -> dict[str, Any]:
    """How often some steps wait for the device, in each case, and on which lines."""
    found = {}
    for case, (_, options) in WAITS.items():
        accelerator = unisono.Accelerator(strategy=strategy, **options)
        data = TensorDataset(torch.randn(64 * 120, 8), torch.randn(64 * 120, 1))
        network: Any = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        network, optimizer, loader = accelerator.prepare(
            network, torch.optim.AdamW(network.parameters()), DataLoader(data, 64)
        )
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


def moving(world: World) -> dict[str, Any]:
    """MiB at most allocated and reserved by batches of one shape, and by batches of changing shapes."""
    seen = {}
    for shape in ("one shape", "changing shapes"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        lengths = [64 if shape == "one shape" else 1 + number % 97 for number in range(200)]
        for batch in unisono.DeviceLoader([torch.zeros(length, 1 << 14) for length in lengths], world.device):
            batch.sum()
        torch.cuda.synchronize()
        seen[shape] = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20]
    return seen


def remembering(world: World) -> dict[str, Any]:
    """MiB at most allocated by steps of ResNet-50, plain and under ddp; and the largest blocks that are left."""
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
                torch.cuda.memory._record_memory_history(max_entries=10_000)
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()
        seen[way] = torch.cuda.max_memory_allocated() >> 20
        blocks = [block for segment in torch.cuda.memory._snapshot()["segments"] for block in segment["blocks"]]
        torch.cuda.memory._record_memory_history(enabled=None)
        held = sorted((each for each in blocks if each["state"] == "active_allocated"), key=lambda each: -each["size"])
        seen["largest"] = [f"{each['size'] >> 20} MiB by {_allocated_by(each)}" for each in held[:5]]
        accelerator.free_memory()
        del network, optimizer
        torch.cuda.empty_cache()
    return seen


def _allocated_by(block: dict[str, Any]) -> str:
    """The innermost line of Python that is outside of torch, if the history has it."""
    frames = [each for each in block.get("frames", ()) if each["filename"].endswith(".py")]
    own = [each for each in frames if "/torch/" not in each["filename"]] or frames
    return f"{Path(own[0]['filename']).name}:{own[0]['line']}" if own else "an earlier step"


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


def compiling(world: World, strategy: str) -> dict[str, Any]:
    """Losses and outputs of a few steps, which evaluate while gradients are held, without and with torch.compile; and
    the graphs of what `prepare` returned."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def trained(way: str) -> list[float]:
        torch.compiler.reset()
        options = {"compile": {"backend": "aot_eager"}} if way == "option" else {}
        accelerator = unisono.Accelerator(seed=0, strategy=strategy, **options)
        network: Any = Net()
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
        call = torch.compile(network, backend=keep, fullgraph=True) if way == "prepared" else network
        inputs = torch.linspace(-1, 1, 64, device=world.device).reshape(8, 8)
        seen = []
        for rows in (8, 8, 5, 7):
            loss = call(inputs[:rows]).square().mean()
            accelerator.backward(loss, batch=())
            optimizer.step()
            with torch.no_grad():
                seen += [loss.item(), call(inputs[:3]).sum().item()]
            optimizer.zero_grad()
        accelerator.free_memory()
        return seen

    return {way: trained(way) for way in ("eager", "option", "prepared")} | {"graphs": len(graphs)}


class Net(nn.Module):
    """Of a class of its own: torch compiles the frames of users' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


PARAMETERS = 200


def costing(world: World) -> dict[str, Any]:
    """Of a step of many small parameters: torch's operations, those that scale, and microseconds of the host."""
    inputs = torch.ones(2, 4, device=world.device)
    found = {}
    for way in ("DDP", "ddp"):
        network: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(PARAMETERS // 2)]).to(world.device)
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3)
        accelerator = unisono.Accelerator()
        if way == "DDP":
            network = nn.parallel.DistributedDataParallel(network)
        else:
            network, optimizer = accelerator.prepare(network, optimizer)

        def step(network: Any = network, optimizer: Any = optimizer) -> None:
            network(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step()
        counts = Counter(
            each.name
            for each in trace.events()
            if each.name.startswith("aten::") and "aten::" not in getattr(each.cpu_parent, "name", "")
        )
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        for _ in range(20):
            step()
        micros = (time.perf_counter() - began) / 20 / PARAMETERS * 1e6
        found[way] = (sum(counts.values()), counts["aten::mul_"] + counts["aten::div_"], round(micros, 2))
        accelerator.free_memory()
    return found


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
        **{each.__name__: each for each in (collectives, training, replicating, waiting, moving, remembering)},
        **{each.__name__: each for each in (evaluating, compiling, costing, failing)},
    }
    print(json.dumps(bodies[name](world, *words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
