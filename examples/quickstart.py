"""The script of docs/quickstart.md after all of its changes: checkpoints, TensorBoard, a report."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Accuracy, Mean, gather_report


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points on three spirals, and the number of the spiral of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 5 * radius + labels * 2 * torch.pi / 3 + 0.1 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


accelerator = Accelerator(seed=0, split_batches=True, project_dir="runs/spirals", total_limit=2, log_with="tensorboard")
accelerator.init_trackers("spirals", config={"lr": 0.01})
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(spirals(1500, seed=0), batch_size=100, shuffle=True)
test_loader = DataLoader(spirals(500, seed=1), batch_size=100)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
mean, accuracy = accelerator.prepare(Mean(), Accuracy())
accelerator.load_state(must_exist=False)  # the latest checkpoint, if there is one

for epoch in range(loader.epoch, 8):
    for points, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        mean.update(loss, labels)
    accelerator.print(f"epoch {epoch}: loss {mean.compute():.4f}")
    accelerator.log({"loss": mean.compute()}, step=epoch)
    mean.reset()
    accelerator.save_state()

with torch.no_grad():
    for points, labels in test_loader:
        accuracy.update(model(points), labels)
accelerator.print(f"{accuracy.compute():.1%} of the test points are right")
accelerator.end_training()
report = gather_report()  # on every rank
if report is not None:  # on rank zero
    report.print()
