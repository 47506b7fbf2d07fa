"""The CPU family. Its devices are logical: `cpu:0 .. cpu:n-1` are the same memory and the same cores.

n is `CPU_NUM_DEVICES` (1 if it is unset), a name that PyTorch/XLA uses, too; a program that names more devices
explicitly gets them. A tensor sent to `cpu:1` reports `cpu`, so a tensor's device must not be used as a key.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from unisono.protocols import Backend, Feature, Transport
from unisono.tree import map_objects, tensors


def logical_devices() -> int:
    """The number that the environment asks for, else 1. ValueError if it is not a number of at least 1."""
    text = os.environ.get("CPU_NUM_DEVICES", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"CPU_NUM_DEVICES={text!r} in the environment; it must be an integer of at least 1")
    return int(text)


def processor() -> str:
    """The model of the processor; "" if the machine does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


_is_here = attrgetter("is_cpu")


class CpuBackend(Backend):
    name = "cpu"
    moves_in_background = False

    def is_available(self) -> bool:
        return True

    def is_accelerated(self) -> bool:
        return False

    def device_name(self, device: torch.device) -> str:
        # The model alone is not enough: torch picks its kernels by what the processor can compute at once.
        return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"

    def device_count(self) -> int:
        return logical_devices()

    def device(self, index: int) -> torch.device:
        if index < 0:
            raise ValueError(f"device cpu:{index} does not exist: indices start at 0")
        return torch.device("cpu", index)

    def process_transport(self) -> Transport:
        return "torch"

    def unsupported_reason(self, feature: Feature) -> str | None:
        return None if feature in ("process_group", "virtual_ranks") else super().unsupported_reason(feature)

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        if all(map(_is_here, tensors(batch))):
            return batch, None
        # Not `to(device)`: with the index of cpu:1, that would copy a tensor that is already in the right memory.
        return map_objects(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch), None

    def wait_ready(self, token: Any) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        pass

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)

    def seeded_state(self, seed: int, device: torch.device) -> torch.Tensor | None:
        return None

    def memory(self, device: torch.device) -> int:
        return int(psutil.Process().memory_info().rss)


backend_class = CpuBackend
