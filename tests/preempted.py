"""The script that `preemptions.py` runs: it trains by `spawn`, saves, resumes, and is hit by a signal at some moment.

Each rank notes in a file of its own what it has trained on, and where it began, saved and stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from file_faults import at_each_operation
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from unisono import Accelerator, current_world, should_stop, spawn, warm
from unisono.checkpoint import saver

SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 27, 6, 3, 5


class Life(NamedTuple):
    """A run from its start, or its checkpoint, to its end, or to when the victim is hit.

    That is a moment after `hitter` has come to the place so many times; in a save, at one of the file operations.
    """

    ranks: int
    strategy: str
    workers: int
    place: str
    times: int
    operation: int
    hitter: int
    victim: str
    delay_s: float


class Case(NamedTuple):
    signum: int
    data: str  # "map", "stream", or "cut": a stream that its loader workers cut
    accumulates: int
    is_async: bool
    every: int  # batches between saves
    has_persistent: bool  # loader workers
    writes_shards: bool  # all ranks write, where the strategy divides
    max_restarts: int
    lives: list[Life]


def any_case(kind: str, seed: int) -> Case:
    draw = random.Random(f"{kind} {seed}")
    lives = []
    for places in [["save", "save", "backward", "load", "resume", "time"]] * 2 + [["nowhere"]]:
        place = "save" if kind == "kill" and "save" in places else draw.choice(places)
        times = 1 if place in ("resume", "time") else draw.randrange(1, 4 if place == "save" else 12)
        hitter = 0 if place == "save" else draw.randrange(2)  # in a save, who writes
        delay_s = draw.choice([0.0, draw.random() * (0.3 if place == "time" else 0.005)])
        victim = draw.choice(["self", "other", "caller", "ranks", "all"])
        way = draw.choice([2, 3]), draw.choice(["ddp", "zero1", "fsdp"]), draw.randrange(3)
        lives.append(Life(*way, place, times, draw.randrange(1, 40), hitter, victim, delay_s))
    data = draw.choice(["map", "map", "stream", "cut"])
    if data == "cut":  # it goes on with the same numbers only
        lives = [each._replace(ranks=lives[0].ranks, workers=lives[0].workers) for each in lives]
    restarts = draw.choice([0, 0, 1]) if kind == "kill" else 0
    is_async, has_persistent, writes_shards = (draw.random() < 0.5 for _ in range(3))
    accumulates, every = draw.choice([1, 2]), draw.randrange(1, 4)
    signum = signal.SIGKILL if kind == "kill" else signal.SIGTERM
    return Case(signum, data, accumulates, is_async, every, has_persistent, writes_shards, restarts, lives)


class Striker:
    """Sends a life's signal, once."""

    def __init__(self, life: Life, signum: int, mark: Path, rank: int, pids: list[int]) -> None:
        self.life, self.signum, self.mark, self.rank, self.pids, self.came = life, signum, mark, rank, pids, 0

    def come_to(self, place: str) -> None:
        if place != self.life.place or (self.rank != self.life.hitter and place != "load"):
            return
        self.came += 1
        if self.came == self.life.times:
            if place == "save":
                self.acting = at_each_operation(self.act)  # kept: to collect it would be its end
                self.acting.__enter__()
            else:
                threading.Timer(self.life.delay_s, self.strike).start() if self.life.delay_s else self.strike()

    def act(self, number: int, name: str, operation: Any, args: Any, kwargs: Any) -> Any:
        if number == self.life.operation:
            self.strike()
        return operation(*args, **kwargs)

    def strike(self) -> None:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return
        caller, *ranks = self.pids
        other = ranks[(self.rank + 1) % len(ranks)]
        victims = {"self": [os.getpid()], "other": [other], "caller": [caller], "ranks": ranks}
        # As a scheduler does: the zygote and the loader workers, too.
        victims["all"] = [caller, *(each.pid for each in psutil.Process(caller).children(recursive=True))]
        for pid in sorted(victims[self.life.victim], key=os.getpid().__eq__):  # itself last
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.signum)


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return point, point.sum().sin().unsqueeze(0), index


class Points(Dataset):
    def __init__(self, striker: Striker) -> None:
        self.striker = striker

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.striker.come_to("load")
        return sample(index)


class Stream(IterableDataset):
    epoch = 0

    def __init__(self, points: Points, is_cut: bool) -> None:
        self.points, self.is_cut = points, is_cut

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        indices = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        if self.is_cut and (worker := get_worker_info()) is not None:
            indices = indices[worker.id :: worker.num_workers]
        return map(self.points.__getitem__, indices)


def built() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(index: int, root: Path, number: int, case: Case, caller: int) -> None:
    should_stop()  # from here on SIGTERM is a request
    life, world = case.lives[number], current_world()
    ledger = (root / f"{number}.{world.restart_count}.{index}").open("a", buffering=1)

    def note(*what: Any) -> None:
        print(json.dumps(what), file=ledger)

    pids = [caller, *world.comm.all_gather_object(os.getpid())]
    striker = Striker(life, case.signum, root / f"hit-{number}", index, pids)
    if case.writes_shards:
        saver.SMALL = -1
    data: Any = Points(striker) if case.data == "map" else Stream(Points(striker), case.data == "cut")
    loading = {"num_workers": life.workers, "persistent_workers": case.has_persistent and life.workers > 0}
    loader = DataLoader(data, GLOBAL_BATCH // life.ranks, shuffle=case.data == "map" or None, **loading)
    options = {"gradient_accumulation_steps": case.accumulates, "project_dir": root, "total_limit": 2}
    accelerator = Accelerator(strategy=life.strategy, seed=SEED, **options)
    network, *others = built()
    # The gradients of the last layer may be on their way to the other ranks, or those wait for them.
    network[1].register_full_backward_hook(lambda *_: striker.come_to("backward"))
    count = nn.Module()
    count.register_buffer("batches", torch.tensor(0))
    model, optimizer, scheduler, loader = accelerator.prepare(network, *others, loader)
    accelerator.register_for_checkpointing(count)
    striker.come_to("resume")
    accelerator.load_state(must_exist=False)
    striker.come_to("time")
    note("began", int(count.batches))
    for epoch in range(loader.epoch, EPOCHS):
        for x, y, indices in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            note(int(count.batches), epoch, indices[: loader.valid_samples].tolist())
            count.batches += 1
            is_over = should_stop()
            if is_over or count.batches % case.every == 0:
                striker.come_to("save")
                accelerator.save_state(is_async=case.is_async and not is_over)
                note("stopped" if is_over else "saving" if case.is_async else "saved", int(count.batches))
            if is_over:
                sys.exit(143)
        scheduler.step()
    accelerator.end_training()
    weights = accelerator.state_dict(model)
    if index == 0:
        torch.save(weights, root / "weights.pt")


if __name__ == "__main__":
    kind, seed, number = os.environ["RUN"].split()
    case = any_case(kind, int(seed))
    warm(preload=("unisono.accelerator", "file_faults"))
    arguments = (Path.cwd(), int(number), case, os.getpid())
    spawn(train, arguments, case.lives[int(number)].ranks, cores=1, max_restarts=case.max_restarts, timeout=30)
