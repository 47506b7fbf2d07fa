"""How the runtime of torch_xla is found and started: its hardware, its settings, and what it refuses.

It reads its settings at its first use: they are put into the environment here, and those that come too late, or that
would change the results silently, are errors.

*Threads:* any; one at a time loads torch_xla.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from functools import cache
from typing import Any

import torch

from unisono.devices.cpu import logical_devices
from unisono.errors import UnisonoError

CPU, TPU = "CPU", "TPU"  # values of PJRT_DEVICE

_SETTINGS = {
    # Otherwise a pool thread that has launched one device's collective makes another device wait for it.
    "PJRT_CPU_ASYNC_CLIENT": "0",
    # Each collective occupies a thread of the pool until all devices have joined it.
    "XLA_THREAD_POOL_SIZE": "64",
    # Otherwise 0 and 1 become constants of the graph, so that a factor's value decides whether it is recompiled.
    "XLA_NO_SPECIAL_SCALARS": "1",
    # Otherwise a tensor's copy shares its buffer, which is freed when the copy is modified in place.
    "XLA_ENABLE_PARAM_ALIASING": "0",
}
"""What virtual devices on the CPU need, with the reasons; valid for torch_xla 2.9."""

_NARROWING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16", "XLA_USE_32BIT_LONG")
"""Modes that keep the dtype's name but not its precision."""


def load_torch_xla() -> Any:
    if reason := missing_reason():
        raise UnisonoError(f"XLA devices cannot be used: {reason}")
    # Taken before they are set below: a runtime that is running already has not read them.
    lacking = [] if hardware() != CPU else [name for name in _SETTINGS if name not in os.environ]
    prepare_environment()
    before = dict(os.environ)
    import torch_xla

    _added.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    # One device of a runtime that was started elsewhere works, but several need the settings.
    is_late = bool(lacking) and torch_xla._XLAC._xla_runtime_is_initialized()
    if is_late and len(torch_xla._XLAC._xla_get_devices()) > 1:
        settings = " ".join(f"{name}={_SETTINGS[name]}" for name in lacking)
        raise UnisonoError(
            "the XLA runtime of this process was started, with several virtual devices, before unisono was asked for "
            f"one; start the program with {settings} in its environment, or let DataParallel come first"
        )
    return torch_xla


_added: dict[str, str] = {}  # what importing torch_xla has put into the environment


def prepare_environment() -> None:
    """Set the environment variables that the runtime reads when it starts."""
    for name in _NARROWING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UnisonoError(
                f"{name}={os.environ[name]} is set: tensors would keep their type and silently lose its precision; "
                "unset it, and use mixed_precision='bf16' for mixed precision"
            )
    if not os.environ.get("PJRT_DEVICE"):
        os.environ["PJRT_DEVICE"] = hardware()
    for name, value in {**(_SETTINGS if hardware() == CPU else {}), **_added}.items():
        os.environ.setdefault(name, value)


def runtime_module() -> Any:
    """torch_xla's C++ module, if its runtime is running in this process; otherwise None."""
    xla = sys.modules.get("torch_xla")
    is_up = xla is not None and xla._XLAC._xla_runtime_is_initialized()
    return xla._XLAC if xla is not None and is_up else None


def hardware() -> str:
    """The runtime's hardware, as `PJRT_DEVICE` names it; if that is unset, a TPU where libtpu is installed, otherwise
    the CPU."""
    if named := os.environ.get("PJRT_DEVICE"):
        return named.split("_")[0].upper()
    return TPU if _has_libtpu() else CPU


@cache
def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def virtual_count() -> int:
    """The number of CPU devices that the environment asks for; 0 if it does not say."""
    return logical_devices() if "CPU_NUM_DEVICES" in os.environ else 0


def check_chips(count: int) -> None:
    """Refuse workers that the runtime of this TPU would not join, or would wait for. ValueError."""
    from torch_xla._internal import tpu

    if (hosts := tpu.num_tpu_workers()) > 1:
        raise ValueError(f"this TPU spans {hosts} machines, and their runtimes wait for one another: use one machine's")
    chips = tpu.num_available_chips()
    if count > 1 and (cores := tpu.num_logical_cores_per_chip()) > 1:
        raise ValueError(
            f"nprocs={count}, but each chip of this TPU has {cores} devices, and a process computes on one; use "
            f"DataParallel, which has a thread for each of the {chips * cores} devices, or nprocs=1"
        )
    if count not in (1, chips):
        raise ValueError(
            f"nprocs={count}, but there are {chips} TPU chips here, one for each process, and their runtimes wait for "
            f"one another: pass nprocs=1 or nprocs={chips}, or use DataParallel"
        )


def choose_chip(local_rank: int, local_world_size: int) -> None:
    """Make only its own chip visible to this process, and the other processes' chips known to the runtime."""
    from torch_xla._internal import tpu

    if local_world_size == 1:
        tpu.configure_one_chip_topology()
    else:
        tpu.configure_topology(local_rank, local_world_size)


def missing_reason() -> str:
    """Why XLA cannot be used here, and how to change that; "" if it can."""
    if (reason := _not_installed()) or hardware() in (CPU, TPU):
        return reason
    return f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} is neither CPU nor TPU, the supported ones; unset it"


@cache
def _not_installed() -> str:
    """Why torch_xla cannot be used with this torch; "" if it can."""
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return "torch_xla is not installed: pip install 'unisono[xla]'"
    wanted = ".".join(version.split(".")[:2])
    if ".".join(torch.__version__.split(".")[:2]) != wanted:
        return (
            f"torch_xla {version} works with torch {wanted}, not with {torch.__version__}: pip install 'unisono[xla]'"
        )
    return ""
