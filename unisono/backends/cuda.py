"""The CUDA family: as any accelerator, and captures of graphs.

*Threads:* those other than the main one ask for events and for memory. While any thread captures a graph, the driver
ends the capture then, unless the asking thread has declared that only its own captures matter to it.

Counting devices uses NVML through torch and does not initialise CUDA, so a parent process may count and fork later.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress

import torch

from unisono.backends.accelerator import AcceleratorBackend

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaBackend(AcceleratorBackend):
    name = "cuda"

    def unavailable_reason(self) -> str:
        return "" if torch.backends.cuda.is_built() or torch.version.hip else "this torch is built without CUDA"

    def activate(self, device: torch.device) -> None:
        super().activate(device)
        if threading.current_thread() is not threading.main_thread():
            _leave_captures_alone()

    def may_record(self) -> bool:
        # In a graph, an event would be replayed.
        return super().may_record() and not torch.cuda.is_current_stream_capturing()


def _leave_captures_alone() -> None:
    """Ensure that nothing in the calling thread ends a graph capture in another thread."""
    with suppress(OSError):  # on other systems, the driver's library has another name
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


backend_class = CudaBackend
