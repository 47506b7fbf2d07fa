"""The TPU family, through TorchTPU (`torch_tpu`): eager, with one process per device. Written by reading its wheel, of
version 0.2.0; **not run on a TPU**.

The runtime of a process has one device, whatever its index. It starts with the first tensor, reads the variables of
`worker_environment`, and cannot be forked from then on. It orders work by what the work reads, without streams.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from unisono.devices.accelerator import AcceleratorBackend
from unisono.devices.movement import send
from unisono.errors import UnisonoError
from unisono.protocols import DeviceClock, Transport
from unisono.tree import map_objects

_LAUNCH = """
import json, os, sys, torch
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1]))
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}))
"""


class TpuBackend(AcceleratorBackend):
    name = "tpu"

    def unavailable_reason(self) -> str:
        if importlib.util.find_spec("torch_tpu") is None:
            return "torch_tpu is not installed: pip install torch_tpu"
        return "" if self.is_available() else "torch_tpu finds no chip"

    def activate(self, device: torch.device) -> None:
        own = torch.accelerator.current_device_index()
        if device.index != own:
            raise ValueError(f"{device} belongs to another process: this one computes on tpu:{own}; use spawn")

    def worker_environment(self, count: int) -> dict[str, str]:
        """What `set_tpu_launch_env` sets, determined in another process: it never replaces a value, and this process
        may later start a different number of workers."""
        command = [sys.executable, "-P", "-c", _LAUNCH, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnisonoError(
                f"torch_tpu cannot prepare {count} workers: {done.stderr.strip().rpartition(chr(10))[2]}"
            )
        variables: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return variables

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        return torch.device(self.name, torch.accelerator.current_device_index())

    def thread_transport(self, devices: Sequence[torch.device]) -> Transport:
        if len(devices) > 1:
            raise UnisonoError("torch_tpu computes on one device per process, which threads cannot share; use spawn")
        return "torch"

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        return map_objects(lambda leaf: send(leaf, device), batch), None

    def wait_ready(self, token: Any) -> None:
        pass

    def mark(self, device: torch.device, tensors: Any = ()) -> Any:
        return None

    def is_reached(self, mark: Any) -> bool:
        return True

    def clock(self, device: torch.device) -> DeviceClock | None:
        return None  # events are timed by the host


backend_class = TpuBackend
