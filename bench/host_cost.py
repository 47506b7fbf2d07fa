"""What a prepared step costs the host: time against the plain step, and Python calls.

    python bench/host_cost.py [--blocks 40] [--parameters 300]

A model of tiny layers, so that the step is nearly all host: on an accelerator this time is what the device waits for.
One rank is compared with plain torch; two ranks with torch's DDP, in the same workers and over the same process group;
and Accelerate's with DDP, where it can be imported. Each block runs a few steps of each variant, in turn. Differences
are in microseconds a step and a parameter: smaller is better.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from statistics import median, quantiles
from types import FrameType
from typing import Any

import torch
from blocks import conditions, interleave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono import Accelerator, rank, spawn, world_size

STEPS = 8  # of a block
OURS, DDP, ACCELERATE, PLAIN = "unisono", "DDP", "accelerate", "plain torch"

Step = Callable[[], None]


def network(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(parameters // 2)])


def parts(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(parameters)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step_of(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, backward: Callable[..., Any]) -> Step:
    inputs = torch.ones(2, 4)

    def step() -> None:
        backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(parameters: int, **options: Any) -> Step:
    accelerator = Accelerator(**options)
    model, optimizer = accelerator.prepare(*parts(parameters))
    return step_of(model, optimizer, accelerator.backward)


def plain(parameters: int) -> Step:
    model, optimizer = parts(parameters)
    return step_of(model, optimizer, torch.Tensor.backward)


def ddp(parameters: int) -> Step:
    model, optimizer = parts(parameters)
    return step_of(DistributedDataParallel(model), optimizer, torch.Tensor.backward)


def accelerates(parameters: int) -> Step:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts(parameters))
    return step_of(model, optimizer, accelerator.backward)


def timed(step: Step) -> Callable[[], float]:
    def block() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - start) / STEPS * 1e6

    return block


def calls_of(step: Step) -> tuple[int, int]:
    """The Python calls of one step outside of torch, and the files that they are in."""
    step()
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "torch" not in frame.f_code.co_filename and frame.f_code.co_name != "step":
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


def compare(parameters: int, blocks: int) -> list[str]:
    """Lines of results, the same steps on each rank."""
    torch.set_num_threads(1)
    is_alone = world_size() == 1
    base = PLAIN if is_alone else DDP
    variants = {base: (plain if is_alone else ddp)(parameters), OURS: ours(parameters)}
    if not is_alone and find_spec("accelerate"):
        variants[ACCELERATE] = accelerates(parameters)
    results = interleave({name: timed(step) for name, step in variants.items()}, blocks, warm_up=3)
    lines = [f"{world_size()} rank(s), {parameters} parameters: {base} {median(results[base]):.0f} us a step"]
    for name in (each for each in variants if each != base):
        more = [a - b for a, b in zip(results[name], results[base], strict=True)]
        low, middle, high = quantiles(more, n=4)
        ratio = median(a / b for a, b in zip(results[name], results[base], strict=True))
        lines.append(
            f"  {name:<12} {middle:+8.0f} us a step (quartiles {low:+.0f} .. {high:+.0f}), "
            f"{middle / parameters:+.2f} us a parameter, ratio {ratio:.3f}"
        )
    for strategy in ("ddp",) if is_alone else ("ddp", "fsdp"):
        (few, files), (many, _) = (calls_of(ours(count, strategy=strategy)) for count in (4, 24))
        lines.append(
            f"  {strategy:<5} {few} Python calls in {files} files, {(many - few) / 20:+.1f} a further parameter"
        )
    return lines if rank() == 0 else []


def in_worker(_: int, parameters: int, blocks: int) -> list[str]:
    return compare(parameters, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=300)
    arguments = parser.parse_args()
    print(conditions())
    print(*compare(arguments.parameters, arguments.blocks), sep="\n")
    print(*spawn(in_worker, (arguments.parameters, arguments.blocks), nprocs=2)[0], sep="\n")


if __name__ == "__main__":
    main()
