"""An accelerator with four devices, for tests: `torch.toy`, which is loaded with torch, as extensions of it are.

It is there where this folder is in PYTHONPATH. What is native is compiled at its first use.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

COUNT = 4
_is_up = _is_forked = False


def library() -> Path:
    """The native part, which is compiled once for each torch."""
    import torch

    source = Path(__file__).with_name("toy.cpp")
    name = sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    found = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / f"unisono-toy-{name}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        place = Path(torch.__file__).parent
        headers = [f"-I{place}/include", f"-I{place}/include/torch/csrc/api/include"]
        part = found.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", *headers, str(source), "-o", str(part)]
        subprocess.run([*command, f"-L{place}/lib", "-lc10", "-ltorch_cpu"], check=True)
        part.rename(found)
    return found


def load() -> None:
    """What torch calls at the end of its import."""
    import torch

    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", sys.modules[__name__])
    with _quiet():  # torch has kernels for the collectives, which these replace
        torch.ops.load_library(str(library()))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend("toycl", _make_group, devices=["toy"])
    os.register_at_fork(after_in_child=_notice_fork)


@contextmanager
def _quiet() -> Iterator[None]:
    """What native code writes to stderr in the block is dropped."""
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A part of a group that nobody asks: the operators take the part for main memory, "cpu:gloo,toy:toycl"."""
    import torch

    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


class device:  # noqa: N801 - as in torch.cuda
    """The context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        import torch

        self._before = current_device()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error: object) -> None:
        import torch

        torch.accelerator.set_device_index(self._before)


def _notice_fork() -> None:
    global _is_forked
    _is_forked = _is_up


def _lazy_init() -> None:
    global _is_up
    if _is_forked:
        raise RuntimeError("toy cannot be used in a process that was forked from one that uses it")
    _is_up = True


def _is_in_bad_fork() -> bool:
    return _is_forked


def is_initialized() -> bool:
    return _is_up


def is_available() -> bool:
    return True


def device_count() -> int:
    return COUNT


def current_device() -> int:
    return int(_ops().current_device())


def current_stream(device: Any = None) -> Any:
    import torch

    return torch.accelerator.current_stream(device)


def Stream(device: Any = "toy", priority: int = 0) -> Any:  # noqa: N802 - as torch.cuda has it
    import torch

    return torch.Stream(device, priority=priority)


def Event(enable_timing: bool = False) -> Any:  # noqa: N802
    import torch

    return torch.Event("toy", enable_timing=enable_timing)


def stream(stream: Any) -> Any:
    """A context; a stream is one by itself."""
    return stream


def get_amp_supported_dtype() -> list[Any]:
    import torch

    return [torch.bfloat16, torch.float16]


def manual_seed_all(seed: int) -> None:
    _ops().seed((seed + (1 << 63)) % (1 << 64) - (1 << 63))  # an operator's integers are signed


def get_rng_state(device: Any = "toy") -> Any:
    return _ops().get_state(_index(device))


def set_rng_state(state: Any, device: Any = "toy") -> None:
    _ops().set_state(_index(device), state)


def memory_allocated(device: Any = "toy") -> int:
    return int(_ops().memory_allocated(_index(device)))


def max_memory_allocated(device: Any = "toy") -> int:
    return int(_ops().max_memory_allocated(_index(device)))


def violations() -> int:
    """How often memory was freed that another stream still used, without a record of it."""
    return int(_ops().violations())


def _index(device: Any) -> int:
    import torch

    index = torch.device(device).index
    return current_device() if index is None else index


def _ops() -> ModuleType:
    import torch

    return torch.ops.toy
