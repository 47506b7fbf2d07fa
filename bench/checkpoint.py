"""How long a checkpoint blocks the loop, how large it is, and how soon a killed run takes its next step.

    python bench/checkpoint.py [--blocks 7] [--megabytes 128] [--directory DIR]

The state is that of a model with AdamW. The loop is blocked by an asynchronous `Checkpointer.save()`, by a plain
`torch.save` of the same state, and by torch.distributed.checkpoint's `async_save` (on CUDA it keeps its memory, too);
each begins when the previous one has been written. Restarts, on the CPU: rank 1 of two kills itself with SIGKILL; the
group loads, by `load_state` or by hand-written code around `torch.load`, and takes a step.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blocks import interleave, options, show
from peers import latest, stamp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from unisono import Accelerator, Checkpointer, barrier, current_world, is_rank_zero, spawn
from unisono.devices import get_backend

DEVICES = ("cpu", "cuda", "mps")


def build(megabytes: int, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters, together with the state of AdamW, have this many megabytes."""
    layers = max(1, round(megabytes / 12))  # 4 MB each, and twice that in the optimizer
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def hold_the_loop(megabytes: int, blocks: int, root: Path, device: str) -> None:
    """How long an asynchronous save blocks the loop, relative to the others; and how large it is."""
    model, optimizer = build(megabytes, device)
    checkpointer = Checkpointer(root / "ours", keep=1, model=model, optimizer=optimizer)
    writer = FileSystemWriter(root / "dcp", cache_staged_state_dict=device == "cuda")
    family = get_backend(device)

    def states() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def theirs() -> Any:
        return async_save(states(), storage_writer=writer, no_dist=True)

    def timed(hold: Callable[[], Any], finish: Callable[[Any], Any] = lambda _: None) -> float:
        family.synchronize(family.device(0))
        start = time.perf_counter()
        begun = hold()
        held = time.perf_counter() - start
        finish(begun)
        return held

    variants = {
        "Checkpointer.save": lambda: timed(checkpointer.save, lambda _: checkpointer.wait()),
        "torch.save": lambda: timed(lambda: torch.save(states(), root / "plain.pt")),
        "torch.distributed.checkpoint.async_save": lambda: timed(theirs, lambda future: future.result()),
    }
    show(f"the loop is blocked, {megabytes} MB", interleave(variants, blocks, warm_up=2))
    ours = sum(each.stat().st_size for each in (root / "ours").rglob("*") if each.is_file())
    sizes = {"Checkpointer.save": [ours], "torch.save": [(root / "plain.pt").stat().st_size]}
    show("bytes on disk", sizes, unit="bytes")
    checkpointer.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()


def die_or_note(root: Path) -> None:
    """In the first life, rank 1 notes the time and is killed; in the second, each rank notes its first step."""
    world = current_world()
    if world.restart_count:
        stamp(root, f"stepped-{world.rank}")
        return
    barrier()
    if world.rank == 1:
        stamp(root, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def by_state(index: int, megabytes: int, root: Path) -> None:
    accelerator = Accelerator(project_dir=root)
    model, optimizer = accelerator.prepare(*build(megabytes))
    accelerator.load_state(must_exist=False)
    step(model, optimizer)
    if not current_world().restart_count:
        accelerator.save_state()
    die_or_note(root)


def by_hand(index: int, megabytes: int, root: Path) -> None:
    accelerator = Accelerator(project_dir=root)
    model, optimizer = accelerator.prepare(*build(megabytes))
    if (root / "plain.pt").exists():
        state = torch.load(root / "plain.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step(model, optimizer)
    if is_rank_zero() and not current_world().restart_count:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root / "plain.pt")
    die_or_note(root)


def restarted(body: Callable[..., None], megabytes: int, outer: Path) -> float:
    with tempfile.TemporaryDirectory(dir=outer) as directory:
        root = Path(directory)
        spawn(body, args=(megabytes, root), nprocs=2, max_restarts=1)
        return latest(root, "stepped-*") - latest(root, "killed")


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=7, megabytes=128, directory=tempfile.gettempdir())
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # each death is logged
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        hold_the_loop(arguments.megabytes, arguments.blocks, Path(directory), arguments.device)
        if arguments.device == "cpu":
            ways = {"load_state": by_state, "torch.load": by_hand}
            variants = {
                name: partial(restarted, way, arguments.megabytes, Path(directory)) for name, way in ways.items()
            }
            show("from the kill to the next step", interleave(variants, max(2, arguments.blocks // 2)))


if __name__ == "__main__":
    main()
