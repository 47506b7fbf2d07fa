"""A small GPT on real text, the licences of the installed packages, with accumulation and clipping.

python examples/gpt.py --devices 2
"""

from __future__ import annotations

import argparse
from importlib.metadata import distributions
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Mean, is_rank_zero, spawn

CONTEXT = 64
WORDS = 128  # characters beyond ASCII are dropped


def read_licences(limit: int) -> torch.Tensor:
    """The licence texts of the installed packages, concatenated: one integer for each character."""
    texts: dict[str, None] = {}  # many packages have the same text
    for package in sorted(distributions(), key=lambda each: each.metadata["Name"].lower()):
        for file in package.files or []:
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                path = Path(file.locate())
                texts[path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""] = None
        if sum(map(len, texts)) >= limit:
            break
    text = "\n".join(texts)[:limit].encode("ascii", "ignore")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Block(nn.Module):
    """Causal self-attention, then a network for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.network(self.norms[1](x))
        return result


class GPT(nn.Module):
    """Logits (batch, positions, WORDS) of the next character, from characters (batch, positions)."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        self.scores = nn.Linear(width, WORDS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        result: torch.Tensor = self.scores(self.blocks(self.words(characters) + self.places(places)))
        return result


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int, device: torch.device) -> str:
    """The prompt, continued with the most likely characters."""
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        text = torch.cat([text, model(text[:, -CONTEXT:])[:, -1:].argmax(dim=-1)], dim=1)
    return bytes(text[0].tolist()).decode()


def train(index: int, epochs: int, limit: int = 200_000) -> list[float]:
    """Return the mean loss of each epoch, in nats per character."""
    accelerator = Accelerator(seed=0, split_batches=True, gradient_accumulation_steps=2, max_grad_norm=1.0)
    text = read_licences(limit)
    windows = TensorDataset(text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(windows, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader, mean = accelerator.prepare(model, optimizer, loader, Mean())
    losses = []
    for epoch in range(epochs):
        for (window,) in loader:
            scores = model(window[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean.update(loss, window)
        losses.append(mean.compute())
        mean.reset()
        accelerator.print(f"epoch {epoch}: {losses[-1]:.3f} nats per character")
    if is_rank_zero():
        print(write(accelerator.unwrap_model(model), "Permission is hereby ", 60, accelerator.device))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    spawn(train, args=(given.epochs,), nprocs=given.devices, backend=given.backend)
