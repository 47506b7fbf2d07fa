"""A script of the form of Accelerate's examples/nlp_example.py, whose loader, schedule, loop and metric are used so."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from parts_nlp import Metric, get_linear_schedule_with_warmup, load_dataset, make_model, tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader

from unisono.compat.accelerate import Accelerator, DistributedType
from unisono.compat.accelerate.utils import set_seed

EVAL_BATCH_SIZE = 32


def get_dataloaders(accelerator: Accelerator, batch_size: int) -> tuple[Any, Any]:
    with accelerator.main_process_first():
        train, validation = (
            [
                {**tokenizer(each["sentence1"], each["sentence2"], truncation=True, max_length=None), **label}
                for each in load_dataset(count, seed)
                for label in [{"labels": each["labels"]}]
            ]
            for count, seed in ((192, 0), (75, 1))
        )

    def collate_fn(examples: Any) -> Any:
        max_length = 128 if accelerator.distributed_type == DistributedType.XLA else None
        if accelerator.mixed_precision == "fp8":
            pad_to_multiple_of = 16
        elif accelerator.mixed_precision != "no":
            pad_to_multiple_of = 8
        else:
            pad_to_multiple_of = None
        return tokenizer.pad(
            examples,
            padding="longest",
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            return_tensors="pt",
        )

    train_dataloader: Any = DataLoader(
        train,  # type: ignore[arg-type]
        shuffle=True,
        collate_fn=collate_fn,
        batch_size=batch_size,
        drop_last=True,
    )
    eval_dataloader: Any = DataLoader(
        validation,  # type: ignore[arg-type]
        shuffle=False,
        collate_fn=collate_fn,
        batch_size=EVAL_BATCH_SIZE,
        drop_last=(accelerator.mixed_precision == "fp8"),
    )
    return train_dataloader, eval_dataloader


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    num_epochs, batch_size = int(config["num_epochs"]), int(config["batch_size"])
    metric = Metric()
    gradient_accumulation_steps = 1
    if batch_size > args.max_batch_size and accelerator.distributed_type != DistributedType.XLA:
        gradient_accumulation_steps = batch_size // args.max_batch_size
        batch_size = args.max_batch_size

    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = make_model()
    model = model.to(accelerator.device)
    optimizer: Any = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=config["num_warmup_steps"],
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)

        eval_metric = metric.compute()
        accelerator.print(f"epoch {epoch}:", eval_metric)
        accelerator.print(f"rate {epoch}:", f"{lr_scheduler.get_last_lr()[0]:.6f}")
    weights = accelerator.get_state_dict(model)
    accelerator.print("norms:", *(f"{each.float().norm().item():.4f}" for each in weights.values()))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_batch_size", type=int, default=16)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    args = parser.parse_args()
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, **vars(args)}
    training_function(config, args)


if __name__ == "__main__":
    main()
