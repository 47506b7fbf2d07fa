"""Random kills of runs with snapshots: `python tests/snapshot_kills.py --seeds 0:100`.

A run trains with dropout and BatchNorm on virtual ranks. In each of its attempts but the last, something is killed, or
stopped for longer than the launcher waits, at a random call of a Python function: in any phase of a step, in the copy
of a snapshot, in `load_state`, before the first step, between two epochs. Then the run ends with the hash of an
undisturbed one, has repeated at most one step for each kill, and has left no process and no file behind. Prints a line
for each run, and a summary.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
sys.path += [each for each in (str(TESTS), str(TESTS / "checkpoint")) if each not in sys.path]

import psutil  # noqa: E402
import torch  # noqa: E402
from leak_police import footprint, leaks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from unisono import Accelerator, spawn  # noqa: E402
from unisono.errors import UnisonoError  # noqa: E402

ROWS, BATCH, VIRTUAL, EPOCHS = 60, 4, 4, 2  # the last round of an epoch is not full
COPIES = "snapshot_neighbours"
CALLS = 12_000
"""About as many as an attempt makes: a kill that is not reached leaves the attempt to end."""
_PLACES = [("/checkpoint/", 300), ("/checkpoint/", 3000), ("snapshot_memory", 200)]  # in `load_state`, and in the copy


class Plan(NamedTuple):
    """What happens in one attempt.

    Attributes:
        victim: "worker", its "loader" worker, the "zygote", its "launcher", or a worker that is "stopped".
        rank: whose.
        where, call: at which of its calls of functions in files whose paths have that part.
    """

    victim: str
    rank: int
    where: str
    call: int


class Rows(Dataset[Any]):
    """Rows that are computed from their numbers, with noise that the dataset draws."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.sin(torch.arange(8) * (row + 1.0)) + 0.1 * torch.randn(8)
        return values, values.sum()[None]


class Run(NamedTuple):
    """One run: how it is carried out, and its plans, one for each attempt."""

    strategy: str
    ranks: int
    workers: int
    plans: tuple[Plan, ...]

    @classmethod
    def drawn(cls, seed: int) -> Run:
        draw = random.Random(seed)
        ranks, workers = draw.choice([1, 2, 3]), draw.choice([0, 0, 1])
        victims = ["worker"] * 6 + ["loader"] * (2 * workers) + ["zygote"] + ["stopped"] * (ranks > 1)
        plans = []
        for _ in range(draw.choice([1, 2, 3, 4])):
            where, reach = draw.choice([("/unisono/", CALLS), ("/unisono/", CALLS // 10), *_PLACES])
            plans.append(Plan(draw.choice(victims), draw.randrange(ranks), where, draw.randrange(1, reach)))
        return cls(draw.choice(["ddp", "zero1", "fsdp"]), ranks, workers, tuple(plans))


def train(rank: int, run: Run, directory: str) -> str:
    """The hash at the end. Each step that is taken is written to a file of this rank."""
    accelerator = Accelerator(
        seed=3, strategy=run.strategy, virtual_ranks=VIRTUAL, snapshot_every=1, project_dir=directory
    )
    attempt = accelerator.world.state.groups_before
    if attempt < len(run.plans) and run.plans[attempt].rank == rank:
        _arm(run.plans[attempt], directory)
    layers = [nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = DataLoader(Rows(), BATCH, shuffle=True, num_workers=run.workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(must_exist=False)
    with open(Path(directory, f"steps-{rank}"), "a", buffering=1) as steps:
        for epoch in range(loader.epoch, EPOCHS):
            for rows, targets in loader:
                optimizer.zero_grad()
                accelerator.backward(F.mse_loss(model(rows), targets))
                optimizer.step()
                if accelerator.sync_gradients:
                    steps.write(f"{epoch} {attempt}\n")
            scheduler.step()
    sys.setprofile(None)
    threading.setprofile(None)
    return accelerator.digest()


def _arm(plan: Plan, directory: str) -> None:
    """Have the plan carried out at its call of a function of this package, in the loop's thread, or that of copies."""
    left, own = plan.call, os.getpid()  # a loader worker, forked here, has both

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event == "call" and plan.where in frame.f_code.co_filename:
            left -= 1
            if left == 0 and os.getpid() == own:
                with open(Path(directory, "done"), "a") as done:
                    done.write(f"{plan.victim} in {Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}\n")
                _strike(plan.victim)

    sys.setprofile(look)
    if plan.where == COPIES:
        threading.setprofile(look)


def _strike(victim: str) -> None:
    if victim == "loader":
        for each in psutil.Process().children():
            each.kill()
    elif victim in ("zygote", "launcher"):
        zygote = psutil.Process().parent()
        os.kill(zygote.pid if victim == "zygote" else zygote.ppid(), signal.SIGKILL)
        threading.Event().wait()  # this process ends with it
    else:
        os.kill(os.getpid(), signal.SIGSTOP if victim == "stopped" else signal.SIGKILL)


class Ended(NamedTuple):
    """How a run has ended: its hash, the kills that were reached, and the most often that a rank has taken a step."""

    digest: str
    struck: list[str]
    repeated: int


def carry_out(run: Run) -> Ended:
    """Carry out a run; AssertionError if ranks differ, or something is left behind."""
    before = footprint()
    with tempfile.TemporaryDirectory() as directory:
        body = partial(train, run=run, directory=directory)
        hang = {"hang_timeout_s": 6.0} if any(each.victim == "stopped" for each in run.plans) else {}
        digests = {*spawn(body, nprocs=run.ranks, backend="cpu", cores=1, max_restarts=len(run.plans), **hang)}
        assert len(digests) == 1, digests
        done = Path(directory, "done")
        struck = done.read_text().splitlines() if done.exists() else []
        counts = [Path(directory, f"steps-{rank}").read_text().splitlines() for rank in range(run.ranks)]
        assert not list(Path(directory).glob("checkpoints/*")), "a run that has ended well saves nothing"
    left = leaks(before, footprint())
    assert not left, left
    steps = EPOCHS * -(-ROWS // (BATCH * VIRTUAL))
    return Ended(digests.pop(), struck, max(len(each) for each in counts) - steps)


def check(seed: int, expected: str) -> Ended:
    """Carry out the run of a seed; AssertionError if it does not end as an undisturbed one."""
    ended = carry_out(Run.drawn(seed))
    assert ended.digest == expected, f"seed {seed}: another hash"
    assert 0 <= ended.repeated <= len(ended.struck), f"seed {seed}: {ended.repeated} steps repeated"
    return ended


def undisturbed() -> str:
    """The hash of a run in which nothing is killed; the same for each number of ranks and each strategy."""
    return carry_out(Run("ddp", 1, 1, ())).digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="first:last")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    expected, kills, failed = undisturbed(), 0, 0
    for seed in range(first, last):
        try:
            ended = check(seed, expected)
        except (AssertionError, UnisonoError, OSError, RuntimeError) as error:
            failed += 1
            print(f"{seed}: FAILED {type(error).__name__}: {error}; {Run.drawn(seed)}", flush=True)
            continue
        kills += len(ended.struck)
        print(f"{seed}: {Run.drawn(seed)[:3]} {ended.struck}, {ended.repeated} steps repeated", flush=True)
    print(f"{last - first} runs, {kills} kills, {failed} failed")


if __name__ == "__main__":
    main()
