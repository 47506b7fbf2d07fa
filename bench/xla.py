"""The digits loop on virtual XLA devices, against torch_xla's own loader and optimizer_step; and graphs compiled.

    PJRT_DEVICE=CPU .venv-xla/bin/python bench/xla.py [--blocks 6] [--devices 1 2 4]

On one device torch_xla runs as documented. On several, its threads abort if each cuts its graph independently, so here
they all meet first and then cut one after the other. Unlike in our communicator, nothing checks that the graphs are the
same. Each number of devices has its own process, in which both loops alternate.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from blocks import interleave, options, show
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

from unisono import DataParallel, optimizer_step
from unisono.devices import get_backend

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import GLOBAL_BATCH, build_loaders, build_model

DEVICES = ("xla",)
STEPS = 22  # an epoch without its tail, so that both have a single shape


def data() -> Dataset[Any]:
    return Subset(build_loaders(1)[0].dataset, range(STEPS * GLOBAL_BATCH))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def ours(count: int) -> Callable[[], float]:
    """A step with DataParallel, in seconds."""
    replicas = DataParallel(build_model(), [f"xla:{index}" for index in range(count)])
    loader = DataLoader(data(), GLOBAL_BATCH // count, shuffle=True)

    def epoch(model: nn.Module, batches: Any, device: torch.device, context: Any) -> None:
        optimizer = context.getattr_or("optimizer", lambda: sgd(model))
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer_step(optimizer)

    def run() -> float:
        start = time.perf_counter()
        replicas(epoch, loader)
        wait_for_devices()
        return (time.perf_counter() - start) / STEPS

    return run


def theirs(count: int) -> Callable[[], float]:
    """A step with torch_xla's MpDeviceLoader and optimizer_step, one thread per device, in seconds."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    devices = [torch.device("xla", index) for index in range(count)]
    models = [build_model().to(device) for device in devices]
    optimizers = [sgd(model) for model in models]
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(data(), count, rank, drop_last=True) for rank in range(count)
    ]
    if count > 1:
        xm.set_replication(devices[0], devices)
        torch_xla.sync = gated(torch_xla.sync, count)

    def epoch(rank: int) -> None:
        torch_xla._XLAC._xla_set_default_device(str(devices[rank]))
        loader = DataLoader(data(), GLOBAL_BATCH // count, sampler=samplers[rank])
        for images, labels in MpDeviceLoader(loader, devices[rank]):
            optimizers[rank].zero_grad()
            F.cross_entropy(models[rank](images), labels).backward()  # type: ignore[no-untyped-call]
            xm.optimizer_step(optimizers[rank])

    def run() -> float:
        start = time.perf_counter()
        threads = [threading.Thread(target=epoch, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for_devices()
        return (time.perf_counter() - start) / STEPS

    return run


def gated(sync: Callable[[], None], count: int) -> Callable[[], None]:
    """All threads meet, then cut one after the other: the first compiles, the others find the compiled graph."""
    gate, lock = threading.Barrier(count), threading.Lock()

    def together(*_: Any, **__: Any) -> None:
        gate.wait()
        with lock:
            sync()

    return together


def wait_for_devices() -> None:
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def compare(count: int, blocks: int) -> None:
    backend = get_backend("xla")
    run_ours = ours(count)
    compiled = [backend.counters().get("graphs compiled", 0)]
    for _ in range(3):
        run_ours()
        compiled.append(backend.counters()["graphs compiled"])
    print(f"{count} device(s): graphs compiled in the epochs 1, 2, 3: {[b - a for a, b in pairwise(compiled)]}")
    peer = f"torch_xla{' with a gate' if count > 1 else ''}"
    show(f"a step, {count} device(s)", interleave({"unisono": run_ours, peer: theirs(count)}, blocks, warm_up=2))


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=6, devices=[1, 2, 4])
    if len(arguments.devices) == 1:
        compare(arguments.devices[0], arguments.blocks)
        return
    for count in arguments.devices:
        command = [sys.executable, __file__, "--devices", str(count), "--blocks", str(arguments.blocks)]
        environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}
        subprocess.run(command, env=environ, check=True)


if __name__ == "__main__":
    main()
