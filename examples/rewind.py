"""Go back by a step when the loss is not finite, and skip the batch: a row of the data is broken.

    python examples/rewind.py --devices 2

A loss of NaN may come from the batch, or from weights that the last step has broken; going back is right for both.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, spawn

BROKEN = 321


def train(index: int) -> tuple[int, float]:
    """Return how often the run went back, and the last loss."""
    accelerator = Accelerator(seed=0, snapshot_every=1, snapshots=2)
    rows = torch.randn(640, 8)
    targets = rows.norm(dim=1, keepdim=True)
    targets[BROKEN] = torch.inf
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(rows, targets), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    went_back, last = 0, 0.0
    for _ in range(4):
        for inputs, wanted in loader:
            loss = F.mse_loss(model(inputs), wanted)
            shared = accelerator.reduce(loss.detach(), "mean")  # the same on all ranks, which decide alike
            if not shared.isfinite():
                accelerator.print(f"back to step {accelerator.rewind().step}")
                went_back += 1
                continue
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            last = shared.item()
    return went_back, last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    given = parser.parse_args()
    (went_back, loss), *_ = spawn(train, nprocs=given.devices, backend=given.backend)
    print(f"went back {went_back} times; the last loss is {loss:.3f}")
