"""Barriers: they end a step on devices that record work before they execute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.arguments import check_type
from unisono.backends import resolve_device
from unisono.backends.device import Device, DeviceLike
from unisono.protocols import Backend
from unisono.world import current_world


def lazy_barrier(
    device: DeviceLike | Sequence[DeviceLike] | None = None,
    devices: Sequence[DeviceLike] = (),
    wait: bool = False,
) -> None:
    """End the step on a device, so that a lazy device executes what it has recorded. On eager devices there is nothing
    to do.

    A lazy device compiles what was recorded since the last barrier as one graph. A loader's `next()` and an optimizer's
    step end the step implicitly; a loop with neither keeps recording, so it must call this once per iteration.

    Args:
        device: one device, or a list: the step ends on all of them before any is waited for. None uses this rank's
            device.
        devices: further devices. (X10 expects the devices that reduce with this one; here devices reduce in separate
            graphs, so there is nothing to wait for.)
        wait: return only when all work submitted to the devices has finished, on eager devices too.

    Raises:
        TypeError: `device` is not a device, or `wait` is not a bool.
        ValueError: there is no such device here, or the list is empty.
    """
    check_type(wait, "wait", "pass True or False", bool)
    resolved = _resolve(device) + (_resolve(devices) if devices else [])
    for backend, each in resolved:
        backend.mark_step(each)
    if wait:
        for backend, each in resolved:
            backend.synchronize(each)


def _resolve(device: DeviceLike | Sequence[DeviceLike] | None) -> list[tuple[Backend, torch.device]]:
    if device is None:
        world = current_world()
        return [(world.backend, world.device)]
    several = device if isinstance(device, Sequence) and not isinstance(device, str) else [device]
    if not several:
        raise ValueError("device=[] is empty; pass at least one device, or None for this rank's")
    return [resolve_device(each.torch_device if isinstance(each, Device) else each) for each in several]
