"""Lightning: a LightningModule by the Trainer, with strategy "ddp"."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


ranks = int(os.environ.get("WORLD_SIZE", "1"))
lightning.seed_everything(0)
model = Regression()
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(rows, 8 // ranks))
if trainer.global_rank == 0:
    weights = float(sum(each.detach().double().sum() for each in model.parameters()))
    print("loss", float(trainer.callback_metrics["loss"]), weights, trainer.world_size)
