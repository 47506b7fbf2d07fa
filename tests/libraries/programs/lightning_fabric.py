"""Lightning Fabric: a loop of one's own, with strategy "ddp"."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

ranks = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(0)
fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
fabric.launch()
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
loader = fabric.setup_dataloaders(DataLoader(rows, 8 // ranks))
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        fabric.backward(loss)
        optimizer.step()
fabric.barrier()
mean = float(fabric.all_reduce(loss.detach(), reduce_op="mean"))
fabric.print("loss", mean, float(sum(each.detach().double().sum() for each in model.parameters())), fabric.world_size)
