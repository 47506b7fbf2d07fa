"""Random kills of loops over each kind of data: `python tests/loader_kills.py --kind "stream of shards" --seeds 0:30`.

A run trains three epochs. In each of its lives but the last, something is killed after a random batch: a rank, all of
them, or the loader workers of one. The next life goes on from the last checkpoint, mostly on other numbers of ranks and
loader workers. Then each sample of each epoch was trained on once, and in the order of an undisturbed rank where the
kind promises one. Prints a line for each run, and a summary of each kind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
sys.path += [each for each in (str(TESTS),) if each not in sys.path]

import psutil  # noqa: E402
import torch  # noqa: E402
from leak_police import footprint, leaks  # noqa: E402
from loader_kinds import COUNT, KINDS, numbers_of  # noqa: E402
from torch import nn  # noqa: E402

from unisono import Accelerator, DeviceLoader, all_gather_samples, spawn, warm  # noqa: E402
from unisono.errors import WorkerDiedError  # noqa: E402

EPOCHS, RANKS, WORKERS = 3, (1, 2, 3), (0, 1, 2)
WORDS = "DataLoader worker"  # of the error where one was killed
PRELOADED = ("torch._dynamo", "unisono.accelerator", "torch.distributed.optim", "psutil")


class Life(NamedTuple):
    """A training from its checkpoint, if there is one, until the victim is killed after a batch of this life.

    Attributes:
        victim: "rank", "all ranks", the "loader workers" of a rank, or itself if it has none; "" for none.
        every: batches from one checkpoint to the next.
    """

    ranks: int
    workers: int
    victim: str = ""
    rank: int = 0
    batch: int = 0
    every: int = 1000

    @classmethod
    def drawn(cls, draw: random.Random) -> Life:
        ranks, workers = draw.choice(RANKS), draw.choice(WORKERS)
        victim = draw.choice(["rank", "rank", "all ranks", *["loader workers"] * (workers > 0)])
        rounds = EPOCHS * COUNT // (2 * ranks)
        return cls(ranks, workers, victim, draw.randrange(ranks), draw.randrange(1, rounds), draw.randrange(1, 5))


def drawn(seed: int) -> list[Life]:
    """The lives of a run."""
    draw = random.Random(seed)
    lives = [Life.drawn(draw) for _ in range(draw.choice([1, 2, 3]))]
    return [*lives, Life(draw.choice(RANKS), draw.choice(WORKERS))]


class Ledger:
    """Which samples were trained on, by epoch, in the order of the ranks."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = [[] for _ in range(EPOCHS)]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def train(rank: int, kind: str, folder: str, life: Life) -> list[list[int]]:
    """One life of a run; what is in the ledger at its end."""
    ledger, model = Ledger(), nn.Linear(1, 1)
    accelerator = Accelerator(seed=5, project_dir=Path(folder, "run"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DeviceLoader(KINDS[kind].make(folder, life.workers))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(ledger)
    accelerator.load_state(must_exist=False)
    count = 0
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            numbers = numbers_of(batch)
            optimizer.zero_grad()
            accelerator.backward(model(numbers[:, None] / COUNT).mean())
            optimizer.step()
            ledger.seen[epoch] += all_gather_samples(numbers, loader.valid_samples).tolist()
            count += 1
            if count % life.every == 0:
                accelerator.save_state()
            if life.victim and count == life.batch and rank == life.rank:
                _strike(life.victim)
    accelerator.end_training()
    return ledger.seen


def _strike(victim: str) -> None:
    me = psutil.Process()
    workers = [each for each in me.children() if each.name() == "pt_data_worker"]
    if victim == "loader workers" and workers:
        for each in workers:
            each.kill()
        return  # this rank learns of it, unless they have read all
    if victim == "all ranks":
        for each in me.parent().children():
            if each.pid != me.pid:
                each.kill()
    os.kill(me.pid, signal.SIGKILL)


def carry_out(kind: str, lives: list[Life], folder: str) -> tuple[list[list[int]], int]:
    """Live them, until one ends well: what was trained on, and the kills that were reached. AssertionError if a life
    ends otherwise, or leaves something."""
    before, kills = footprint(), 0
    for life in lives:
        KINDS[kind].tidy()
        body = partial(train, kind=kind, folder=folder, life=life)
        try:
            seen = spawn(body, nprocs=life.ranks, cores=1, backend="cpu", timeout=60.0, hang_timeout_s=50.0)[0]
        except (WorkerDiedError, RuntimeError) as error:
            is_of_loader = life.victim == "loader workers" and WORDS in str(error)
            if not life.victim or not (is_of_loader or type(error) is WorkerDiedError):
                error.add_note(f"in {life}")
                raise
            kills += 1
            continue
        break
    left = leaks(before, footprint())
    assert not left, left
    return seen, kills


def undisturbed(kind: str) -> list[list[int]]:
    """What one rank trains on that nobody kills."""
    with samples_of(kind) as folder:
        return carry_out(kind, [Life(1, 0)], folder)[0]


@contextlib.contextmanager
def samples_of(kind: str) -> Any:
    """A folder with the samples of that kind, for one run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        KINDS[kind].write(folder)
        yield folder


def check(kind: str, seed: int, expected: list[list[int]]) -> int:
    """Carry out the run of a seed; return its kills. AssertionError if a sample was not trained on once in each epoch,
    or the order is another one."""
    with samples_of(kind) as folder:
        seen, kills = carry_out(kind, drawn(seed), folder)
    assert [sorted({*each}) for each in seen] == [list(range(COUNT))] * EPOCHS, f"not each: {seen}"
    assert max(map(len, seen)) <= COUNT + KINDS[kind].repeats, f"not each once: {seen}"
    assert not KINDS[kind].keeps_order or seen == expected, f"another order: {seen}"
    return kills


def preload(kinds: list[str]) -> None:
    """Let the zygote import what these need."""
    warm(preload=(*PRELOADED, *{each for kind in kinds for each in KINDS[kind].needs}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", default="0:30", help="first:last")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    kinds = [each for each in given.kind or KINDS if not KINDS[each].lacks]
    preload(kinds)
    summary, all_failed = list[str](), 0
    for kind in kinds:
        expected, kills, failed, began = undisturbed(kind), 0, 0, time.monotonic()
        for seed in range(first, last):
            try:
                found = check(kind, seed, expected)
            except (AssertionError, RuntimeError, OSError, ValueError, LookupError, TypeError) as error:
                failed += 1
                said = "\n    ".join([f"FAILED {type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
                print(f"{kind} {seed}: {said}; {drawn(seed)}", flush=True)
                continue
            kills += found
            print(f"{kind} {seed}: {[each[:3] for each in drawn(seed)]}, {found} kills", flush=True)
        took_s = time.monotonic() - began
        summary.append(f"{kind}: {last - first} runs, {kills} kills, {failed} failed, {took_s:.0f} s")
        all_failed += failed
    print("", *summary, *[f"{each}: not installed" for each in KINDS if KINDS[each].lacks], sep="\n")
    return int(all_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
