"""torch's global switches: what a program sets once and expects to apply wherever it computes. Read here, set
elsewhere.

They apply to the process, except for the grad, inference and autocast modes, which are the calling thread's. None of
them starts a device's runtime.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.multiprocessing

from unisono.devices.accelerator import current_accelerator
from unisono.torch_private import get_fp32_precision, set_fp32_precision

Switch = tuple[Callable[[], Any], Callable[[Any], object]]
"""A getter, and a setter for the value that the getter returned."""

_FP32_PLACES = [  # in this order: setting a wider one sets the narrower ones
    ("generic", "all"),
    *((family, operation) for family in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
]
_DENORMAL = 1e-310
_modes = ExitStack()  # entered, and never left


def _attribute(path: str) -> Switch:
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _attention(kind: str) -> Switch:
    owner = torch.backends.cuda
    return getattr(owner, f"{kind}_sdp_enabled"), getattr(owner, f"enable_{kind}_sdp")


def _set_inference_mode(is_on: bool) -> None:
    if is_on:
        _modes.enter_context(torch.inference_mode())


def _autocast_families() -> list[str]:
    return ["cpu", *filter(None, [current_accelerator()])]


def _autocast() -> list[Any]:
    families = [
        (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _autocast_families()
    ]
    return [*families, torch.is_autocast_cache_enabled()]


def _set_autocast(values: list[Any]) -> None:
    *families, is_cached = values
    for family, is_on, dtype in families:
        torch.set_autocast_enabled(family, is_on)
        torch.set_autocast_dtype(family, dtype)
    torch.set_autocast_cache_enabled(is_cached)


def is_as_in_a_new_thread() -> bool:
    """Whether the calling thread makes the same tensors as a new thread would, except for gradients."""
    is_any = torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _autocast_families()))
    return not is_any and torch.get_default_device().type == "cpu"


def _flush_denormal() -> bool:
    """Determined by an experiment, since torch has no getter; it is a register of the thread, and affects Python's
    floats, too."""
    return math.prod([_DENORMAL, 1.0]) == 0.0


_ATTRIBUTES = (
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.deterministic",
    "torch.backends.opt_einsum.enabled",
    "torch.backends.opt_einsum.strategy",
    "torch.backends.quantized.engine",
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")

SWITCHES: dict[str, Switch] = {
    "torch.manual_seed": (  # as bytes, since unpickling a tensor would take ten milliseconds
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # Without its index: each rank has its own.
    "torch.set_default_device": (lambda: torch.get_default_device().type, torch.set_default_device),
    "torch.use_deterministic_algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.backends.fp32_precision": (  # after the older setting for it
        lambda: [get_fp32_precision(*place) for place in _FP32_PLACES],
        lambda values: [set_fp32_precision(*place, value) for place, value in zip(_FP32_PLACES, values, strict=True)],
    ),
    **{path: _attribute(path) for path in _ATTRIBUTES},
    **{f"torch.backends.cuda.enable_{kind}_sdp": _attention(kind) for kind in _ATTENTION},
    "torch.set_flush_denormal": (_flush_denormal, torch.set_flush_denormal),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.inference_mode": (torch.is_inference_mode_enabled, _set_inference_mode),
    "torch.autocast": (_autocast, _set_autocast),
    "torch.autograd.set_detect_anomaly": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "torch.multiprocessing.set_sharing_strategy": (
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
}
"""By the name that a program sets it under."""
