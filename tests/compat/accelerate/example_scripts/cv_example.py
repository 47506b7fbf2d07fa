"""A script of the form of Accelerate's examples/cv_example.py: files of images, a frozen body, OneCycleLR."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import numpy as np
import PIL.Image
import torch
from parts_cv import Compose, RandomResizedCrop, Resize, ToTensor, create_model
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from unisono.compat.accelerate import Accelerator
from unisono.compat.accelerate.utils import set_seed


def extract_label(fname: str) -> str:
    found = re.search(r"^(.*)_\d+\.jpg$", fname.split(os.path.sep)[-1])
    assert found is not None
    return found.groups()[0]


class PetsDataset(Dataset[dict[str, Any]]):
    def __init__(self, file_names: list[str], image_transform: Any, label_to_id: dict[str, int]) -> None:
        self.file_names, self.image_transform, self.label_to_id = file_names, image_transform, label_to_id

    def __len__(self) -> int:
        return len(self.file_names)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        fname = self.file_names[idx]
        image = self.image_transform(PIL.Image.open(fname).convert("RGB"))
        return {"image": image, "label": self.label_to_id[extract_label(fname)]}


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, batch_size = config["lr"], int(config["num_epochs"]), int(config["batch_size"])
    image_size = (config["image_size"],) * 2
    names = sorted(os.listdir(args.data_dir))
    file_names = [os.path.join(args.data_dir, fname) for fname in names if fname.endswith(".jpg")]
    label_to_id = {label: number for number, label in enumerate(sorted({extract_label(each) for each in file_names}))}

    set_seed(int(config["seed"]))
    random_perm = np.random.permutation(len(file_names))
    cut = int(0.8 * len(file_names))
    train_tfm = Compose([RandomResizedCrop(image_size, scale=(0.5, 1.0)), ToTensor()])
    train_dataset = PetsDataset([file_names[i] for i in random_perm[:cut]], train_tfm, label_to_id)
    eval_tfm = Compose([Resize(image_size), ToTensor()])
    eval_dataset = PetsDataset([file_names[i] for i in random_perm[cut:]], eval_tfm, label_to_id)
    train_dataloader: Any = DataLoader(train_dataset, shuffle=True, batch_size=batch_size, num_workers=args.workers)
    eval_dataloader: Any = DataLoader(eval_dataset, shuffle=False, batch_size=batch_size, num_workers=args.workers)

    model: Any = create_model(num_classes=len(label_to_id))
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    mean = torch.tensor(model.default_cfg["mean"])[None, :, None, None].to(accelerator.device)
    std = torch.tensor(model.default_cfg["std"])[None, :, None, None].to(accelerator.device)

    optimizer: Any = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler: Any = OneCycleLR(
        optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate: Any = 0
        num_elems = 0
        for batch in eval_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()

        eval_metric = accurate.item() / num_elems
        accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f} of {num_elems}")
        accelerator.print(f"rate {epoch}:", f"{lr_scheduler.get_last_lr()[0]:.6f}")
    weights = accelerator.get_state_dict(model)
    accelerator.print("norms:", *(f"{each.float().norm().item():.4f}" for each in weights.values()))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    config = {"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": args.batch_size, "image_size": 12}
    training_function(config, args)


if __name__ == "__main__":
    main()
