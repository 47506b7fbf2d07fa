"""What virtual ranks cost on CPUs, by the time of an epoch: as many as ranks, against none; and four on each of two
ranks, against the accumulation of four microbatches; and what digests cost in a run that is recorded, and witnesses.
And the time with balance, of ranks whose devices take 20 and 60 ms longer for a batch, against that of the ideal
split, and of the equal one.

    python bench/virtual_ranks.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from blocks import interleave, options, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, Virtual, spawn
from unisono.batches.virtual_ranks import rebalanced
from unisono.loading import balance

DEVICES = ("cpu",)
RANKS, BATCH, DIGESTED = 2, 32, 250
PAUSES = (0.02, 0.06)


def network(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    if kind == "MLP, 1.1 M parameters":
        return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)), (
            512,
        )
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (3, 32, 32)


def train(rank: int, kind: str, batches: int, pauses: Sequence[float] = (), ideal: bool = False, **given: Any) -> float:
    """Seconds of an epoch of so many batches on each rank, the second one.

    Args:
        pauses: of each rank, seconds by which a batch takes longer: a wait, since the processor has other work.
        ideal: whether the ranks know that.
    """
    torch.set_num_threads(1)
    if ideal:
        balance.rebalanced = lambda virtual, _: rebalanced(virtual, pauses)  # type: ignore[assignment,attr-defined]
        balance.ROUNDS = 1
    accelerator = Accelerator(seed=0, **given)
    model, shape = network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    count = batches * RANKS * BATCH
    rows = TensorDataset(torch.randn(count, *shape), torch.randint(10, (count,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH))
    for _ in range(2):
        began = time.perf_counter()
        for inputs, targets in loader:
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            if pauses:
                time.sleep(pauses[rank])
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - began


def cost(kind: str, batches: int, log_dir: str | None = None, **given: Any) -> float:
    body = partial(train, kind=kind, batches=batches, **given)
    return max(map(float, spawn(body, nprocs=RANKS, backend="cpu", cores=1, output=Output(log_dir))))


def main() -> None:
    given = options(__doc__, DEVICES, 12, batches=64)
    for kind in ("MLP, 1.1 M parameters", "CNN with BatchNorm"):
        cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (f"{RANKS} virtual ranks on {RANKS} ranks", {"virtual_ranks": RANKS}, {}),
            (
                f"{4 * RANKS} virtual ranks on {RANKS} ranks",
                {"virtual_ranks": 4 * RANKS},
                {"gradient_accumulation_steps": 4},
            ),
        ]
        for case, ours, theirs in cases:
            variants = {"virtual ranks": ours, "none" if not theirs else "accumulation of 4": theirs}
            runs = {name: partial(cost, kind, given.batches, **each) for name, each in variants.items()}
            show(f"{case}, {kind}", interleave(runs, given.blocks))
        with TemporaryDirectory() as directory:
            digested = partial(cost, kind, DIGESTED, directory, virtual_ranks=RANKS)
            runs = {"digests": digested, "no digests": partial(digested, digest_every=0)}
            show(f"digests of each 100th step and the last of {DIGESTED}, {kind}", interleave(runs, given.blocks))
        plain = partial(cost, kind, DIGESTED)
        virtual = {f"witness_every={every}": Virtual(RANKS, witness_every=every or None) for every in (100, 10, 0)}
        runs = {name: partial(plain, virtual_ranks=each) for name, each in virtual.items()}
        last = [*virtual][-1]
        show(f"witnesses, {kind}", interleave(runs, given.blocks), [(each, last) for each in virtual if each != last])
        slowed = partial(cost, kind, 100, pauses=PAUSES, virtual_ranks=Virtual(4 * RANKS, balance=True))
        runs = {
            "balance": slowed,
            "equal": partial(slowed, virtual_ranks=4 * RANKS),
            "ideal": partial(slowed, ideal=True),
        }
        show(
            f"batches that take {PAUSES} s longer, {kind}",
            interleave(runs, given.blocks),
            [("balance", "ideal"), ("balance", "equal")],
        )


if __name__ == "__main__":
    main()
