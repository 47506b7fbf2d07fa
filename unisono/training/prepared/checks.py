"""Checks the arguments of an Accelerator, and chooses its world."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

import torch
from torch.amp import GradScaler

from unisono.arguments import check_choice, check_integer, check_type
from unisono.batches.virtual_ranks import VirtualRanks, virtual_of
from unisono.devices import CPU, resolve_device
from unisono.protocols import Backend, Feature
from unisono.strategies import DDP, FSDP, Options
from unisono.torch_private import set_lru_cache
from unisono.training.prepared.scheduler import Unit
from unisono.training.strategies.strategy import Strategy
from unisono.world import World, solo_world

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_features(world: World, strategy: type[Strategy], options: Options, precision: str, compile: Any) -> None:
    """Refuse (ValueError) features that the world's devices do not support."""
    hook = options.comm_hook if isinstance(options, DDP) else None
    asked: dict[str, tuple[Feature, bool]] = {
        f"strategy={options.name!r}": ("process_group", world.is_of_processes and strategy.is_needed),
        f"comm_hook={hook!r}": ("process_group", world.is_of_processes and hook is not None),
        f"mixed_precision={precision!r}": ("fp16", precision == "fp16"),
        "compile": ("compile", compile is not False),
    }
    for what, (feature, is_asked) in asked.items():
        reason = world.backend.unsupported_reason(feature) if is_asked else None
        if reason is not None:
            raise ValueError(f"{what} does not work with {world.device}: {reason}")
    if compile is not False and world.world_size > 1 and not world.is_of_processes and set_lru_cache is None:
        raise ValueError(
            f"compile={compile!r} on {world.world_size} threads: torch {torch.__version__} runs nothing compiled while "
            "another thread compiles; use processes (spawn), or torch 2.13"
        )


def family_of(device: str | int | torch.device | None, cpu: bool) -> str | None:
    """The name of the device family that the arguments ask for; None if they leave it open."""
    wanted = CPU if cpu else device
    return None if wanted is None or isinstance(wanted, int) else resolve_device(wanted)[0].name


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
        return solo_world(backend, wanted, world.timeline, world.state)
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


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check the arguments of an Accelerator, by name, that need no device: their types, their ranges (TypeError,
    ValueError), and whether they go together."""
    check_choice(given["mixed_precision"], "mixed_precision", "no", *AUTOCAST)
    norm = given["max_grad_norm"]
    check_type(norm, "max_grad_norm", "pass a positive number, or None", int, float, NoneType)
    if norm is not None and not norm > 0:
        raise ValueError(f"max_grad_norm={norm!r} is not above 0; pass a positive number, or None")
    check_accumulation(given["gradient_accumulation_steps"])
    check_type(given["compile"], "compile", "pass True, or torch.compile's arguments", bool, Mapping)
    check_integer(given["digest_every"], "digest_every", 0)
    check_type(given["seed"], "seed", "pass an integer, or None", int, NoneType)
    for name in (CPU, "device_placement", "split_batches", "sync_batchnorm"):  # the first is `cpu=`
        check_type(given[name], name, "pass True or False", bool)
    for name in ("project_dir", "logging_dir"):
        check_type(given[name], name, "pass a path, or None", str, os.PathLike, NoneType)
    check_choice(given["schedule_unit"], "schedule_unit", *get_args(Unit), None)
    options, precision = given["scaler_options"], given["mixed_precision"]
    known = list(inspect.signature(GradScaler).parameters)[1:]  # without the device
    unknown = [name for name in options or () if name not in known]
    if options and precision != "fp16":
        raise ValueError(f"scaler_options={options!r} are for mixed_precision='fp16', and it is {precision!r}")
    if unknown:
        raise ValueError(f"scaler_options have no {unknown[0]!r}; torch's GradScaler takes {', '.join(known)}")


def _is_plain(options: Options) -> bool:
    if isinstance(options, FSDP):
        dtypes = options.param_dtype, options.reduce_dtype, options.output_dtype
        return options.replicas == 1 and not options.offload and options.broadcast_buffers and not any(dtypes)
    return isinstance(options, DDP) and options.comm_hook is None and options.broadcast_buffers


def check_virtual(given: Mapping[str, Any], world: World, options: Options) -> VirtualRanks:
    """Check, as `check_arguments`, `virtual_ranks` and what has to fit it; returns those that this rank carries."""
    count = virtual_of(given["virtual_ranks"]).count
    every, reason = given["gradient_accumulation_steps"], world.backend.unsupported_reason("virtual_ranks")
    refused = {
        f"gradient_accumulation_steps={every}": (every != 1, f"pass virtual_ranks={count * every}"),
        "balance=True and strategy='fsdp'": (
            virtual_of(given["virtual_ranks"]).balance and isinstance(options, FSDP),
            "its ranks gather parameters for each batch, and with balance they have different numbers of them",
        ),
        "sync_batchnorm=True": (given["sync_batchnorm"], "each virtual rank has statistics of its own"),
        f"strategy={options.name!r}": (
            not _is_plain(options),
            "pass 'ddp' or 'zero1', without comm_hook= or broadcast_buffers=, or 'fsdp', without replicas=, offload=, "
            "broadcast_buffers= and dtypes",
        ),
        "compile= and strategy='fsdp'": (
            given["compile"] is not False and isinstance(options, FSDP),
            "graphs end where FSDP2 gathers, and compute otherwise on one rank; leave out compile=, or pass 'zero1'",
        ),
        f"{world.device}": (reason is not None, reason),
        "ranks that are threads": (world.world_size > 1 and not world.is_of_processes, "start processes (spawn)"),
    }
    for what, (is_asked, way) in refused.items():
        if is_asked:
            raise ValueError(f"virtual_ranks={count} does not go with {what}: {way}")
    return VirtualRanks.carried_by(world.rank, world.world_size, given["virtual_ranks"])


def check_snapshots(every: int, kept: int, world: World, strategy: type[Strategy], options: Options) -> None:
    """Check `snapshot_every` and `snapshots`, and that they fit the ranks; raises as `check_arguments`."""
    check_integer(kept, "snapshots", 1)
    check_integer(every, "snapshot_every", 1, "pass a number of optimizer steps, or None")
    if not strategy.shares_state:
        raise ValueError(
            f"snapshot_every={every} does not go with strategy={options.name!r}: its ranks have no common state "
            "after each step; leave it out"
        )
    if world.world_size > 1 and not world.is_of_processes:
        raise ValueError(f"snapshot_every={every} does not go with ranks that are threads: start processes (spawn)")


def check_accumulation(steps: Any) -> None:
    """Check a new number of microbatches per step, as `check_arguments`."""
    check_integer(steps, "gradient_accumulation_steps", 1)
