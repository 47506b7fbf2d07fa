"""How long a checkpoint blocks the loop, how large it is, and how soon a killed run takes its next step.

    python bench/checkpoint.py [--rounds 9] [--megabytes 256] [--directory DIR]

The state is that of a model with AdamW. The loop is blocked by an asynchronous `Checkpointer.save()`, by a plain
`torch.save` of the same state, and by torch.distributed.checkpoint's `async_save` (on CUDA it keeps its memory, too);
each begins when the previous one has been written. Restarts: rank 1 of two kills itself with SIGKILL; the group
loads, by `load_state` or by hand-written code around `torch.load`, and takes a step. Ratios are ours / theirs: smaller
is faster.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from blocks import conditions, interleave, ratio_line
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from unisono import Accelerator, Checkpointer, barrier, current_world, is_rank_zero, spawn


def build(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters, together with the state of AdamW, have this many megabytes."""
    layers = max(1, round(megabytes / 12))  # 4 MB each, and twice that in the optimizer
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(hold: Callable[[], Any], finish: Callable[[Any], Any] = lambda _: None) -> float:
    start = time.perf_counter()
    begun = hold()
    held = time.perf_counter() - start
    finish(begun)
    return held


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def hold_the_loop(megabytes: int, rounds: int, root: Path) -> None:
    """Print how long an asynchronous save blocks the loop, relative to the others."""
    model, optimizer = build(megabytes)
    checkpointer = Checkpointer(root / "ours", keep=1, model=model, optimizer=optimizer)
    writer = FileSystemWriter(root / "dcp", cache_staged_state_dict=torch.cuda.is_available())

    def states() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def theirs() -> Any:
        return async_save(states(), storage_writer=writer, no_dist=True)

    variants = {
        "Checkpointer.save": lambda: timed(checkpointer.save, lambda _: checkpointer.wait()),
        "torch.save": lambda: timed(lambda: torch.save(states(), root / "plain.pt")),
        "dcp.async_save": lambda: timed(theirs, lambda future: future.result()),
    }
    times = interleave(variants, rounds, warm_up=2)
    print("median seconds: " + ", ".join(f"{name} {median(each):.4f}" for name, each in times.items()))
    print(ratio_line("held by Checkpointer.save / torch.save", times["Checkpointer.save"], times["torch.save"]))
    print(ratio_line("held by Checkpointer.save / dcp.async_save", times["Checkpointer.save"], times["dcp.async_save"]))
    ours, plain = size_of(root / "ours"), (root / "plain.pt").stat().st_size
    print(f"{'bytes of a checkpoint / torch.save':<52} {ours / plain:7.4f}   {ours:,} bytes")
    checkpointer.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()


def die_or_tell(root: Path) -> None:
    """In the first life, rank 1 notes the time and is killed; in the second, each rank notes its first step."""
    world = current_world()
    if world.restart_count:
        (root / f"stepped-{world.rank}").write_text(str(time.monotonic()))
        return
    barrier()
    if world.rank == 1:
        (root / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def by_state(index: int, megabytes: int, root: Path) -> None:
    accelerator = Accelerator(project_dir=root)
    model, optimizer = accelerator.prepare(*build(megabytes))
    accelerator.load_state(must_exist=False)
    step(model, optimizer)
    if not current_world().restart_count:
        accelerator.save_state()
    die_or_tell(root)


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
    die_or_tell(root)


def restarted(body: Callable[..., None], megabytes: int, outer: Path) -> float:
    with tempfile.TemporaryDirectory(dir=outer) as directory:
        root = Path(directory)
        spawn(body, args=(megabytes, root), nprocs=2, max_restarts=1)
        stepped = max(float(path.read_text()) for path in root.glob("stepped-*"))
        return stepped - float((root / "killed").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; else the temporary directory")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # each death is logged
    print(f"checkpoints of {arguments.megabytes} MB, {conditions()}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        hold_the_loop(arguments.megabytes, arguments.rounds, Path(directory))
        variants = {
            "load_state": partial(restarted, by_state, arguments.megabytes, Path(directory)),
            "torch.load": partial(restarted, by_hand, arguments.megabytes, Path(directory)),
        }
        times = interleave(variants, max(arguments.rounds // 2, 1))
    print("median seconds from the kill to a step: " + ", ".join(f"{n} {median(t):.3f}" for n, t in times.items()))
    print(ratio_line("kill to first step, load_state / torch.load", *times.values()))


if __name__ == "__main__":
    main()
