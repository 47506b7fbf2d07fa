"""Check the arguments of an Accelerator, and choose its world."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

import torch
from torch.amp import GradScaler

from unisono.arguments import check_choice, check_type
from unisono.backends import CPU, resolve_device
from unisono.parallel.prepared.schedule_units import Unit
from unisono.parallel.strategies.strategy import Strategy
from unisono.protocols import Backend, Feature
from unisono.strategies import DDP, Choice
from unisono.world import World, solo_world

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_features(world: World, strategy: type[Strategy], options: Choice, precision: str, compile: Any) -> None:
    """Refuse features that the world's devices do not support.

    Raises:
        ValueError: a feature is not supported; the message names an alternative.
    """
    hook = options.comm_hook if isinstance(options, DDP) else None
    asked: dict[str, tuple[Feature, bool]] = {
        f"strategy={strategy.name!r}": ("process_group", world.is_of_processes and strategy.is_needed),
        f"comm_hook={hook!r}": ("process_group", world.is_of_processes and hook is not None),
        f"mixed_precision={precision!r}": ("fp16", precision == "fp16"),
        "compile": ("compile", compile is not False),
    }
    for what, (feature, is_asked) in asked.items():
        reason = world.backend.unsupported_reason(feature) if is_asked else None
        if reason is not None:
            raise ValueError(f"{what} does not work with {world.device}: {reason}")


def world_on(world: World, device: str | int | torch.device | None, cpu: bool, strategy: type[Strategy]) -> World:
    """Return the world on the requested device, and start using the device."""
    strategy.check_world(world)
    device = getattr(device, "torch_device", device)  # given as a `Device`
    if cpu and device is not None:
        raise ValueError(f"cpu=True and device={device!r} contradict each other; pass one of them")
    if not cpu and device is None:
        _enter(world.backend, world.device, strategy)
        return world
    backend, wanted = resolve_device(CPU if cpu else device or 0)
    if world.world_size == 1:
        _enter(backend, wanted, strategy)
        return solo_world(backend, wanted, world.timeline)
    names_one = isinstance(device, int) or (device is not None and torch.device(device).index is not None)
    if wanted.type != world.device.type or (names_one and wanted != world.device):
        raise ValueError(
            f"{f'device={device!r}' if not cpu else 'cpu=True'}, but this is rank {world.rank} of "
            f"{world.world_size}, whose device is {world.device}; choose the ranks' devices where they are started"
        )
    return world


def _enter(backend: Backend, device: torch.device, strategy: type[Strategy]) -> None:
    strategy.enter(backend, device)
    backend.start(device)
    backend.activate(device)


_SWITCH = ("pass True or False", bool)
_TYPES: dict[str, tuple[Any, ...]] = {
    "compile": ("pass True, or torch.compile's arguments", bool, Mapping),
    "seed": ("pass an integer, or None", int, NoneType),
    "max_grad_norm": ("pass a number, or None", int, float, NoneType),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "mixed_precision": ("no", *AUTOCAST),
    "loss_reduction": ("mean", "sum"),
    "schedule_unit": (*get_args(Unit), None),
}


def check_arguments(
    mixed_precision: Any, max_grad_norm: Any, nan_guard: Any, scaler_options: Any, **others: Any
) -> None:
    """Check the arguments of an Accelerator that need no device.

    Raises:
        TypeError, ValueError: one is out of range, or conflicts with another one.
    """
    given = {"mixed_precision": mixed_precision, "max_grad_norm": max_grad_norm, "nan_guard": nan_guard, **others}
    for name, value in given.items():
        if name in _CHOICES:
            check_choice(value, name, *_CHOICES[name])
        else:
            advice, *kinds = _TYPES.get(name, _SWITCH)
            check_type(value, name, advice, *kinds)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r} removes every gradient; pass a positive number, or None")
    if nan_guard and mixed_precision == "fp16":
        raise ValueError(
            "nan_guard=True and mixed_precision='fp16' contradict each other: fp16 skips steps whose gradients "
            "overflow; use bf16, or drop the guard"
        )
    if scaler_options and mixed_precision != "fp16":
        raise ValueError(
            f"scaler_options={scaler_options!r} are for mixed_precision='fp16', and it is {mixed_precision!r}"
        )
    known = list(inspect.signature(GradScaler).parameters)[1:]  # without the device
    if unknown := [name for name in scaler_options or () if name not in known]:
        raise ValueError(f"scaler_options have no {unknown[0]!r}; torch's GradScaler takes {', '.join(known)}")


def check_accumulation(steps: Any) -> None:
    """Check a number of microbatches. Raises TypeError, ValueError."""
    check_type(steps, "gradient_accumulation_steps", "pass an integer", int)
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps={steps} is too small; pass 1 for a step on each batch, or more")
