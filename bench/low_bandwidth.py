"""Training over a slow link: strategy="diloco" against "ddp", between two network namespaces of this machine.

    sudo python bench/low_bandwidth.py [--mbit 100] [--steps 256] [--every 32] [--width 512]

Each is a machine of `unisono run` with one process; a token bucket (`tc tbf`) limits what each may send. A network
learns to imitate another one, in every run from the same samples in the same order. Figures against
"ddp": the bytes that a machine sends in a step, by the counters of its interface; the time of a step; and the loss on
other samples at the end, when all have seen as many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from blocks import options, show
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, barrier, world_size
from unisono.strategies import DDP, Options
from unisono_diloco import DiLoCo

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from agents import two_networks

DEVICES = ("cpu",)
BATCH = 32  # of a machine
SENT: dict[str, Literal["bf16", "int8"]] = {"bf16": "bf16", "int8": "int8"}


def strategy(name: str, every: int) -> Options:
    if name == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        return DDP(comm_hook=partial(powerSGD_hook, state))
    return DDP() if name == "ddp" else DiLoCo(every, sent_as=SENT.get(name))


VARIANTS = {
    "ddp": "ddp",
    "powersgd": "ddp, PowerSGD of rank 4",
    "diloco": "diloco",
    "bf16": "diloco, bf16",
    "int8": "diloco, int8",
}


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def sent_bytes() -> int:
    """By this machine's interface, since it is up."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in each)
    return int(line.split(":")[1].split()[8])


def train(name: str, steps: int, every: int, width: int) -> None:
    """In a worker: print what was measured."""
    accelerator = Accelerator(strategy=strategy(name, every), seed=0)
    teacher = network(width, 1)
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps * BATCH * world_size() + 4096, 64, generator=draw)
    with torch.no_grad():
        targets = teacher(inputs) * 10
    model = network(width, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs[4096:], targets[4096:]), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    barrier()
    before, start = sent_bytes(), time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
    barrier()
    seconds, sent = time.perf_counter() - start, sent_bytes() - before
    with torch.no_grad():
        loss = F.mse_loss(model(inputs[:4096]), targets[:4096]).item()
    numbers = sum(each.numel() for each in model.parameters())
    measured = {"bytes": sent / steps, "seconds": seconds / steps, "loss": loss, "parameters": numbers}
    accelerator.print("MEASURED", json.dumps(measured))


def run(name: str, names: tuple[str, str], arguments: list[str]) -> dict[str, float]:
    """Train on both machines; what the first one has measured."""
    command = [
        sys.executable,
        "-m",
        "unisono",
        "run",
        "--nnodes",
        "2",
        "-n",
        "1",
        "--process-group",
        "gloo",
        "--rdzv-insecure",
    ]
    command += ["--rdzv-endpoint", "10.77.0.1:29617", "--num-threads", "1", __file__, "--worker", name, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    machines = [
        subprocess.Popen(["ip", "netns", "exec", each, *command], stdout=subprocess.PIPE, text=True, env=environment)
        for each in names
    ]
    outputs = [each.communicate()[0] for each in machines]
    found = [line.partition("MEASURED")[2] for text in outputs for line in text.splitlines() if "MEASURED" in line]
    if not found or any(each.returncode for each in machines):
        raise SystemExit(f"{name} failed:\n" + "\n".join(outputs))
    measured: dict[str, float] = json.loads(found[0])
    return measured


def main() -> None:
    defaults: dict[str, Any] = {"steps": 256, "every": 32, "width": 512, "mbit": 100, "worker": ""}
    arguments = options(__doc__, DEVICES, blocks=1, **defaults)
    if arguments.worker:
        return train(arguments.worker, arguments.steps, arguments.every, arguments.width)
    passed = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "every", "width")]
    try:
        with two_networks() as names:
            for each in names:
                limit = f"tbf rate {arguments.mbit}mbit burst 64kb latency 400ms".split()
                subprocess.run(["tc", "-n", each, "qdisc", "add", "dev", "eth0", "root", *limit], check=True)
            results = {name: run(name, names, passed) for name in VARIANTS}
    except (OSError, subprocess.CalledProcessError) as reason:
        print(f"skipped: network namespaces and tc need root on Linux: {reason}")
        return None
    numbers = f"{results['ddp']['parameters']:.0f} parameters, {arguments.mbit} Mbit/s"
    for what, unit in (("bytes", "bytes"), ("seconds", "s"), ("loss", "-")):
        costs = {VARIANTS[name]: [found[what]] for name, found in results.items()}
        show(
            what if unit == "-" else f"{what} a step",
            costs,
            [(each, VARIANTS["ddp"]) for each in list(costs)[1:]],
            unit,
        )
    print(f"{numbers}, {arguments.steps} steps, {arguments.every} per meeting")
    return None


if __name__ == "__main__":
    main()
