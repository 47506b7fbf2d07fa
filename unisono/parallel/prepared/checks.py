"""Check the arguments of an Accelerator, and choose its world."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.amp import GradScaler

from unisono.backends import CPU, resolve_device
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


def check_choices(compile: Any, seed: Any) -> None:
    if not isinstance(compile, bool | Mapping):
        raise TypeError(
            f"compile={compile!r} is of type {type(compile).__name__}; pass True, or torch.compile's arguments"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed={seed!r} is of type {type(seed).__name__}; pass an integer, or None")


def check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; pass True or False")


def check_accumulation(steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"gradient_accumulation_steps={steps!r} is of type {type(steps).__name__}; pass an integer")
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps={steps} is too small; pass 1 for a step on each batch, or more")


def check_arguments(precision: Any, max_grad_norm: Any, nan_guard: bool) -> None:
    if precision not in ("no", *AUTOCAST):
        raise ValueError(f"mixed_precision={precision!r} does not exist; choose one of no, bf16, fp16")
    if max_grad_norm is not None and (isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, int | float)):
        raise TypeError(
            f"max_grad_norm={max_grad_norm!r} is of type {type(max_grad_norm).__name__}; pass a number, or None"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r} removes every gradient; pass a positive number, or None")
    if nan_guard and precision == "fp16":
        raise ValueError(
            "nan_guard=True and mixed_precision='fp16' contradict each other: fp16 skips steps whose gradients "
            "overflow; use bf16, or drop the guard"
        )


def check_reduction(loss_reduction: Any) -> None:
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} does not exist; choose one of mean, sum")


def check_scaler(options: Any, precision: str) -> None:
    known = list(inspect.signature(GradScaler).parameters)[1:]  # without the device
    unknown = [name for name in options or () if name not in known]
    if options and precision != "fp16":
        raise ValueError(f"scaler_options={options!r} are for mixed_precision='fp16', and it is {precision!r}")
    if unknown:
        raise ValueError(f"scaler_options have no {unknown[0]!r}; torch's GradScaler takes {', '.join(known)}")
