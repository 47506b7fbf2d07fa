"""ResNet-50 (He et al. 2016, stride in the 3 x 3 convolution), so that the check needs no torchvision."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks
_EXPANSION = 4


def resnet50(classes: int = 1000) -> nn.Module:
    """Takes images of shape (batch, 3, height, width), and returns logits of shape (batch, classes)."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for width, blocks in _STAGES:
        for block in range(blocks):
            layers.append(_Bottleneck(channels, width, stride=2 if block == 0 and width > 64 else 1))
            channels = width * _EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of 3 x size x size from one block of memory, so that reading them costs little."""

    def __init__(self, count: int, size: int = 224) -> None:
        self._count = count
        self._images = torch.randn(256, 3, size, size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index % len(self._images)], index % 1000


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, width * _EXPANSION, 1),
        )
        is_same = channels == width * _EXPANSION
        self.shortcut = (
            nn.Identity() if is_same else nn.Sequential(*_convolution(channels, width * _EXPANSION, 1, stride))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(inputs) + self.shortcut(inputs))


def _convolution(channels: int, width: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(width)
