"""Train on handwritten digits and resume: kill this script or one of its workers, or press Ctrl-C, and start it again.

    python examples/resume.py --devices 4 --directory runs/digits
    python examples/resume.py --devices 2 --directory runs/digits     # continues there, on two devices

On the same number of devices the resumed run has the same bits as one that was never stopped; on another number, it
sees the same samples. So it does on several machines that see one directory:

    python examples/resume.py --devices 16 --directory /shared/digits --engine slurm       # or ray
    python examples/resume.py --devices 16 --directory /shared/digits --engine node1,node2  # by SSH
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from train_digits import build_loaders

from unisono import Accelerator, should_stop, spawn, world_size
from unisono.engines import Hosts


def train(index: int, directory: Path, epochs: int) -> float:
    """Train, from the latest checkpoint if there is one. Return the accuracy on the test samples."""
    should_stop()  # from here on SIGTERM and Ctrl-C are requests
    accelerator = Accelerator(seed=0, project_dir=directory, total_limit=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, *build_loaders(world_size()))
    accelerator.load_state(must_exist=False)
    right = torch.zeros((), device=accelerator.device)
    for epoch in range(loader.epoch, epochs):
        for step, (images, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            if (is_over := should_stop()) or step % 5 == 0:
                accelerator.save_state(is_async=not is_over)
            if is_over:
                return 0.0
        accelerator.print(f"epoch {epoch} is done")
    for images, labels in test_loader:
        outputs, labels = accelerator.gather_for_metrics((model.eval()(images), labels))
        right += (outputs.argmax(1) == labels).sum()
    accelerator.end_training()
    return float(right) / 360


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; by itself an accelerator, where there is one")
    parser.add_argument("--engine", help="local, ray, slurm, or the names of hosts, between commas")
    given = parser.parse_args()
    ranks = {"nprocs": given.devices, "backend": given.backend, "max_restarts": 3}
    if given.engine is not None:
        ranks["engine"] = given.engine if given.engine in ("local", "ray", "slurm") else Hosts(given.engine.split(","))
    accuracy, *_ = spawn(train, args=(given.directory, given.epochs), **ranks)
    print(f"test accuracy {accuracy:.2%}")
