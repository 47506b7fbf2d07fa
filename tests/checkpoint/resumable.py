"""A training with dropout and loader workers that can be left at any step and resumed: what the tests here run.

Each sample of an epoch has a number, which goes into a ledger that is saved with the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from unisono import Accelerator, all_gather_samples, current_world, world_size
from unisono.strategies import FSDP

SAMPLES, GLOBAL_BATCH, EPOCHS = 90, 24, 2
ROUNDS = 4  # in an epoch, the last of 18 samples


class Points(Dataset):
    """Augmented at random, by the generators that loader workers seed for each sample."""

    def __init__(self, augments: bool) -> None:
        self.augments = augments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        point = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        target = point.sum().sin().unsqueeze(0)
        return point + 0.01 * torch.rand(6) if self.augments else point, target, torch.tensor(index)


class Ledger:
    """Which samples were trained on, by epoch, and the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.losses: list[float] = []

    def note(self, epoch: int, numbers: torch.Tensor, loss: torch.Tensor, valid: int) -> None:
        """A batch was trained on, of which so many samples count."""
        seen = all_gather_samples(numbers, valid)
        weighed = torch.tensor([float(loss) * valid, valid], dtype=torch.float64)
        total = sum(current_world().comm.all_gather(weighed))
        self.seen[epoch] += seen.tolist()
        self.losses.append(float(total[0] / total[1]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen], "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.losses = state["seen"], state["losses"]


@dataclass
class Run:
    """One training, from its checkpoint on, if there is one.

    Attributes:
        path: of the checkpoints.
        strategy: of the Accelerator.
        dropout: its probability.
        accumulates: microbatches per step.
        workers: loader workers.
        after: called after each batch that was trained on, with the Accelerator and the number of batches so far; it
            may save, die, or return True to leave.
    """

    path: Path
    strategy: str | FSDP = "ddp"
    dropout: float = 0.0
    accumulates: int = 1
    workers: int = 0
    after: Callable[[Accelerator, int], bool | None] = lambda *_: None

    def __call__(self) -> tuple[torch.Tensor, Ledger]:
        """Train to the end; the weights on rank zero, and the ledger."""
        torch.manual_seed(3)
        ledger = Ledger()
        accelerator = Accelerator(
            strategy=self.strategy, seed=5, gradient_accumulation_steps=self.accumulates, project_dir=self.path
        )
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, 1)
        )
        if not self.dropout:
            model[1] = nn.Identity()  # which sees the rank's samples alone
        optimizer = torch.optim.AdamW(model.double().parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        data = Points(bool(self.workers))
        loader = DataLoader(data, GLOBAL_BATCH // world_size(), shuffle=True, num_workers=self.workers)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        accelerator.register_for_checkpointing(ledger)
        accelerator.load_state(must_exist=False)
        count = 0
        for epoch in range(loader.epoch, EPOCHS):
            for points, targets, numbers in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(points), targets)
                accelerator.backward(loss)
                optimizer.step()
                ledger.note(epoch, numbers, loss.detach(), loader.valid_samples)
                count += 1
                if self.after(accelerator, count):
                    accelerator.end_training()
                    return weights_of(accelerator, model), ledger
            schedule.step()
        accelerator.end_training()
        return weights_of(accelerator, model), ledger


def weights_of(accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    """On rank zero, in one row."""
    state = accelerator.state_dict(model) or {}
    return torch.cat([each.double().flatten() for each in state.values()] or [torch.zeros(0)])


def assert_each_once(ledger: Ledger, epochs: int = EPOCHS) -> None:
    """Each sample of each epoch was trained on once."""
    assert [sorted(each) for each in ledger.seen[:epochs]] == [list(range(SAMPLES))] * epochs


def drawn_batch() -> int:
    """In the midst of an epoch: another one for each seed of pytest, which `--randomly-seed` sets."""
    drawn = random.choice([number for number in range(1, EPOCHS * ROUNDS) if number % ROUNDS])
    print(f"the run ends behind batch {drawn}")
    return drawn


def leave_after(batches: int, is_async: bool = False) -> Callable[[Accelerator, int], bool]:
    """Save behind that batch, and leave."""

    def after(accelerator: Accelerator, count: int) -> bool:
        if count == batches:
            accelerator.save_state(is_async=is_async)
        return count == batches

    return after


class Anything:
    """Has whatever state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def filled(value: float, features: int = 1) -> nn.Linear:
    """A model whose parameters have that value."""
    model = nn.Linear(2, features)
    for each in model.parameters():
        nn.init.constant_(each, value)
    return model
