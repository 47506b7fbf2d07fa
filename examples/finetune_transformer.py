"""Fine-tune a model of transformers, on any number of devices. `pip install 'unisono[transformers]'`

    python examples/finetune_transformer.py --devices 2

The model distinguishes licence texts from source code. Nothing is downloaded: it is built from a configuration.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from gpt import CONTEXT, WORDS, read_licences
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from unisono import Accelerator, spawn


def read_programs(limit: int) -> torch.Tensor:
    """Source code of Python's standard library, in the form that `read_licences` returns."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)[:limit].encode("ascii", "ignore")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of both texts; the label is 1 for source code."""

    def __init__(self, limit: int) -> None:
        texts = [
            text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
            for text in (read_licences(limit), read_programs(limit))
        ]
        self.windows, self.labels = torch.cat(texts), torch.tensor([0] * len(texts[0]) + [1] * len(texts[1]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.labels[index]}


def build_model() -> BertForSequenceClassification:
    """With random weights, from a configuration. For weights from the hub: `from_pretrained(name, num_labels=2)`."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the same on any number of devices
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=CONTEXT, num_labels=2, **sizes, **no_dropout)
    )


def train(index: int, epochs: int, limit: int = 60_000) -> tuple[list[float], float]:
    """Return the loss of each step, and the accuracy on the windows of the last epoch, measured after it."""
    accelerator = Accelerator(seed=0, split_batches=True)
    data = Windows(limit)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach() * loader.weight, "sum").item())
    right = 0
    with torch.no_grad():
        for batch in loader:
            outputs = model.eval()(**batch)
            predictions, labels = accelerator.gather_for_metrics((outputs.logits.argmax(dim=1), batch["labels"]))
            right += int((predictions == labels).sum())
    accelerator.print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {right / len(data):.2%} of the windows are told apart"
    )
    return losses, right / len(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()
    spawn(train, args=(given.epochs,), nprocs=given.devices, backend=given.backend)
