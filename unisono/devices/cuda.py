"""The CUDA family: like any accelerator, plus captures of graphs.

*Threads:* others than the main one ask for events and for memory. If any thread is capturing a graph, the driver then
ends the capture, unless the asking thread has declared that only its own captures matter to it.

Counting devices uses NVML through torch and does not initialise CUDA, so a parent process may count and fork later.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from unisono.devices.accelerator import AcceleratorBackend

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, and hipStreamCaptureModeThreadLocal


class CudaBackend(AcceleratorBackend):
    name = "cuda"

    def unavailable_reason(self) -> str:
        return "" if torch.backends.cuda.is_built() or torch.version.hip else "this torch is built without CUDA"

    def unused_hardware(self) -> str:
        return describe_mig() if self.is_available() else ""

    def activate(self, device: torch.device) -> None:
        try:
            super().activate(device)
        except RuntimeError as error:
            if advice := describe_mig():
                error.add_note(advice)
            raise
        if threading.current_thread() is not threading.main_thread() and (exchange := _exchange_capture_mode()):
            # From now on nothing in this thread ends a graph capture in another one.
            exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def repeat_kernels(self) -> None:
        # Before the first product of matrices, which allocates the workspace: of this size cuBLAS repeats its bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False  # it chooses the convolutions that were fastest at the moment
        super().repeat_kernels()

    def may_record(self) -> bool:
        # In a graph, an event would be replayed.
        return super().may_record() and not torch.cuda.is_current_stream_capturing()


def describe_mig() -> str:
    """How MIG divides the GPUs of this machine into instances (CUDA shows a process only one of them), and the way out;
    "" where no GPU is divided, or nvidia-smi is missing."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    if not (count := listed.count("UUID: MIG-")):
        return ""
    return (
        f"MIG divides the GPUs here into {count} instances, and CUDA shows a process only one: start one rank "
        "(nprocs=1); or let a launcher give each rank CUDA_VISIBLE_DEVICES=MIG-..., a name that nvidia-smi -L prints, "
        "as SLURM and Kubernetes do; or switch MIG off (nvidia-smi -mig 0)"
    )


@cache
def _exchange_capture_mode() -> Any:
    """The function of the driver's library, or of ROCm's runtime; None if it has another name, as on other systems."""
    hip = torch.version.hip
    names = ["libcuda.so.1"] if hip is None else ["libamdhip64.so", f"libamdhip64.so.{hip.split('.')[0]}"]
    for name in names:
        with suppress(OSError):
            # As torch has loaded it: a second copy of a runtime would have its own state.
            library = ctypes.CDLL(name, ctypes.DEFAULT_MODE if hip is None else os.RTLD_NOLOAD)
            return getattr(library, f"{'cu' if hip is None else 'hip'}ThreadExchangeStreamCaptureMode")
    return None


backend_class = CudaBackend
