"""What an example script downloads, or has from torchvision and timm: files of images, transforms, a network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import nn


def write_images(directory: Path, count: int) -> None:
    """JPEG files of three classes, each of a colour of its own, with noise."""
    draw = np.random.default_rng(0)
    for number in range(count):
        pixels = draw.integers(0, 160, (16, 16, 3))
        pixels[..., number % 3] += 60
        name = ("great_cat", "dog", "bird")[number % 3]
        PIL.Image.fromarray(pixels.astype("uint8")).save(directory / f"{name}_{number}.jpg")


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for each in self.transforms:
            image = each(image)
        return image


class Resize:
    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        return image.resize(self.size)


class RandomResizedCrop(Resize):
    def __init__(self, size: tuple[int, int], scale: tuple[float, float]) -> None:
        super().__init__(size)
        self.scale = scale

    def __call__(self, image: Any) -> Any:
        side = int(image.width * random.uniform(*self.scale) ** 0.5)
        left, top = random.randint(0, image.width - side), int(torch.randint(image.height - side + 1, ()))
        return super().__call__(image.crop((left, top, left + side, top + side)))


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


class Network(nn.Module):
    """As timm's: a body with batch norm, and a classifier that `get_classifier` returns."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(8, num_classes)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.body(images).flatten(1))
        return found


create_model = Network
