"""What families have in common: most members, for devices that compute immediately, by torch's own means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.backends import check_index
from unisono.protocols import DeviceClock, Feature, Transport


class UsualBackend:
    """The members of a `Backend` that a family need not define."""

    name: str
    device_count: Callable[[], int]
    moves_in_background = True
    moves_in_loop = False
    is_lazy = False

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device(self, index: int) -> torch.device:
        check_index(index, self.device_count(), self.name)
        return torch.device(self.name, index)

    def activate(self, device: torch.device) -> None:
        pass

    def start(self, device: torch.device) -> None:
        pass

    def unavailable_reason(self) -> str:
        return ""

    def unused_hardware(self) -> str:
        return ""

    def hardware(self) -> str:
        return self.name.upper()

    def is_accelerated(self) -> bool:
        return True

    def preload(self) -> None:
        pass

    def check_workers(self, count: int) -> None:
        self.device(count - 1)

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        device = self.device(local_rank)
        self.activate(device)
        return device

    def thread_transport(self, devices: Sequence[torch.device]) -> Transport:
        return "torch"

    def process_transport(self) -> Transport:
        return "torch"

    def mark(self, device: torch.device, tensors: Any = ()) -> Any:
        return None

    def is_reached(self, mark: Any) -> bool:
        return True

    def mark_step(self, device: torch.device) -> None:
        pass

    def clock(self, device: torch.device) -> DeviceClock | None:
        return None

    def peak_memory(self, device: torch.device) -> int:
        return 0

    def seeded_state(self, seed: int, device: torch.device) -> torch.Tensor | None:
        return torch.Generator(device).manual_seed(seed).get_state()

    def matmul_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    def set_matmul_precision(self, precision: str) -> None:
        if precision not in ("default", "highest", "high", "medium"):
            raise ValueError(f"precision={precision!r} does not exist; choose default, highest, high or medium")
        torch.set_float32_matmul_precision("highest" if precision == "default" else precision)

    def counters(self) -> dict[str, int]:
        return {}

    def spread(self) -> None:
        raise NotImplementedError(self.unsupported_reason("spmd"))

    def unsupported_reason(self, feature: Feature) -> str | None:
        if feature == "spmd":
            return "XLA's devices have it (device='xla:0', or UNISONO_BACKEND=xla); here take strategy='ddp'"
        return None
